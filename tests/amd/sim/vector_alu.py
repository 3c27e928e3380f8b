"""Vector arithmetic on integers and floats: rows of the table."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from tests.amd.sim.errors import Unknown
from tests.amd.sim.floats import fused_multiply_add, whole_number
from tests.amd.sim.operands import Type
from tests.amd.sim.program import Instruction
from tests.amd.sim.table import Target, allow_modifiers, operands
from tests.amd.sim.vector import Steps, Words, commitment, register_steps, source, vector

U32, I32, U64, I64, F32 = np.uint32, np.int32, np.uint64, np.int64, np.float32
LOW24 = U32(0xFFFFFF)


def _shift32(amount: Any) -> Any:
    return amount & U32(31)


def _shift64(amount: Any) -> Any:
    return np.asarray(amount & U32(63)).astype(U64)


def _wide(value: Any) -> Any:
    return np.asarray(value).astype(U64)


def _high(product: Any) -> Any:
    return (product >> U64(32)).astype(U32)


vector("v_add_u32 v_add_nc_u32", "u32", "u32 u32", lambda a, b: a + b)
vector("v_sub_u32 v_sub_nc_u32", "u32", "u32 u32", lambda a, b: a - b)
vector("v_subrev_u32 v_subrev_nc_u32", "u32", "u32 u32", lambda a, b: b - a)
vector("v_add3_u32", "u32", "u32 u32 u32", lambda a, b, c: a + b + c)
vector("v_mul_lo_u32", "u32", "u32 u32", lambda a, b: a * b)
vector("v_mul_hi_u32", "u32", "u32 u32", lambda a, b: _high(_wide(a) * _wide(b)))
vector("v_mul_hi_i32", "i32", "i32 i32", lambda a, b: np.asarray(a).astype(I64) * np.asarray(b).astype(I64) >> 32)
vector("v_mul_u32_u24", "u32", "u32 u32", lambda a, b: (a & LOW24) * (b & LOW24))
vector("v_mul_hi_u32_u24", "u32", "u32 u32", lambda a, b: _high(_wide(a & LOW24) * _wide(b & LOW24)))
vector("v_mad_u32_u24", "u32", "u32 u32 u32", lambda a, b, c: (a & LOW24) * (b & LOW24) + c)
vector("v_mad_u32", "u32", "u32 u32 u32", lambda a, b, c: a * b + c)
vector("v_mad_nc_u64_u32", "u64", "u32 u32 u64", lambda a, b, c: _wide(a) * _wide(b) + c)
vector("v_add_nc_u64", "u64", "u64 u64", lambda a, b: a + b)
vector("v_sub_nc_u64", "u64", "u64 u64", lambda a, b: a - b)
vector("v_mul_u64", "u64", "u64 u64", lambda a, b: a * b)
vector("v_lshl_add_u64", "u64", "u64 u32 u64", lambda a, b, c: (a << _shift64(b)) + c)
vector("v_lshlrev_b64", "u64", "u32 u64", lambda a, b: b << _shift64(a))
vector("v_lshrrev_b64", "u64", "u32 u64", lambda a, b: b >> _shift64(a), Words.MIXED)
vector("v_ashrrev_i64", "i64", "u32 i64", lambda a, b: b >> _shift64(a).astype(I64), Words.MIXED)
vector("v_min_u64", "u64", "u64 u64", np.minimum, Words.MIXED)
vector("v_max_u64", "u64", "u64 u64", np.maximum, Words.MIXED)

vector("v_and_b32", "u32", "u32 u32", lambda a, b: a & b)
vector("v_or_b32", "u32", "u32 u32", lambda a, b: a | b)
vector("v_xor_b32", "u32", "u32 u32", lambda a, b: a ^ b)
vector("v_xnor_b32", "u32", "u32 u32", lambda a, b: ~(a ^ b))
vector("v_not_b32", "u32", "u32", lambda a: ~a)
vector("v_or3_b32", "u32", "u32 u32 u32", lambda a, b, c: a | b | c)
vector("v_xor3_b32", "u32", "u32 u32 u32", lambda a, b, c: a ^ b ^ c)
vector("v_and_or_b32", "u32", "u32 u32 u32", lambda a, b, c: a & b | c)
vector("v_lshlrev_b32", "u32", "u32 u32", lambda a, b: b << _shift32(a))
vector("v_lshrrev_b32", "u32", "u32 u32", lambda a, b: b >> _shift32(a))
vector("v_ashrrev_i32", "i32", "u32 i32", lambda a, b: b >> _shift32(a).astype(I32))
vector("v_lshl_add_u32", "u32", "u32 u32 u32", lambda a, b, c: (a << _shift32(b)) + c)
vector("v_add_lshl_u32", "u32", "u32 u32 u32", lambda a, b, c: a + b << _shift32(c))
vector("v_lshl_or_b32", "u32", "u32 u32 u32", lambda a, b, c: a << _shift32(b) | c)
vector("v_xad_u32", "u32", "u32 u32 u32", lambda a, b, c: (a ^ b) + c)
vector("v_bfi_b32", "u32", "u32 u32 u32", lambda a, b, c: a & b | ~a & c)
vector("v_bfm_b32", "u32", "u32 u32", lambda a, b: (U32(1) << _shift32(a)) - U32(1) << _shift32(b))


def _field(value: Any, offset: Any, width: Any) -> Any:
    """The shifted value and the mask of a bit field; a width of 0 gives nothing."""
    return value >> _shift32(offset), (U32(1) << _shift32(width)) - U32(1)


def _unsigned_field(value: Any, offset: Any, width: Any) -> Any:
    shifted, mask = _field(value, offset, width)
    return shifted & mask


def _signed_field(value: Any, offset: Any, width: Any) -> Any:
    shifted, mask = _field(value, offset, width)
    sign = mask & ~(mask >> U32(1))
    return ((shifted & mask) ^ sign) - sign


def _align(high: Any, low: Any, shift: Any) -> Any:
    return (_wide(high) << U64(32) | _wide(low)) >> _wide(shift)


def _permute_bytes(high: Any, low: Any, selectors: Any) -> Any:
    """Per selector byte: a byte of the two words, the sign of one of their halves, 0 or 0xff."""
    both: Any = _wide(high) << U64(32) | _wide(low)
    result: Any = U32(0)
    for position in range(4):
        selector = _wide(selectors) >> U64(8 * position) & U64(0xFF)
        picked = both >> (selector % U64(8)) * U64(8) & U64(0xFF)
        half = (selector - U64(8)) % U64(4)
        sign = np.where(both >> half * U64(16) + U64(15) & U64(1) != 0, 0xFF, 0)
        fixed = np.where(selector == 12, 0, 0xFF)
        byte = np.where(selector < 8, picked, np.where(selector < 12, sign, fixed))
        result = result | byte.astype(U32) << U32(8 * position)
    return result


def _reverse(value: Any) -> Any:
    result = np.zeros_like(value)
    for bit in range(32):
        result |= (value >> U32(bit) & U32(1)) << U32(31 - bit)
    return result


def _highest(value: Any) -> Any:
    """Zeros above the highest bit, -1 if there is none."""
    length = np.frexp(np.asarray(value).astype(np.float64))[1]
    return np.where(value == 0, U32(0xFFFFFFFF), (32 - length).astype(U32))


def _lowest(value: Any) -> Any:
    lowest = value & (~value + U32(1))
    return np.where(value == 0, U32(0xFFFFFFFF), U32(31) - _highest(lowest))


vector("v_bfe_u32", "u32", "u32 u32 u32", _unsigned_field)
vector("v_bfe_i32", "u32", "u32 u32 u32", _signed_field)
vector("v_alignbit_b32", "u32", "u32 u32 u32", lambda a, b, c: _align(a, b, _shift32(c)).astype(U32))
vector("v_alignbyte_b32", "u32", "u32 u32 u32", lambda a, b, c: _align(a, b, (c & U32(3)) * U32(8)).astype(U32))
vector("v_perm_b32", "u32", "u32 u32 u32", _permute_bytes)
vector("v_bfrev_b32", "u32", "u32", _reverse)
vector("v_bcnt_u32_b32", "u32", "u32 u32", lambda a, b: np.bitwise_count(a).astype(U32) + b)
vector("v_ffbh_u32 v_clz_i32_u32", "u32", "u32", _highest)
vector("v_ffbl_b32 v_ctz_i32_b32", "u32", "u32", _lowest)

for _kind in ("u32", "i32"):
    vector(f"v_min_{_kind}", _kind, f"{_kind} {_kind}", np.minimum)
    vector(f"v_max_{_kind}", _kind, f"{_kind} {_kind}", np.maximum)
    _three = f"{_kind} {_kind} {_kind}"
    vector(f"v_min3_{_kind}", _kind, _three, lambda a, b, c: np.minimum(np.minimum(a, b), c))
    vector(f"v_max3_{_kind}", _kind, _three, lambda a, b, c: np.maximum(np.maximum(a, b), c))
    vector(
        f"v_med3_{_kind}", _kind, _three, lambda a, b, c: np.maximum(np.minimum(a, b), np.minimum(np.maximum(a, b), c))
    )

vector("v_add_f32", "f32", "f32 f32", lambda a, b: a + b)
vector("v_sub_f32", "f32", "f32 f32", lambda a, b: a - b)
vector("v_subrev_f32", "f32", "f32 f32", lambda a, b: b - a)
vector("v_mul_f32", "f32", "f32 f32", lambda a, b: a * b)
vector("v_min_f32 v_min_num_f32", "f32", "f32 f32", np.fmin)
vector("v_max_f32 v_max_num_f32", "f32", "f32 f32", np.fmax)
vector("v_fma_f32", "f32", "f32 f32 f32", fused_multiply_add)
vector("v_fmac_f32", "f32", "f32 f32 self", fused_multiply_add)
vector("v_rcp_f32 v_rcp_iflag_f32", "f32", "f32", lambda a: F32(1) / a)
vector("v_trunc_f32", "f32", "f32", np.trunc)
vector("v_floor_f32", "f32", "f32", np.floor)
vector("v_ceil_f32", "f32", "f32", np.ceil)
vector("v_rndne_f32", "f32", "f32", np.rint)
vector("v_ldexp_f32", "f32", "f32 i32", lambda a, b: np.ldexp(a, b))
vector("v_cvt_f32_u32", "f32", "u32", lambda a: np.asarray(a).astype(F32))
vector("v_cvt_f32_i32", "f32", "i32", lambda a: np.asarray(a).astype(F32))
vector("v_cvt_u32_f32", "u32", "f32", lambda a: whole_number(a, 0, 2**32 - 1).astype(U32))
vector("v_cvt_i32_f32", "i32", "f32", lambda a: whole_number(a, -(2**31), 2**31 - 1).astype(I32))
vector("v_cvt_f32_ubyte0", "f32", "u32", lambda a: (a & U32(255)).astype(F32))
vector("v_cvt_f32_ubyte1", "f32", "u32", lambda a: (a >> U32(8) & U32(255)).astype(F32))
vector("v_cvt_f32_ubyte2", "f32", "u32", lambda a: (a >> U32(16) & U32(255)).astype(F32))
vector("v_cvt_f32_ubyte3", "f32", "u32", lambda a: (a >> U32(24)).astype(F32))


def truth_table(table: int, a: Any, b: Any, c: Any) -> Any:
    """Bit (a, b, c) of the table, for every bit of the operands."""
    result: Any = U32(0)
    for row in range(8):
        if table >> row & 1:
            result = result | (a if row & 4 else ~a) & (b if row & 2 else ~b) & (c if row & 1 else ~c)
    return result


def _bind_truth_table(instruction: Instruction, target: Target) -> Steps:
    allow_modifiers(instruction, "bitop3")
    destination, *texts = instruction.operands
    table = int(instruction.modifiers.get("bitop3", "0"), 0)
    reads = [source(instruction, text, "u32", i) for i, text in enumerate(texts)]
    if len(reads) not in (2, 3):
        raise Unknown(f"{instruction.text}")

    def evaluate(wave: Any) -> Any:
        values = [read(wave) for read in reads]
        return truth_table(table, *values, *[U32(0)] * (3 - len(values)))

    return Steps(evaluate, commitment(instruction, destination, Type.U32))


register_steps("v_bitop3_b32 v_bitop2_b32", _bind_truth_table)


def _bind_packed(function: Any) -> Any:
    """Two f32 side by side: op_sel and op_sel_hi pick, per source, the half that the low and the high result take."""

    def bind_steps(instruction: Instruction, target: Target) -> Steps:
        allow_modifiers(instruction, "op_sel", "op_sel_hi", "neg_lo", "neg_hi")
        destination, *texts = operands(instruction, function.__code__.co_argcount + 1)
        halves = []
        for choice, sign in (("op_sel", "neg_lo"), ("op_sel_hi", "neg_hi")):
            chosen = _flags(instruction, choice, len(texts), int(choice == "op_sel_hi"))
            reads = [
                source(instruction, _word_of(text, high), "f32", i)
                for i, (text, high) in enumerate(zip(texts, chosen, strict=True))
            ]
            halves.append(list(zip(reads, _flags(instruction, sign, len(texts), 0), strict=True)))

        def evaluate(wave: Any) -> Any:
            results, taints = [], []
            for half in halves:
                parts = [-read(wave) if negative else read(wave) for read, negative in half]
                results.append(_wide(np.asarray(function(*parts), F32).view(U32)))
                low, high = wave.take_taint()
                taints.append(low | high)
            wave.tainted_low, wave.tainted_high = taints
            return results[0] | results[1] << U64(32)

        return Steps(evaluate, commitment(instruction, destination, Type.U64, Words.APART))

    return bind_steps


def _word_of(pair: str, high: int) -> str:
    """The low or the high register of two; the other one may hold no value."""
    registers = re.fullmatch(r"([vs])\[(\d+):(\d+)\]", pair)
    if registers is None or int(registers[3]) != int(registers[2]) + 1:
        raise Unknown(f"{pair} as two f32")
    return f"{registers[1]}{int(registers[2]) + high}"


def _flags(instruction: Instruction, name: str, count: int, default: int) -> list[int]:
    value = instruction.modifiers.get(name)
    return [int(digit) for digit in value.strip("[]").split(",")] if value else [default] * count


register_steps("v_pk_add_f32", _bind_packed(lambda a, b: a + b))
register_steps("v_pk_mul_f32", _bind_packed(lambda a, b: a * b))
register_steps("v_pk_fma_f32", _bind_packed(lambda a, b, c: fused_multiply_add(a, b, c)))
