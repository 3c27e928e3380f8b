"""Loads, stores and atomics of the flat, global, scratch and LDS instructions."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tests.amd.sim.access import NONE_UNDEFINED, Loaded, Reach
from tests.amd.sim.addresses import Addressing, addressing
from tests.amd.sim.in_flight import Operation, Space
from tests.amd.sim.operands import vgpr_of
from tests.amd.sim.program import Instruction
from tests.amd.sim.table import Execute, Target, semantics
from tests.amd.sim.wave import Wave


class Part(NamedTuple):
    """What an access moves between memory and registers."""

    bytes: int
    signed: bool = False
    half: str = ""
    """Only the low or the high half of the register takes part."""

    @property
    def words(self) -> int:
        return (self.bytes + 3) // 4


WHOLE_WORDS = {
    "dword": 4,
    "b32": 4,
    "dwordx2": 8,
    "b64": 8,
    "dwordx3": 12,
    "b96": 12,
    "dwordx4": 16,
    "b128": 16,
}
PARTS_LOADED = {name: Part(size) for name, size in WHOLE_WORDS.items()} | {
    "ubyte": Part(1),
    "u8": Part(1),
    "sbyte": Part(1, signed=True),
    "i8": Part(1, signed=True),
    "ushort": Part(2),
    "u16": Part(2),
    "sshort": Part(2, signed=True),
    "i16": Part(2, signed=True),
    "ubyte_d16": Part(1, half="low"),
    "ubyte_d16_hi": Part(1, half="high"),
    "d16_u8": Part(1, half="low"),
    "d16_hi_u8": Part(1, half="high"),
    "u8_d16": Part(1, half="low"),
    "u8_d16_hi": Part(1, half="high"),
    "short_d16": Part(2, half="low"),
    "short_d16_hi": Part(2, half="high"),
    "d16_b16": Part(2, half="low"),
    "d16_hi_b16": Part(2, half="high"),
    "u16_d16": Part(2, half="low"),
    "u16_d16_hi": Part(2, half="high"),
}
PARTS_STORED = {name: Part(size) for name, size in WHOLE_WORDS.items()} | {
    "byte": Part(1),
    "b8": Part(1),
    "short": Part(2),
    "b16": Part(2),
    "byte_d16_hi": Part(1, half="high"),
    "d16_hi_b8": Part(1, half="high"),
    "short_d16_hi": Part(2, half="high"),
    "d16_hi_b16": Part(2, half="high"),
    "b8_d16_hi": Part(1, half="high"),
    "b16_d16_hi": Part(2, half="high"),
}


class Request(NamedTuple):
    """One instruction of one wave on its way: the lanes, and where they reach."""

    wave: Wave
    mask: int
    lanes: NDArray[np.intp]
    reaches: list[Reach]

    def issue(self, target: Target, kind: str, size: int, touch: Callable[[], Any], deliver: Any, place: str) -> None:
        if not self.reaches:
            return
        spaces = {reach.access.space for reach in self.reaches}
        counters = {counter_of(target, space, kind) for space in spaces}
        lows, highs = zip(*(reach.access.extent for reach in self.reaches), strict=True)
        space = spaces.pop() if len(spaces) == 1 else Space.SEVERAL
        operation = Operation(counters, space, (min(lows), max(highs) + size), touch, deliver, place)
        self.wave.in_flight.issue(operation)


def counter_of(target: Target, space: Space, kind: str) -> str:
    if space is Space.LDS:
        return "lgkm" if target.is_gfx9 else "ds"
    return "vm" if target.is_gfx9 else kind


def request_of(wave: Wave, where: Addressing) -> Request:
    lanes = np.flatnonzero(wave.active)
    return Request(wave, wave.exec, lanes, where.reaches(wave, lanes) if len(lanes) else [])


def _bind_load(part: Part, instruction: Instruction, target: Target) -> Execute:
    where = addressing(instruction, target, part.bytes)
    register = vgpr_of(where.destination, part.words)

    def execute(wave: Wave) -> None:
        request = request_of(wave, where)
        if not request.reaches:
            return
        kept = wave.vgpr[request.lanes, register] if part.half else None
        if part.half:
            wave.check(register, 1, wave.exec)
        wave.await_vgprs(register, part.words, wave.exec)

        def touch() -> Loaded:
            return gather(request.reaches, len(request.lanes), part.bytes)

        def deliver(loaded: Loaded) -> None:
            words, undefined = _to_words(part, loaded, kept)
            wave.deliver_vgprs(register, words, request.mask, undefined)

        request.issue(target, "load", part.bytes, touch, deliver, wave.place())

    return execute


def _bind_store(part: Part, instruction: Instruction, target: Target) -> Execute:
    where = addressing(instruction, target, part.bytes)
    register = vgpr_of(where.data[0], part.words)

    def execute(wave: Wave) -> None:
        request = request_of(wave, where)
        if not request.reaches:
            return
        data, undefined = stored_data(request, register, part)

        def touch() -> None:
            for positions, access in request.reaches:
                access.store(data[positions], undefined[positions] if undefined.size else undefined)

        request.issue(target, "store", part.bytes, touch, None, wave.place())

    return execute


def stored_data(request: Request, register: int, part: Part) -> tuple[NDArray[np.uint8], NDArray[np.bool_]]:
    """Bytes [lanes, size] of the registers, and which have no value: only scratch memory takes those."""
    wave, lanes = request.wave, request.lanes
    words = np.ascontiguousarray(wave.vgpr[lanes, register : register + part.words])
    if part.half == "high":
        words >>= np.uint32(16)
    data = words.view(np.uint8).reshape(len(lanes), -1)[:, : part.bytes]
    scratch_only = all(reach.access.space is Space.SCRATCH for reach in request.reaches)
    blocked = [wave.blocked[register + i] & request.mask for i in range(part.words)]
    if not any(blocked):
        return data, NONE_UNDEFINED
    if not scratch_only or any(register + i in wave.awaited for i in range(part.words)):
        wave.check(register, part.words, request.mask)
    undefined = np.array([[mask >> int(lane) & 1 for mask in blocked] for lane in lanes], bool)
    return data, np.repeat(undefined, 4, axis=1)[:, : part.bytes]


def gather(reaches: list[Reach], lanes: int, size: int) -> Loaded:
    if len(reaches) == 1:
        return reaches[0].access.load(size)
    data, undefined = np.empty((lanes, size), np.uint8), np.zeros((lanes, size), bool)
    for positions, access in reaches:
        loaded = access.load(size)
        data[positions] = loaded.data
        if loaded.undefined.size:
            undefined[positions] = loaded.undefined
    return Loaded(data, undefined)


def _to_words(part: Part, loaded: Loaded, kept: Any) -> tuple[NDArray[np.uint32], NDArray[np.bool_]]:
    lanes = len(loaded.data)
    if part.bytes >= 4:
        words = np.ascontiguousarray(loaded.data).view(np.uint32)
        if not loaded.undefined.size:
            return words, NONE_UNDEFINED
        return words, np.asarray(loaded.undefined.reshape(lanes, part.words, 4).any(axis=2))
    narrow = np.ascontiguousarray(loaded.data).view(f"{'i' if part.signed else 'u'}{part.bytes}")
    words = narrow.astype(np.int64).astype(np.uint32)
    if part.half == "low":
        words = kept[:, None] & np.uint32(0xFFFF0000) | words
    elif part.half == "high":
        words = kept[:, None] & np.uint32(0xFFFF) | words << np.uint32(16)
    undefined = np.asarray(loaded.undefined.any(axis=1, keepdims=True)) if loaded.undefined.size else NONE_UNDEFINED
    return words, undefined


for _name, _part in PARTS_LOADED.items():
    _names = [f"{space}_load_{_name}" for space in ("flat", "global", "scratch")]
    _names += [f"ds_read_{_name}", f"ds_load_{_name}"]
    semantics(*_names)(partial(_bind_load, _part))
for _name, _part in PARTS_STORED.items():
    _names = [f"{space}_store_{_name}" for space in ("flat", "global", "scratch")]
    _names += [f"ds_write_{_name}", f"ds_store_{_name}"]
    semantics(*_names)(partial(_bind_store, _part))
