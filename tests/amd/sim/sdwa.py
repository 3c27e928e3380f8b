"""SDWA: sources and destination are bytes or halves of registers (gfx9)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tests.amd.sim.errors import Unknown
from tests.amd.sim.operands import Read, Type, parse_operand, vector_source
from tests.amd.sim.program import Instruction
from tests.amd.sim.wave import Wave, lanes_of

SDWA_MODIFIERS = ("dst_sel", "dst_unused", "src0_sel", "src1_sel")
SELECTED = (
    {"DWORD": (0, 32)} | {f"WORD_{i}": (16 * i, 16) for i in range(2)} | {f"BYTE_{i}": (8 * i, 8) for i in range(4)}
)


def sdwa_source(instruction: Instruction, text: str, kind: Type, position: int) -> Read:
    shift, bits = SELECTED[instruction.modifiers.get(f"src{position}_sel", "DWORD")] if position < 2 else (0, 32)
    if bits == 32:
        return vector_source(text, kind)
    if kind.is_float or kind.words != 1:
        raise Unknown(f"part of an operand as {kind.label}")
    is_signed = parse_operand(text).signed
    read = vector_source(text.removeprefix("sext(").removesuffix(")"), Type.U32)

    def part(wave: Wave) -> Any:
        field = np.asarray(read(wave)) >> np.uint32(shift) & np.uint32((1 << bits) - 1)
        if is_signed:
            return ((field << np.uint32(32 - bits)).view(np.int32) >> np.int32(32 - bits)).view(kind.dtype)
        return field.view(kind.dtype)

    return part


def sdwa_destination(instruction: Instruction, register: int, kind: Type) -> Callable[[Wave, Any], None]:
    shift, bits = SELECTED[instruction.modifiers.get("dst_sel", "DWORD")]
    unused = instruction.modifiers.get("dst_unused", "UNUSED_PRESERVE")
    if bits != 32 and unused not in ("UNUSED_PAD", "UNUSED_PRESERVE"):
        raise Unknown(f"dst_unused:{unused}")
    field = np.uint32(((1 << bits) - 1) << shift)

    def commit(wave: Wave, value: Any) -> None:
        whole = np.asarray(value, kind.dtype).view(np.uint32)
        if bits != 32:
            whole = whole << np.uint32(shift) & field
            if unused == "UNUSED_PRESERVE":
                wave.taint(register, wave.exec)
                whole = whole | wave.vgpr[:, register] & ~field
        wave.begin_write(register, 1, wave.exec)
        np.copyto(wave.vgpr[:, register], whole, where=lanes_of(wave.exec, wave.lanes))
        low, high = wave.take_taint()
        wave.blocked[register] |= low | high

    return commit
