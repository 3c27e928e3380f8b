"""DPP: the first source comes from other lanes."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.amd.sim.errors import Unknown
from tests.amd.sim.operands import Read, Type, vgpr_of
from tests.amd.sim.program import Instruction
from tests.amd.sim.wave import Wave, lanes_of, mask_of

NOWHERE = -1
OPTIONS = ("row_mask", "bank_mask", "bound_ctrl", "fi")


def is_dpp(instruction: Instruction) -> bool:
    return "dpp" in instruction.form


def dpp_pattern(instruction: Instruction, lanes: int) -> NDArray[np.int64]:
    """Per lane: the lane that its first source comes from, or NOWHERE."""
    controls = {name: value for name, value in instruction.modifiers.items() if name not in OPTIONS}
    if len(controls) != 1:
        raise Unknown(f"DPP controls {sorted(controls)}")
    ((name, value),) = controls.items()
    lane = np.arange(lanes)
    row, place = lane // 16 * 16, lane % 16
    if name == "quad_perm":
        return lane // 4 * 4 + np.array(_numbers(value))[lane % 4]
    if name == "dpp8":
        return lane // 8 * 8 + np.array(_numbers(value))[lane % 8]
    if name == "row_mirror":
        return row + 15 - place
    if name == "row_half_mirror":
        return lane // 8 * 8 + 7 - lane % 8
    number = int(value, 0)
    if name == "row_shl":
        return np.where(place + number < 16, lane + number, NOWHERE)
    if name == "row_shr":
        return np.where(place >= number, lane - number, NOWHERE)
    if name == "row_ror":
        return row + (place - number) % 16
    if name in ("row_newbcast", "row_share"):
        return row + number
    if name == "row_xmask":
        return row + (place ^ number)
    if name == "row_bcast":  # 15 and 31: the last lane before the row, or before the half of the wave
        return np.where(row >= number + 1, (lane // (number + 1)) * (number + 1) - 1, NOWHERE)
    if name in ("wave_shl", "wave_rol", "wave_shr", "wave_ror"):
        step = 1 if name.endswith(("shl", "rol")) else -1
        turned = lane + step
        return turned % lanes if "ro" in name else np.where((turned >= 0) & (turned < lanes), turned, NOWHERE)
    raise Unknown(f"DPP control {name}")


def _numbers(value: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", value)]


def _valid(instruction: Instruction, wave: Wave, pattern: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Lanes whose source exists and is switched on."""
    inside = pattern != NOWHERE
    return inside if "fi" in instruction.modifiers else inside & wave.active[pattern]


def dpp_source(instruction: Instruction, text: str, kind: Type) -> Read:
    """The moved value; 0 where there is none."""
    if kind.words != 1:
        raise Unknown(f"DPP on {kind.label}")
    register = vgpr_of(text, 1)
    patterns: dict[int, NDArray[np.int64]] = {}

    def read(wave: Wave) -> Any:
        if wave.lanes not in patterns:
            patterns[wave.lanes] = dpp_pattern(instruction, wave.lanes)
        pattern = patterns[wave.lanes]
        valid = _valid(instruction, wave, pattern)
        needed = np.zeros(wave.lanes, bool)
        needed[pattern[valid & wave.active]] = True
        wave.check(register, 1, mask_of(needed))
        return np.where(valid, wave.vgpr[pattern, register], np.uint32(0)).astype(np.uint32).view(kind.dtype)

    return read


def dpp_lanes(instruction: Instruction) -> Callable[[Wave], int]:
    """The lanes that are written: not those without a source, unless bound_ctrl gives them 0, nor those masked out."""
    rows = int(instruction.modifiers.get("row_mask", "0xf"), 0)
    banks = int(instruction.modifiers.get("bank_mask", "0xf"), 0)
    fills = "bound_ctrl" in instruction.modifiers

    def lanes(wave: Wave) -> int:
        lane = np.arange(wave.lanes)
        chosen = (rows >> (lane // 16) & 1 != 0) & (banks >> (lane // 4 % 4) & 1 != 0)
        if not fills:
            chosen &= _valid(instruction, wave, dpp_pattern(instruction, wave.lanes))
        return mask_of(chosen & lanes_of(wave.exec, wave.lanes))

    return lanes
