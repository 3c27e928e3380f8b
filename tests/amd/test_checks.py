"""Each check finds the fault that it is for, put into a kernel in which it finds none otherwise."""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import pytest

from mori import jit
from tests.amd import checks
from tests.amd.build import Build, build, build_kernel
from tests.amd.checks import Check, Subject
from tests.amd.inspection import build_findings, resources_of
from tests.amd.sim.program import Instruction, Program, parse


@functools.cache
def built(kernel: str, arch: str) -> Build:
    return build_kernel(kernel, arch)


def with_instruction(program: Program, index: int, text: str) -> Program:
    old = program.instructions[index]
    changed = copy.copy(program)
    changed.instructions = list(program.instructions)
    changed.instructions[index] = replace(parse(text), address=old.address, bytes=old.bytes)
    return changed


class Fault(NamedTuple):
    """`text(instruction)` takes the place of the first instruction for which `fits(all, index)`."""

    check: Check
    kernel: str
    arch: str
    fits: Callable[[list[Instruction], int], bool]
    text: Callable[[Instruction], str]


def nothing(_: Instruction) -> str:
    return "s_nop 0"


def for_this_gpu(one: Instruction) -> str:
    return re.sub(r" (sc[01]|scope:\w+)", "", one.text)


def after_write_back(fits: Callable[[Instruction], bool]) -> Callable[[list[Instruction], int], bool]:
    return lambda every, index: checks.is_write_back(every[index - 1]) and fits(every[index])


def is_named(pattern: str) -> Callable[[list[Instruction], int], bool]:
    return lambda every, index: re.match(pattern, every[index].mnemonic) is not None


def is_flag(every: list[Instruction], index: int) -> bool:
    """The first store behind a release."""
    behind = every[max(0, index - 30) : index]
    last = max((at for at, one in enumerate(behind) if checks.is_write_back(one)), default=None)
    if last is None or not every[index].mnemonic.startswith("global_store"):
        return False
    return not any(checks.changes_memory(one) or checks.is_barrier(one) for one in behind[last:])


def is_poll(every: list[Instruction], index: int) -> bool:
    """The last load for the system before a sleep: inside the loop that sleeps."""
    sleep = next(at for at, one in enumerate(every) if one.mnemonic == "s_sleep")
    loads = [at for at in range(sleep) if checks.is_load(every[at]) and checks.is_system_wide(every[at])]
    return index == loads[-1]


def releases_rows(every: list[Instruction], index: int) -> bool:
    """A write-back with nothing but its wait before the block barrier."""
    following = every[index + 1 : index + 4]
    return checks.is_write_back(every[index]) and any(checks.is_barrier(one) for one in following)


def is_acquired_load(every: list[Instruction], index: int) -> bool:
    return checks.is_invalidation(every[index - 1]) or (
        every[index].mnemonic.startswith("v_mov") and any(map(checks.is_invalidation, every[index - 6 : index]))
    )


FAULTS = [
    Fault(checks.write_backs_are_waited_for, "dispatch", "gfx942", after_write_back(checks.waits_for_stores), nothing),
    Fault(
        checks.write_backs_are_waited_for, "dispatch", "gfx950", is_named("buffer_wbl2"), lambda _: "buffer_wbl2 sc1"
    ),
    Fault(
        checks.write_backs_are_waited_for, "combine_bf16", "gfx1250", after_write_back(checks.waits_for_stores), nothing
    ),
    Fault(checks.released_words_reach_the_system, "dispatch", "gfx942", is_flag, for_this_gpu),
    Fault(checks.released_words_reach_the_system, "combine_bf16", "gfx1250", is_flag, for_this_gpu),
    Fault(checks.rows_are_released_by_their_wave, "dispatch", "gfx942", releases_rows, nothing),
    Fault(checks.rows_are_released_by_their_wave, "combine_bf16", "gfx1250", releases_rows, nothing),
    Fault(checks.polls_reach_the_system, "dispatch", "gfx942", is_poll, for_this_gpu),
    Fault(checks.polls_reach_the_system, "combine_bf16", "gfx1250", is_poll, for_this_gpu),
    Fault(checks.exchanges_reach_the_system, "dispatch", "gfx942", is_named("global_atomic_cmpswap"), for_this_gpu),
    Fault(checks.exchanges_reach_the_system, "dispatch", "gfx1250", is_named("global_atomic_cmpswap"), for_this_gpu),
    Fault(
        checks.words_are_in_memory_for_all,
        "dispatch",
        "gfx942",
        is_named("global_atomic_add"),
        lambda one: one.text.replace("global", "flat"),
    ),
    Fault(
        checks.scalar_loads_are_of_arguments,
        "combine_bf16",
        "gfx942",
        is_acquired_load,
        lambda _: "s_load_dword s8, s[2:3], 0xc",
    ),
    Fault(
        checks.rows_move_in_16_bytes,
        "dispatch",
        "gfx950",
        lambda every, index: checks.is_nontemporal(every[index]),
        lambda one: one.text.replace("dwordx4", "dwordx2"),
    ),
    Fault(
        checks.conversions_are_by_instruction,
        "combine_bf16",
        "gfx950",
        is_named("v_cvt_pk_bf16"),
        lambda one: "v_cvt_f32_fp8 v0, v1",
    ),
    Fault(
        checks.products_are_rounded,
        "combine_bf16",
        "gfx950",
        is_named("v_(pk_)?add_f32"),
        lambda _: "v_fma_f32 v0, v1, v2, v3",
    ),
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: f"{fault.check.__name__}-{fault.arch}-{fault.kernel}")
def test_a_fault_is_found(fault: Fault) -> None:
    original = built(fault.kernel, fault.arch).program
    assert list(fault.check(Subject(fault.kernel, original))) == []
    every = original.instructions
    index = next(index for index in range(len(every)) if fault.fits(every, index))
    text = fault.text(every[index])
    faulty = Subject(fault.kernel, with_instruction(original, index, text))
    assert list(fault.check(faulty)) != [], f"{every[index].text} became {text}"


def test_every_check_has_a_fault() -> None:
    assert {fault.check for fault in FAULTS} == set(checks.CHECKS)


# Sources that no kernel should be like, and what is said of them.
CARELESS = {
    "warnings": "{ int unused; *out = 1; }",
    "scratch memory": "{ volatile int many[64]; for (int i = 0; i < 64; ++i) many[i] = i; *out = many[*out]; }",
}


@pytest.mark.parametrize("what", CARELESS)
def test_a_careless_source_is_found(what: str) -> None:
    source = f'extern "C" __attribute__((global)) void careless(int* out) {CARELESS[what]}\n'
    careless = build(jit.Spec("careless", source, kernels=("careless",), target="hip", arch="gfx942"))
    assert {finding.partition(":")[0] for finding in build_findings(careless)} == {what}


def test_a_lost_access_changes_the_table() -> None:
    original = built("pack", "gfx942")
    index = next(index for index, one in enumerate(original.program.instructions) if checks.is_nontemporal(one))
    without = original._replace(program=with_instruction(original.program, index, "s_nop 0"))
    before, after = (resources_of(Subject("pack", one.program), one) for one in (original, without))
    assert {name for name in before if before[name] != after[name]} == {"row_loads"}
