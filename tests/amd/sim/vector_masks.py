"""Vector instructions with a bit per lane beside their values: comparisons, carries, counts of lanes below."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from tests.amd.sim.operands import Type, lane_mask_destination, lane_mask_source
from tests.amd.sim.program import Instruction
from tests.amd.sim.sdwa import SDWA_MODIFIERS
from tests.amd.sim.table import Execute, Target, allow_modifiers, operands, semantics
from tests.amd.sim.vector import TYPES, commitment, source
from tests.amd.sim.wave import Wave, lanes_of, mask_of

COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b,
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
}
UNORDERED: dict[str, Callable[[Any, Any], Any]] = {
    "lg": lambda a, b: (a < b) | (a > b),
    "o": lambda a, b: ~(np.isnan(a) | np.isnan(b)),
    "u": lambda a, b: np.isnan(a) | np.isnan(b),
    "nlt": lambda a, b: ~(a < b),
    "nle": lambda a, b: ~(a <= b),
    "ngt": lambda a, b: ~(a > b),
    "nge": lambda a, b: ~(a >= b),
    "nlg": lambda a, b: ~((a < b) | (a > b)),
    "neq": lambda a, b: ~(a == b),
}


def to_mask(wave: Wave, result: Any) -> int:
    """Lanes switched off give 0."""
    if np.ndim(result) == 0:
        return wave.exec if result else 0
    return mask_of(result) & wave.exec


def _bind_comparison(
    holds: Callable[[Any, Any], Any], kind: str, changes_exec: bool, instruction: Instruction, target: Target
) -> Execute:
    allow_modifiers(instruction, *(SDWA_MODIFIERS if instruction.form == "sdwa" else ()))
    # Where a comparison sets EXEC, gfx9 writes its destination as well; later archs have none.
    has_destination = not changes_exec or target.is_gfx9
    texts = list(operands(instruction, 3 if has_destination else 2))
    write = lane_mask_destination(texts.pop(0)) if has_destination else None
    first, second = (source(instruction, text, kind, i) for i, text in enumerate(texts))

    def execute(wave: Wave) -> None:
        mask = to_mask(wave, holds(first(wave), second(wave)))
        wave.refuse_taint()
        if write is not None:
            write(wave, mask)
        if changes_exec:
            wave.set_exec(mask)

    return execute


def _register_comparison(name: str, kind: str, holds: Callable[[Any, Any], Any]) -> None:
    for stem in ("v_cmp", "v_cmpx"):
        semantics(f"{stem}_{name}_{kind}")(partial(_bind_comparison, holds, kind, stem == "v_cmpx"))


def _register_comparisons() -> None:
    for kind in TYPES:
        floats = TYPES[kind].is_float
        for name, holds in {**COMPARISONS, **(UNORDERED if floats else {})}.items():
            if not (floats and name == "ne"):
                _register_comparison(name, kind, holds)


_register_comparisons()


def _narrow(holds: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda a, b: holds(a & np.uint32(0xFFFF), b & np.uint32(0xFFFF))


for _name, _holds in COMPARISONS.items():
    semantics(f"v_cmp_{_name}_u16")(partial(_bind_comparison, _narrow(_holds), "u32", False))

# Bits of v_cmp_class: signalling and quiet NaN, then from -infinity to +infinity.
CLASSES: list[Callable[[Any, Any], Any]] = [
    lambda x, bits: np.isnan(x) & (bits & 0x400000 == 0),
    lambda x, bits: np.isnan(x) & (bits & 0x400000 != 0),
    lambda x, bits: x == -np.inf,
    lambda x, bits: (x < 0) & np.isfinite(x) & (bits & 0x7F800000 != 0),
    lambda x, bits: (x < 0) & (bits & 0x7F800000 == 0),
    lambda x, bits: bits == 0x80000000,
    lambda x, bits: bits == 0,
    lambda x, bits: (x > 0) & (bits & 0x7F800000 == 0),
    lambda x, bits: (x > 0) & np.isfinite(x) & (bits & 0x7F800000 != 0),
    lambda x, bits: x == np.inf,
]


def _is_of_class(values: Any, classes: Any) -> Any:
    values = np.asarray(values)
    bits, found = values.view(np.uint32), np.zeros(values.shape, bool)
    for number, belongs in enumerate(CLASSES):
        found = found | (np.asarray(classes) >> np.uint32(number) & np.uint32(1) != 0) & belongs(values, bits)
    return found


@semantics("v_cmp_class_f32")
def compare_class(instruction: Instruction, target: Target) -> Execute:
    allow_modifiers(instruction)
    destination, value, classes = operands(instruction, 3)
    write, read = lane_mask_destination(destination), source(instruction, value, "f32", 0)
    read_classes = source(instruction, classes, "u32", 1)

    def execute(wave: Wave) -> None:
        mask = to_mask(wave, _is_of_class(read(wave), read_classes(wave)))
        wave.refuse_taint()
        write(wave, mask)

    return execute


# Carries. The destination of the carry comes second, the carry taken in, if there is one, last.


def _bind_carry(sum_of: Callable[[Any, Any, Any], Any], instruction: Instruction, target: Target) -> Execute:
    allow_modifiers(instruction, *(SDWA_MODIFIERS if instruction.form == "sdwa" else ()))
    takes_carry = re.search(r"_(addc|subb|subbrev)_|_ci_", instruction.mnemonic) is not None
    destination, carry_out, *texts = operands(instruction, 5 if takes_carry else 4)
    carry_in = lane_mask_source(texts.pop()) if takes_carry else None
    first, second = (source(instruction, text, "u32", i) for i, text in enumerate(texts))
    write, write_carry = commitment(instruction, destination, Type.U32), lane_mask_destination(carry_out)

    def execute(wave: Wave) -> None:
        carries: Any = np.int64(0)
        if carry_in is not None:
            mask, unknown = carry_in(wave)
            wave.tainted_low |= unknown & wave.exec
            carries = lanes_of(mask, wave.lanes).astype(np.int64)
        total = sum_of(np.asarray(first(wave)).astype(np.int64), np.asarray(second(wave)).astype(np.int64), carries)
        carried = to_mask(wave, (total < 0) | (total >> 32 != 0))
        wave.refuse_taint()
        write(wave, total.astype(np.uint32))
        write_carry(wave, carried)

    return execute


for _names, _sum_of in {
    "v_add_co_u32 v_addc_co_u32 v_add_co_ci_u32": lambda a, b, carry: a + b + carry,
    "v_sub_co_u32 v_subb_co_u32 v_sub_co_ci_u32": lambda a, b, carry: a - b - carry,
    "v_subrev_co_u32 v_subbrev_co_u32 v_subrev_co_ci_u32": lambda a, b, carry: b - a - carry,
}.items():
    semantics(*_names.split())(partial(_bind_carry, _sum_of))


@semantics("v_mad_u64_u32", "v_mad_co_u64_u32")
def multiply_add_carry(instruction: Instruction, target: Target) -> Execute:
    allow_modifiers(instruction)
    destination, carry_out, *texts = operands(instruction, 5)
    kinds = ("u32", "u32", "u64")
    reads = [source(instruction, text, kind, i) for i, (text, kind) in enumerate(zip(texts, kinds, strict=True))]
    write, write_carry = commitment(instruction, destination, Type.U64), lane_mask_destination(carry_out)

    def execute(wave: Wave) -> None:
        a, b, c = (np.asarray(read(wave)).astype(np.uint64) for read in reads)
        total = a * b + c
        carried = to_mask(wave, total < c)  # which compilers do not use: the high words may be undefined
        write(wave, total)
        write_carry(wave, carried)

    return execute


def _bind_lanes_below(start: int, instruction: Instruction, target: Target) -> Execute:
    """Adds the number of bits, of 32 lanes from `start`, that lie below the lane."""
    allow_modifiers(instruction)
    destination, mask, addend = operands(instruction, 3)
    reads = source(instruction, mask, "u32", 0), source(instruction, addend, "u32", 1)
    write = commitment(instruction, destination, Type.U32)

    def execute(wave: Wave) -> None:
        below = np.clip(np.arange(wave.lanes) - start, 0, 32).astype(np.uint64)
        kept = np.asarray(reads[0](wave)).astype(np.uint64) & ((np.uint64(1) << below) - np.uint64(1))
        write(wave, np.bitwise_count(kept).astype(np.uint32) + reads[1](wave))

    return execute


semantics("v_mbcnt_lo_u32_b32")(partial(_bind_lanes_below, 0))
semantics("v_mbcnt_hi_u32_b32")(partial(_bind_lanes_below, 32))
