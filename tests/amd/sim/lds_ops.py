"""LDS instructions of two addresses, and the permutations of lanes that go through the LDS hardware."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.amd.sim.access import NONE_UNDEFINED, Loaded, Reach
from tests.amd.sim.addresses import lds_addresses
from tests.amd.sim.in_flight import Operation, Space
from tests.amd.sim.operands import Type, vector_source, vgpr_of
from tests.amd.sim.program import Instruction
from tests.amd.sim.table import Execute, Target, allow_modifiers, operands, semantics
from tests.amd.sim.vector_memory import Part, Request, counter_of, gather, stored_data
from tests.amd.sim.wave import Wave

LDS = (0, 1 << 32)


def _two_addresses(
    instruction: Instruction, address: str, size: int, stride: int
) -> list[Callable[[Wave, NDArray[np.intp]], list[Reach]]]:
    allow_modifiers(instruction, "offset0", "offset1")
    offsets = [int(instruction.modifiers.get(name, "0"), 0) for name in ("offset0", "offset1")]
    return [lds_addresses(address, offset * size * stride) for offset in offsets]


def _bind_load(size: int, stride: int, instruction: Instruction, target: Target) -> Execute:
    destination, address = operands(instruction, 2)
    register = vgpr_of(destination, size // 2)
    places = _two_addresses(instruction, address, size, stride)

    def execute(wave: Wave) -> None:
        lanes, mask = np.flatnonzero(wave.active), wave.exec
        if not mask:
            return
        reaches = [place(wave, lanes) for place in places]
        wave.await_vgprs(register, size // 2, mask)

        def touch() -> Any:
            return [gather(reach, len(lanes), size).data for reach in reaches]

        def deliver(loaded: Any) -> None:
            words = np.ascontiguousarray(np.concatenate(loaded, axis=1)).view(np.uint32)
            wave.deliver_vgprs(register, words, mask, NONE_UNDEFINED)

        counters = {counter_of(target, Space.LDS, "load")}
        wave.in_flight.issue(Operation(counters, Space.LDS, LDS, touch, deliver, wave.place()))

    return execute


def _bind_store(size: int, stride: int, instruction: Instruction, target: Target) -> Execute:
    address, *data = operands(instruction, 3)
    registers = [vgpr_of(text, size // 4) for text in data]
    places = _two_addresses(instruction, address, size, stride)

    def execute(wave: Wave) -> None:
        lanes = np.flatnonzero(wave.active)
        if not len(lanes):
            return
        requests = [Request(wave, wave.exec, lanes, place(wave, lanes)) for place in places]
        values = [stored_data(requests[i], register, Part(size))[0] for i, register in enumerate(registers)]

        def touch() -> None:
            for request, value in zip(requests, values, strict=True):
                request.reaches[0].access.store(value, NONE_UNDEFINED)

        counters = {counter_of(target, Space.LDS, "store")}
        wave.in_flight.issue(Operation(counters, Space.LDS, LDS, touch, None, wave.place()))

    return execute


for _size in (4, 8):
    for _load, _store, _stride in (
        ("ds_read2", "ds_write2", 1),
        ("ds_load_2addr", "ds_store_2addr", 1),
        ("ds_read2st64", "ds_write2st64", 64),
        ("ds_load_2addr_stride64", "ds_store_2addr_stride64", 64),
    ):
        semantics(f"{_load}_b{8 * _size}")(partial(_bind_load, _size, _stride))
        semantics(f"{_store}_b{8 * _size}")(partial(_bind_store, _size, _stride))


def _permutation(name: str, permute: Callable[[Wave, NDArray[Any], NDArray[Any]], NDArray[np.uint32]]) -> None:
    """`permute` gets the addresses, one per lane, and the values, 0 in lanes that are switched off."""

    def bind(instruction: Instruction, target: Target) -> Execute:
        allow_modifiers(instruction, "offset")
        destination, address, data = operands(instruction, 3)
        register, read_address = vgpr_of(destination, 1), vector_source(address, Type.U32)
        read_data = vector_source(data, Type.U32)
        offset = np.uint32(int(instruction.modifiers.get("offset", "0"), 0))

        def execute(wave: Wave) -> None:
            lanes, mask = np.flatnonzero(wave.active), wave.exec
            if not mask:
                return
            addresses = np.broadcast_to(read_address(wave), (wave.lanes,)) + offset
            values = np.where(wave.active, read_data(wave), np.uint32(0))
            wave.refuse_taint()
            result = permute(wave, addresses, values)[lanes, None]
            wave.await_vgprs(register, 1, mask)
            loaded = Loaded(result.view(np.uint8), NONE_UNDEFINED)

            def deliver(brought: Loaded) -> None:
                wave.deliver_vgprs(register, brought.data.view(np.uint32), mask, NONE_UNDEFINED)

            counters = {counter_of(target, Space.LDS, "load")}
            wave.in_flight.issue(Operation(counters, Space.LDS, LDS, lambda: loaded, deliver, wave.place()))

        return execute

    semantics(name)(bind)


def _pull(wave: Wave, addresses: NDArray[Any], values: NDArray[Any]) -> NDArray[np.uint32]:
    return values[(addresses >> 2) % wave.lanes]


def _push(wave: Wave, addresses: NDArray[Any], values: NDArray[Any]) -> NDArray[np.uint32]:
    pushed = np.zeros(wave.lanes, np.uint32)
    lanes = np.flatnonzero(wave.active)
    pushed[(addresses[lanes] >> 2) % wave.lanes] = values[lanes]
    return pushed


_permutation("ds_bpermute_b32", _pull)
_permutation("ds_permute_b32", _push)
