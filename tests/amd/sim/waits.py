"""Waits for memory operations, fences, scalar loads and clocks."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np

from tests.amd.sim.access import GlobalAccess
from tests.amd.sim.addresses import scope_of
from tests.amd.sim.errors import Unknown
from tests.amd.sim.in_flight import Operation, Space
from tests.amd.sim.operands import scalar_source, sgpr_of
from tests.amd.sim.program import Instruction
from tests.amd.sim.table import Execute, Target, allow_modifiers, operands, semantics
from tests.amd.sim.wave import AWAITED, UNDEFINED, Wave

GFX9_COUNTERS = {"vmcnt": "vm", "lgkmcnt": "lgkm"}
GFX12_COUNTERS = {
    "load": ("load",),
    "store": ("store",),
    "ds": ("ds",),
    "km": ("km",),
    "loadcnt_ds": ("load", "ds"),
    "storecnt_ds": ("store", "ds"),
}
# Counters of what these kernels do not have: exports, samples, replays of address translation.
IDLE_COUNTERS = ("s_wait_xcnt", "s_wait_expcnt", "s_wait_samplecnt", "s_wait_bvhcnt")


@semantics("s_waitcnt")
def wait_counts(instruction: Instruction, target: Target) -> Execute:
    limits = re.findall(r"(\w+)\((\d+)\)", instruction.text)
    unknown = {name for name, _ in limits} - {*GFX9_COUNTERS, "expcnt"}
    if unknown or not limits:
        raise Unknown(f"{instruction.text}")
    waits = [(GFX9_COUNTERS[name], int(most)) for name, most in limits if name in GFX9_COUNTERS]

    def execute(wave: Wave) -> None:
        for counter, most in waits:
            wave.in_flight.wait(counter, most)

    return execute


@semantics(*(f"s_wait_{name}cnt" for name in GFX12_COUNTERS))
def wait_count(instruction: Instruction, target: Target) -> Execute:
    counters = GFX12_COUNTERS[instruction.mnemonic.removeprefix("s_wait_").removesuffix("cnt")]
    limit = int(operands(instruction, 1)[0], 0)
    # One number of six bits per counter, the first one's above the second's.
    limits = [limit >> 8 & 63, limit & 63] if len(counters) == 2 else [limit]

    def execute(wave: Wave) -> None:
        for counter, most in zip(counters, limits, strict=True):
            wave.in_flight.wait(counter, most)

    return execute


@semantics(*IDLE_COUNTERS)
def wait_for_nothing(instruction: Instruction, target: Target) -> Execute:
    return lambda wave: None


def _fence(names: str, counter: str, space: Space, action: Callable[[Any, str], None]) -> None:
    def bind(instruction: Instruction, target: Target) -> Execute:
        allow_modifiers(instruction, "sc0", "sc1", "scope")
        scope = scope_of(instruction.modifiers)
        counters = "vm" if target.is_gfx9 else counter

        def execute(wave: Wave) -> None:
            def touch() -> None:
                action(wave.block.port, scope)

            wave.in_flight.issue(Operation({counters}, space, (0, 0), touch, None, wave.place()))

        return execute

    semantics(*names.split())(bind)


_fence("buffer_wbl2 global_wb", "store", Space.RELEASE, lambda port, scope: port.write_back(scope))
_fence("buffer_inv global_inv", "load", Space.ACQUIRE, lambda port, scope: port.invalidate(scope))


SCALAR_LOADS = {"dword": 1, "dwordx2": 2, "dwordx4": 4, "dwordx8": 8, "dwordx16": 16} | {
    "b32": 1,
    "b64": 2,
    "b96": 3,
    "b128": 4,
    "b256": 8,
    "b512": 16,
}


@semantics(*(f"s_load_{name}" for name in SCALAR_LOADS))
def scalar_load(instruction: Instruction, target: Target) -> Execute:
    allow_modifiers(instruction, "offset", "scale_offset", "nt", "scope", "th")
    destination, base, offset = operands(instruction, 3)
    words = SCALAR_LOADS[instruction.mnemonic.removeprefix("s_load_")]
    index, _ = sgpr_of(destination)
    start, distance = scalar_source(base, 64), scalar_source(offset)
    more = int(instruction.modifiers.get("offset", "0"), 0)
    scale = 4 * words if "scale_offset" in instruction.modifiers else 1

    def execute(wave: Wave) -> None:
        address = start(wave) + distance(wave) * scale + more & ~3
        access = GlobalAccess(wave.block.port, np.array([address], np.uint64), "wave")
        _issue_scalar(wave, target, index, words, access.extent, lambda: _words(access, 4 * words))

    return execute


def _words(access: GlobalAccess, size: int) -> list[Any]:
    """What a compiler loads along, such as the padding of a struct, may be undefined."""
    data, defined = access.port.load_unchecked(access.addresses, size, access.scope)
    values, known = data.reshape(-1).view(np.uint32).tolist(), np.all(defined.reshape(-1, 4), axis=1).tolist()
    return [value if known[i] else UNDEFINED for i, value in enumerate(values)]


def _issue_scalar(
    wave: Wave, target: Target, index: int, words: int, extent: tuple[int, int], touch: Callable[[], list[Any]]
) -> None:
    for register in range(index, index + words):
        wave.write_sgpr(register, AWAITED)

    def deliver(values: list[Any]) -> None:
        wave.sgpr[index : index + words] = values

    counter = "lgkm" if target.is_gfx9 else "km"
    wave.in_flight.issue(Operation({counter}, Space.CONSTANT, extent, touch, deliver, wave.place()))


@semantics("s_memtime", "s_memrealtime", "s_sendmsg_rtn_b64", "s_get_shader_cycles_u64")
def clock(instruction: Instruction, target: Target) -> Execute:
    """A message or a load from the clock, but for the last one, which is plain arithmetic."""
    destination, *message = instruction.operands
    if message and message != ["sendmsg(MSG_RTN_GET_REALTIME)"]:
        raise Unknown(f"message {message[0]}")
    index, _ = sgpr_of(destination)

    def ticks(wave: Wave) -> list[Any]:
        now = wave.block.machine.clock()
        return [now & 0xFFFFFFFF, now >> 32]

    def execute(wave: Wave) -> None:
        if instruction.mnemonic == "s_get_shader_cycles_u64":
            for offset, word in enumerate(ticks(wave)):
                wave.write_sgpr(index + offset, word)
        else:
            _issue_scalar(wave, target, index, 2, (0, 0), lambda: ticks(wave))

    return execute
