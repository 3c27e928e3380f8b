"""Addresses of memory instructions: which operands they are made of, and where the lanes' addresses lead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tests.amd.sim.access import LdsAccess, Reach, ScratchAccess, flat_reaches
from tests.amd.sim.operands import Read, Type, scalar_source, vector_source
from tests.amd.sim.program import Instruction
from tests.amd.sim.table import Target, allow_modifiers
from tests.amd.sim.wave import Wave

SCOPES = {"SCOPE_CU": "wave", "SCOPE_SE": "workgroup", "SCOPE_DEV": "agent", "SCOPE_SYS": "system"}
SIGNED_OFFSETS = ("gfx1250",)  # of a vector register that is added to a scalar address


class Addressing(NamedTuple):
    destination: str
    """The register for what is returned, or nothing."""
    data: list[str]
    """Registers with what is stored."""
    reaches: Callable[[Wave, NDArray[np.intp]], list[Reach]]
    """Where the given lanes, those switched on, reach."""


def addressing(instruction: Instruction, target: Target, size: int) -> Addressing:
    """Of an instruction that loads, stores or is atomic; `size` is what a scaled offset counts in."""
    texts = list(instruction.operands)
    destination = texts.pop(0) if returns(instruction) else ""
    space = instruction.mnemonic.partition("_")[0]
    if space == "ds":
        allow_modifiers(instruction, "offset")
        return Addressing(destination, texts[1:], lds_addresses(texts[0], _offset(instruction)))
    allow_modifiers(instruction, "offset", "nt", "sc0", "sc1", "scope", "th", "scale_offset")
    data = [] if "_load_" in instruction.mnemonic else [texts.pop(1)]
    scale = size if "scale_offset" in instruction.modifiers else 1
    address, base = texts if len(texts) == 2 else (texts[0], "off")
    if space == "scratch":
        return Addressing(destination, data, _scratch(address, base, _offset(instruction), scale))
    return Addressing(destination, data, _flat(instruction, target, address, base, scale))


def returns(instruction: Instruction) -> bool:
    mnemonic, modifiers = instruction.mnemonic, instruction.modifiers
    if "_atomic_" in mnemonic:
        return "RETURN" in modifiers.get("th", "") or "sc0" in modifiers
    return "_load_" in mnemonic or mnemonic.startswith("ds_read") or "_rtn_" in mnemonic


def scope_of(modifiers: dict[str, str]) -> str:
    """How far a load, a store or a fence has to be coherent."""
    if "scope" in modifiers:
        return SCOPES[modifiers["scope"]]
    if "sc1" in modifiers:
        return "system" if "sc0" in modifiers else "agent"
    return "workgroup" if "sc0" in modifiers else "wave"


def _offset(instruction: Instruction) -> int:
    return int(instruction.modifiers.get("offset", "0"), 0)


def lds_addresses(text: str, offset: int) -> Callable[[Wave, NDArray[np.intp]], list[Reach]]:
    read = vector_source(text, Type.U32)

    def reaches(wave: Wave, lanes: NDArray[np.intp]) -> list[Reach]:
        offsets = _of_lanes(wave, read, lanes).astype(np.int64) + offset
        return [Reach(np.arange(len(lanes)), LdsAccess(wave, offsets))]

    return reaches


def _scratch(address: str, base: str, offset: int, scale: int) -> Callable[[Wave, NDArray[np.intp]], list[Reach]]:
    scalar = scalar_source(base) if base != "off" else lambda wave: 0
    vector = vector_source(address, Type.U32) if address != "off" else lambda wave: np.uint32(0)

    def reaches(wave: Wave, lanes: NDArray[np.intp]) -> list[Reach]:
        offsets = _of_lanes(wave, vector, lanes).astype(np.int64) * scale + (scalar(wave) + offset)
        return [Reach(np.arange(len(lanes)), ScratchAccess(wave, lanes, offsets))]

    return reaches


def _flat(
    instruction: Instruction, target: Target, address: str, base: str, scale: int
) -> Callable[[Wave, NDArray[np.intp]], list[Reach]]:
    offset = np.int64(_offset(instruction)).astype(np.uint64)
    scope = scope_of(instruction.modifiers)
    if "_atomic_" in instruction.mnemonic and target.is_gfx9:
        scope = "system" if "sc1" in instruction.modifiers else "agent"
    if base == "off":
        read = vector_source(address, Type.U64)

        def reaches(wave: Wave, lanes: NDArray[np.intp]) -> list[Reach]:
            return flat_reaches(wave, lanes, _of_lanes(wave, read, lanes) + offset, scope)

        return reaches
    start = scalar_source(base, 64)
    part = vector_source(address, Type.I32 if target.arch in SIGNED_OFFSETS else Type.U32)

    def reaches_from_base(wave: Wave, lanes: NDArray[np.intp]) -> list[Reach]:
        distance = _of_lanes(wave, part, lanes).astype(np.int64) * scale
        return flat_reaches(wave, lanes, distance.astype(np.uint64) + np.uint64(start(wave)) + offset, scope)

    return reaches_from_base


def _of_lanes(wave: Wave, read: Read, lanes: NDArray[np.intp]) -> Any:
    values = read(wave)
    wave.refuse_taint()
    return np.broadcast_to(values, (wave.lanes,))[lanes] if np.ndim(values) == 0 else values[lanes]
