"""Conversions to and from bf16, fp8 and fp4, division, and the few 16-bit instructions.

Corner cases of fp8 and fp4 follow ml_dtypes; the kernels bound and sort out what they convert, and so do not meet those
in which an instruction has modes.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np

from tests.amd.sim.errors import Unknown
from tests.amd.sim.floats import fused_multiply_add, median
from tests.amd.sim.operands import Type, lane_mask_destination, vector_source, vgpr_of
from tests.amd.sim.program import Instruction
from tests.amd.sim.sdwa import SELECTED
from tests.amd.sim.table import Execute, Target, allow_modifiers, operands, semantics
from tests.amd.sim.vector import Steps, commitment, pass_taint, register_steps, source, vector
from tests.amd.sim.vector_alu import truth_table
from tests.amd.sim.wave import Wave

U32, F32 = np.uint32, np.float32
FP4 = ml_dtypes.float4_e2m1fn


def fp8_of(target: Target) -> Any:
    return ml_dtypes.float8_e4m3fnuz if target.arch == "gfx942" else ml_dtypes.float8_e4m3fn


def to_bf16(values: Any) -> Any:
    """The upper half of a float32, to nearest, ties to even; NaN becomes quiet."""
    bits = np.asarray(values).view(U32).astype(np.uint64)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    return np.where(np.isnan(values), bits >> 16 | 0x40, rounded).astype(U32)


def _decode(codes: Any, element: Any) -> Any:
    return np.asarray(codes).astype(np.uint8).view(element).astype(F32)


def _encode(values: Any, element: Any) -> Any:
    return np.asarray(values, F32).astype(element).view(np.uint8).astype(U32)


vector("v_cvt_pk_bf16_f32", "u32", "f32 f32", lambda a, b: to_bf16(a) | to_bf16(b) << U32(16))
vector("v_med3_f32 v_med3_num_f32", "f32", "f32 f32 f32", median)


def _numbers(instruction: Instruction, name: str, default: str) -> list[int]:
    return [int(digit) for digit in re.findall(r"\d+", instruction.modifiers.get(name, default))]


def _bind_decode_fp8(instruction: Instruction, target: Target) -> Steps:
    allow_modifiers(instruction, "src0_sel", "byte_sel")
    destination, text = operands(instruction, 2)
    shift, bits = SELECTED[instruction.modifiers.get("src0_sel", "BYTE_0")]
    if bits != 8:
        raise Unknown(f"{instruction.text}")
    shift += 8 * _numbers(instruction, "byte_sel", "0")[0]
    read = vector_source(text, Type.U32)
    commit = commitment(Instruction("", ""), destination, Type.F32)
    return Steps(lambda wave: _decode(np.asarray(read(wave)) >> U32(shift) & U32(255), fp8_of(target)), commit)


register_steps("v_cvt_f32_fp8", _bind_decode_fp8)


def _into_part(destination: str, shift: int, bits: int, evaluate: Callable[[Wave], Any]) -> Callable[[Wave], None]:
    """Writes part of a register and keeps the rest, which may be undefined."""
    register, field = vgpr_of(destination, 1), U32(((1 << bits) - 1) << shift)

    def execute(wave: Wave) -> None:
        part = evaluate(wave)
        wave.taint(register, wave.exec)
        wave.write_vgpr(register, wave.vgpr[:, register] & ~field | part << U32(shift) & field, wave.exec)
        pass_taint(wave, register, Type.U32, wave.exec)

    return execute


@semantics("v_cvt_pk_fp8_f32")
def encode_fp8(instruction: Instruction, target: Target) -> Execute:
    """Two codes into the low or the high half."""
    allow_modifiers(instruction, "op_sel")
    destination, *texts = operands(instruction, 3)
    first, second = (source(instruction, text, "f32", i) for i, text in enumerate(texts))
    high, element = _numbers(instruction, "op_sel", "[0,0,0]")[2], fp8_of(target)

    def evaluate(wave: Wave) -> Any:
        return _encode(first(wave), element) | _encode(second(wave), element) << U32(8)

    return _into_part(destination, 16 * high, 16, evaluate)


# fp4, with a scale that is a power of two.


def _scale(text: str) -> Callable[[Wave], Any]:
    """As float32, of which only the exponent counts."""
    read = vector_source(text, Type.U32)
    return lambda wave: np.exp2((np.asarray(read(wave)) >> U32(23) & U32(255)).astype(np.float64) - 127)


@semantics("v_cvt_scalef32_pk_fp4_f32")
def encode_fp4_pair(instruction: Instruction, target: Target) -> Execute:
    """Two codes into one byte of four."""
    allow_modifiers(instruction, "op_sel")
    destination, *texts, scale = operands(instruction, 4)
    first, second = (source(instruction, text, "f32", i) for i, text in enumerate(texts))
    factor, (_, _, low, high) = _scale(scale), _numbers(instruction, "op_sel", "[0,0,0,0]")

    def evaluate(wave: Wave) -> Any:
        divisor = factor(wave)
        return _encode(first(wave) / divisor, FP4) | _encode(second(wave) / divisor, FP4) << U32(4)

    return _into_part(destination, 8 * (low + 2 * high), 8, evaluate)


@semantics("v_cvt_scalef32_pk_f32_fp4")
def decode_fp4_pair(instruction: Instruction, target: Target) -> Execute:
    allow_modifiers(instruction, "op_sel")
    destination, text, scale = operands(instruction, 3)
    low, high = (_numbers(instruction, "op_sel", "[0,0]") + [0])[:2]
    return _decode_fp4(destination, text, _scale(scale), 2, 8 * (low + 2 * high))


@semantics("v_cvt_scale_pk8_f32_fp4")
def decode_fp4_eight(instruction: Instruction, target: Target) -> Execute:
    """The scale is the exponent itself."""
    allow_modifiers(instruction)
    destination, text, scale = operands(instruction, 3)
    exponent = vector_source(scale, Type.U32)
    return _decode_fp4(
        destination, text, lambda wave: np.exp2((np.asarray(exponent(wave)) & U32(255)).astype(np.float64) - 127), 8, 0
    )


def _decode_fp4(destination: str, text: str, factor: Callable[[Wave], Any], count: int, shift: int) -> Execute:
    register, read = vgpr_of(destination, count), vector_source(text, Type.U32)

    def execute(wave: Wave) -> None:
        codes, scale = np.array(read(wave)) >> U32(shift), factor(wave)
        low, high = wave.take_taint()
        for index in range(count):
            value = (_decode(codes >> U32(4 * index) & U32(15), FP4) * scale).astype(F32)
            wave.write_vgpr(register + index, value.view(U32), wave.exec)
            wave.tainted_low, wave.tainted_high = low, high
            pass_taint(wave, register + index, Type.U32, wave.exec)

    return execute


@semantics("v_cvt_scalef32_pk8_fp4_f32")
def encode_fp4_eight(instruction: Instruction, target: Target) -> Execute:
    allow_modifiers(instruction)
    destination, text, scale = operands(instruction, 3)
    start, factor = vgpr_of(text, 8), _scale(scale)
    reads = [vector_source(f"v{start + index}", Type.F32) for index in range(8)]

    def evaluate(wave: Wave) -> Any:
        divisor, packed = factor(wave), np.zeros(wave.lanes, U32)
        for index, read in enumerate(reads):
            packed |= _encode(read(wave) / divisor, FP4) << U32(4 * index)
        return packed

    commit = commitment(instruction, destination, Type.U32)
    return lambda wave: commit(wave, evaluate(wave))


# Division is a sequence: scale, refine, scale back, sort out special values. It is specified to give the quotient
# rounded once, so the last instruction does that here, and nothing needs to be scaled before.


@semantics("v_div_scale_f32")
def division_scale(instruction: Instruction, target: Target) -> Execute:
    allow_modifiers(instruction)
    destination, flags, value, *others = operands(instruction, 5)
    read, write = source(instruction, value, "f32", 0), commitment(instruction, destination, Type.F32)
    write_flags, read_others = lane_mask_destination(flags), [source(instruction, text, "f32", 1) for text in others]

    def execute(wave: Wave) -> None:
        for other in read_others:
            other(wave)
        write(wave, read(wave))
        write_flags(wave, 0)

    return execute


vector("v_div_fmas_f32", "f32", "f32 f32 f32", fused_multiply_add)
vector("v_div_fixup_f32", "f32", "f32 f32 f32", lambda quotient, denominator, numerator: numerator / denominator)


# 16 bits: gfx9 clears the upper half, later archs keep it.


def _bind_halves(function: Callable[..., Any], instruction: Instruction, target: Target) -> Execute:
    allow_modifiers(instruction, "bitop3")
    destination, *texts = instruction.operands
    reads = [vector_source(text, Type.U32) for text in texts]
    if target.is_gfx9:
        commit = commitment(Instruction("", ""), destination, Type.U32)
        return lambda wave: commit(wave, function(instruction, *[read(wave) for read in reads]) & U32(0xFFFF))
    return _into_part(destination, 0, 16, lambda wave: function(instruction, *[read(wave) for read in reads]))


def _truth_table(instruction: Instruction, a: Any, b: Any, c: Any) -> Any:
    return truth_table(int(instruction.modifiers["bitop3"], 0), a, b, c)


HALVES: dict[str, Callable[..., Any]] = {
    "v_lshlrev_b16": lambda _, a, b: b << (a & U32(15)),
    "v_lshrrev_b16": lambda _, a, b: (b & U32(0xFFFF)) >> (a & U32(15)),
    "v_add_u16 v_add_nc_u16": lambda _, a, b: a + b,
    "v_sub_u16 v_sub_nc_u16": lambda _, a, b: a - b,
    "v_bitop3_b16": _truth_table,
}
for _names, _function in HALVES.items():
    semantics(*_names.split())(partial(_bind_halves, _function))
