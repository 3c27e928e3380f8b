"""What must hold of a kernel's instructions. Each check yields its findings as texts; none means that all is well."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

from tests.amd.arguments import scalar_loads_of_other_memory
from tests.amd.flow import Flow
from tests.amd.sim.program import Instruction, Program


@dataclass(frozen=True)
class Subject:
    """A kernel under inspection. `name` is that of csrc/kernels/table.hpp."""

    name: str
    program: Program

    @property
    def instructions(self) -> list[Instruction]:
        return self.program.instructions

    @cached_property
    def flow(self) -> Flow:
        return Flow(self.program)

    @cached_property
    def waiting_loops(self) -> dict[int, set[int]]:
        """The innermost loop around each s_sleep."""
        return {sleep: self.flow.innermost_loop(sleep) for sleep in self.all(lambda one: one.mnemonic == "s_sleep")}

    def all(self, fits: Callable[[Instruction], bool]) -> list[int]:
        return [index for index, one in enumerate(self.instructions) if fits(one)]

    def where(self, index: int) -> str:
        one = self.instructions[index]
        return f"{self.program.place(one.address)}: {one.text}"


Check = Callable[[Subject], Iterator[str]]


def is_write_back(one: Instruction) -> bool:
    """Of caches: the first half of a release."""
    return one.mnemonic in ("buffer_wbl2", "global_wb")


def is_invalidation(one: Instruction) -> bool:
    """Of caches: the second half of an acquire."""
    return one.mnemonic in ("buffer_inv", "global_inv")


def is_barrier(one: Instruction) -> bool:
    return one.mnemonic.startswith("s_barrier")


def waits_for_stores(one: Instruction) -> bool:
    return re.match(r"s_waitcnt .*vmcnt\(0\)|s_wait_storecnt(_dscnt)? 0x0$", one.text) is not None


def is_access(one: Instruction) -> bool:
    """Of memory that others can see."""
    return one.mnemonic.startswith(("global_load", "global_store", "global_atomic", "flat_", "scratch_"))


def is_load(one: Instruction) -> bool:
    return is_access(one) and "_load_" in one.mnemonic


def changes_memory(one: Instruction) -> bool:
    return is_access(one) and not is_load(one)


def is_system_wide(one: Instruction) -> bool:
    if "_atomic_" in one.mnemonic:  # where sc0 says that the old value comes back
        return "sc1" in one.modifiers or one.modifiers.get("scope") == "SCOPE_SYS"
    return {"sc0", "sc1"} <= one.modifiers.keys() or one.modifiers.get("scope") == "SCOPE_SYS"


def is_nontemporal(one: Instruction) -> bool:
    return "nt" in one.modifiers or one.modifiers.get("th", "").endswith("_NT")


def write_backs_are_waited_for(subject: Subject) -> Iterator[str]:
    """On every way from a write-back a wait for stores comes before any access, barrier or end: or else a flag may
    overtake its data."""
    findings = []

    def step(index: int, start: int) -> int | None:
        one = subject.instructions[index]
        if waits_for_stores(one):
            return None
        if is_access(one) or is_invalidation(one) or is_barrier(one) or one.mnemonic == "s_endpgm":
            findings.append(f"{subject.where(start)} is not waited for before {subject.where(index)}")
        return start

    for start in subject.all(is_write_back):
        if not is_system_wide(subject.instructions[start]):
            findings.append(f"{subject.where(start)} is not for the system")
        subject.flow.walk(start, start, step)
    yield from findings


def released_words_reach_the_system(subject: Subject) -> Iterator[str]:
    """What is stored first behind a release is the flag, or the abort word. Behind in the listing, that is: there are
    ways in the flow that no wave takes."""
    for start in subject.all(is_write_back):
        for index in range(start + 1, len(subject.instructions)):
            one = subject.instructions[index]
            if changes_memory(one) and not is_system_wide(one):
                yield f"{subject.where(index)} follows {subject.where(start)}"
            if changes_memory(one) or is_write_back(one) or is_barrier(one):
                break


def rows_are_released_by_their_wave(subject: Subject) -> Iterator[str]:
    """Between storing rows and a flag lie, in this order, a write-back by the same wave and a block barrier. A way that
    leads into a wait is followed no further: the words stored there are about an abort."""
    findings = []
    waits = set().union(*subject.waiting_loops.values())

    def step(index: int, state: tuple[int, bool]) -> tuple[int, bool] | None:
        start, released = state
        one = subject.instructions[index]
        if index in waits or (released and is_barrier(one)):
            return None
        if changes_memory(one) and is_system_wide(one):
            lacks = "a block barrier" if released else "a write-back and a block barrier"
            findings.append(f"between {subject.where(start)} and {subject.where(index)} lies no way through {lacks}")
            return None
        return start, released or is_write_back(one)

    for start in subject.all(lambda one: is_nontemporal(one) and changes_memory(one)):
        subject.flow.walk(start, (start, False), step)
    yield from findings


def polls_reach_the_system(subject: Subject) -> Iterator[str]:
    """Every load in a loop that waits: the word itself, the abort word, what a patient waiter looks at."""
    for sleep, loop in subject.waiting_loops.items():
        polls = [index for index in sorted(loop) if is_load(subject.instructions[index])]
        if len(polls) < 2:
            yield f"{subject.where(sleep)} is in no loop that loads a word and the abort word"
        for index in polls:
            if not is_system_wide(subject.instructions[index]):
                yield f"{subject.where(index)} polls a cache"


def exchanges_reach_the_system(subject: Subject) -> Iterator[str]:
    for index in subject.all(lambda one: "_cmpswap_" in one.mnemonic):
        if not is_system_wide(subject.instructions[index]):
            yield subject.where(index)


def scalar_loads_are_of_arguments(subject: Subject) -> Iterator[str]:
    """An acquire does not invalidate the scalar cache: behind one, nothing but arguments may come through it."""
    acquired: set[int] = set()

    def step(index: int, state: str) -> str:
        acquired.add(index)
        return state

    for start in subject.all(is_invalidation):
        if start not in acquired:
            subject.flow.walk(start, "acquired", step)
    for index in sorted(acquired & scalar_loads_of_other_memory(subject.program, subject.flow)):
        yield f"{subject.where(index)} comes after an acquire"


def rows_move_in_16_bytes(subject: Subject) -> Iterator[str]:
    """Accesses to rows bypass caches, each is of 16 bytes, and they stand in loops."""
    rows = subject.all(is_nontemporal)
    stores = [index for index in rows if changes_memory(subject.instructions[index])]
    if not stores or len(stores) == len(rows):
        yield f"{len(rows) - len(stores)} loads and {len(stores)} stores of rows"
    in_loops: set[int] = set()
    for index in rows:
        if not re.fullmatch(r"global_(load|store)_(dwordx4|b128)", subject.instructions[index].mnemonic):
            yield subject.where(index)
        if index not in in_loops:
            in_loops |= subject.flow.innermost_loop(index)
            if index not in in_loops:
                yield f"{subject.where(index)} is in no loop"


# By arch: of bfloat16 rounding, of fp8 and of fp4, each in both directions where there are two.
CONVERSIONS: dict[str, dict[str, set[str]]] = {
    "gfx942": {"fp8": {"v_cvt_f32_fp8", "v_cvt_pk_fp8_f32"}},
    "gfx950": {
        "bf16": {"v_cvt_pk_bf16_f32"},
        "fp8": {"v_cvt_f32_fp8", "v_cvt_pk_fp8_f32"},
        "fp4": {"v_cvt_scalef32_pk_f32_fp4", "v_cvt_scalef32_pk_fp4_f32"},
    },
    "gfx1250": {
        "bf16": {"v_cvt_pk_bf16_f32"},
        "fp8": {"v_cvt_f32_fp8", "v_cvt_pk_fp8_f32"},
        "fp4": {"v_cvt_scale_pk8_f32_fp4", "v_cvt_scalef32_pk8_fp4_f32"},
    },
}


def formats_of(kernel: str) -> set[str]:
    """That a kernel of this name converts. Rows that travel quantised are bfloat16 at both ends."""
    named = {word for word in ("bf16", "fp8", "fp4") if word in kernel}
    return named | ({"bf16"} if kernel.endswith(("_direct_cast", "_blockwise")) else set())


def conversions_are_by_instruction(subject: Subject) -> Iterator[str]:
    """Those of the formats at hand where the arch has them, and no others."""
    offered = CONVERSIONS[subject.program.arch]
    expected = set[str]().union(*(offered.get(word, set()) for word in formats_of(subject.name)))
    found = {one.mnemonic for one in subject.instructions if re.match(r"v_cvt_.*(bf16|fp8|bf8|fp4)", one.mnemonic)}
    if found != expected:
        yield f"converts by {sorted(found)}, expected {sorted(expected)}"


def products_are_rounded(subject: Subject) -> Iterator[str]:
    """No multiplication is contracted with an addition, but for five by which a division refines its result, and two
    with which a division of 64-bit integers begins."""
    every = [half for one in subject.instructions for half in (one, one.second) if half]
    contracted = sum(
        re.match(r"[sv]_(dual_|pk_)?(fma|fmac|mad|mac)[a-z]*_f32", one.mnemonic) is not None for one in every
    )
    divisions = sum(one.mnemonic == "v_div_fmas_f32" for one in every)
    of_integers = sum("fmac_f32" in one.mnemonic and "0xcf800000" in one.operands for one in every)  # -2^32
    if contracted != 5 * divisions + 2 * of_integers:
        yield f"{contracted} contracted multiplications, {divisions} divisions and {of_integers} of integers"


def words_are_in_memory_for_all(subject: Subject) -> Iterator[str]:
    """No atomic and no access for the system has to look whether its address is in scratch memory."""
    for index in subject.all(lambda one: one.mnemonic.startswith("flat_")):
        one = subject.instructions[index]
        if "_atomic_" in one.mnemonic or is_system_wide(one):
            yield subject.where(index)


CHECKS: tuple[Check, ...] = (
    write_backs_are_waited_for,
    released_words_reach_the_system,
    rows_are_released_by_their_wave,
    polls_reach_the_system,
    exchanges_reach_the_system,
    words_are_in_memory_for_all,
    scalar_loads_are_of_arguments,
    rows_move_in_16_bytes,
    conversions_are_by_instruction,
    products_are_rounded,
)
