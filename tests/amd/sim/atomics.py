"""Atomics of the flat, global and LDS instructions. The lanes of a wave take their turns in order."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from tests.amd.sim.access import NONE_UNDEFINED, Loaded
from tests.amd.sim.addresses import addressing
from tests.amd.sim.operands import vgpr_of
from tests.amd.sim.program import Instruction
from tests.amd.sim.scalar_alu import signed
from tests.amd.sim.table import Execute, Target, semantics
from tests.amd.sim.vector_memory import Part, request_of, stored_data
from tests.amd.sim.wave import Wave

# The new value from the old one and the operand, both unsigned, and their size in bits.
UPDATES: dict[str, Callable[[int, int, int], int]] = {
    "add": lambda old, value, bits: old + value,
    "sub": lambda old, value, bits: old - value,
    "swap": lambda old, value, bits: value,
    "and": lambda old, value, bits: old & value,
    "or": lambda old, value, bits: old | value,
    "xor": lambda old, value, bits: old ^ value,
    "umin": lambda old, value, bits: min(old, value),
    "umax": lambda old, value, bits: max(old, value),
    "smin": lambda old, value, bits: min(old, value, key=lambda x: signed(x, bits)),
    "smax": lambda old, value, bits: max(old, value, key=lambda x: signed(x, bits)),
    "inc": lambda old, value, bits: 0 if old >= value else old + 1,
    "dec": lambda old, value, bits: value if old == 0 or old > value else old - 1,
}


def _bind_atomic(operation: str, size: int, instruction: Instruction, target: Target) -> Execute:
    where = addressing(instruction, target, size)
    # A comparing one takes two values: from one run of registers, or from two.
    part = Part(2 * size if operation == "cmpswap" and len(where.data) == 1 else size)
    registers = [vgpr_of(text, part.words) for text in where.data]
    result = vgpr_of(where.destination, size // 4) if where.destination else None

    def execute(wave: Wave) -> None:
        request = request_of(wave, where)
        if not request.reaches:
            return
        data = np.concatenate([stored_data(request, register, part)[0] for register in registers], axis=1)
        values = [[int.from_bytes(row[at : at + size], "little") for at in range(0, len(row), size)] for row in data]
        if result is not None:
            wave.await_vgprs(result, size // 4, wave.exec)

        def touch() -> Loaded:
            old = np.empty((len(request.lanes), size), np.uint8)
            for positions, access in request.reaches:
                for lane, position in enumerate(positions.tolist()):
                    before = access.atomic(lane, size, _update(operation, values[position], size))
                    old[position] = np.frombuffer(before.to_bytes(size, "little"), np.uint8)
            return Loaded(old, NONE_UNDEFINED)

        def deliver(loaded: Loaded) -> None:
            assert result is not None
            wave.deliver_vgprs(result, loaded.data.view(np.uint32), request.mask, NONE_UNDEFINED)

        returned = "load" if result is not None else "store"
        request.issue(target, returned, size, touch, None if result is None else deliver, wave.place())

    return execute


def _update(operation: str, values: list[int], size: int) -> Callable[[int], int]:
    if operation == "cmpswap":
        new, expected = values
        return lambda old: new if old == expected else old
    if operation == "cmpst":
        expected, new = values
        return lambda old: new if old == expected else old
    return lambda old: UPDATES[operation](old, values[0], 8 * size)


# How gfx12, and LDS instructions everywhere, call the type; others are unsigned.
LETTERS = {"smin": "i", "smax": "i", **dict.fromkeys(("swap", "cmpswap", "and", "or", "xor"), "b")}

for _operation in (*UPDATES, "cmpswap"):
    _stem = _operation.removeprefix("u").removeprefix("s") if _operation[1:] in ("min", "max") else _operation
    _letter = LETTERS.get(_operation, "u")
    for _size in (4, 8):
        _names = [f"{_space}_atomic_{_operation}{'_x2' * (_size == 8)}" for _space in ("flat", "global")]
        _names += [f"{_space}_atomic_{_stem}_{_letter}{8 * _size}" for _space in ("flat", "global")]
        if _operation == "swap":
            _names += [f"ds_wrxchg_rtn_b{8 * _size}", f"ds_storexchg_rtn_b{8 * _size}"]
        elif _operation == "cmpswap":
            _names += [f"ds_cmpstore{_rtn}_b{8 * _size}" for _rtn in ("", "_rtn")]
            semantics(*(f"ds_cmpst{_rtn}_b{8 * _size}" for _rtn in ("", "_rtn")))(partial(_bind_atomic, "cmpst", _size))
        else:
            _names += [f"ds_{_stem}{_rtn}_{_letter}{8 * _size}" for _rtn in ("", "_rtn")]
        semantics(*_names)(partial(_bind_atomic, _operation, _size))
