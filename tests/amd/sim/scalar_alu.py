"""Scalar arithmetic on Python integers. See `scalar` for the rows of the table."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from itertools import product
from typing import Any

import numpy as np

from tests.amd.sim.errors import UndefinedScalar
from tests.amd.sim.floats import fused_multiply_add, whole_number
from tests.amd.sim.operands import known_bits, known_bits_destination, scalar_destination, scalar_source
from tests.amd.sim.program import Instruction
from tests.amd.sim.table import Execute, Target, allow_modifiers, operands, semantics
from tests.amd.sim.wave import UNDEFINED, WORD, Wave


class Scc(Enum):
    KEPT = 0
    NONZERO = 1
    """Whether the result is not zero."""
    GIVEN = 2
    """The function returns the result and SCC."""
    ONLY = 3
    """The function returns SCC, there is no other result."""
    LOGIC = 4
    """As NONZERO; and every bit of the result depends on the same bit of the sources only."""


def signed(value: int, bits: int = 32) -> int:
    value &= (1 << bits) - 1
    return value - (1 << bits) if value >> (bits - 1) else value


def scalar(names: str, bits: int, sources: str, function: Callable[..., Any], scc: Scc = Scc.KEPT) -> None:
    """A row for every name: bits of the result and of each source, which may be `scc` or `self`, the destination."""
    kinds, mask = sources.split(), (1 << bits) - 1

    def bind(instruction: Instruction, target: Target) -> Execute:
        allow_modifiers(instruction)
        texts = list(operands(instruction, sum(kind.isdigit() for kind in kinds) + (scc is not Scc.ONLY)))
        destination = None if scc is Scc.ONLY else texts.pop(0)
        given = [(destination or "" if kind == "self" else kind if kind == "scc" else texts.pop(0)) for kind in kinds]
        sizes = [int(kind) if kind.isdigit() else 32 for kind in kinds]
        reads = [scalar_source(text, size) for text, size in zip(given, sizes, strict=True)]
        if destination is None:

            def compare(wave: Wave) -> None:
                wave.scc = int(function(*[read(wave) for read in reads]))

            return compare
        write = scalar_destination(destination, bits)
        careful = _careful(function, destination, bits, given, sizes, scc)

        def execute(wave: Wave) -> None:
            try:
                result = function(*[read(wave) for read in reads])
            except UndefinedScalar:
                careful(wave)
                return
            if scc is Scc.GIVEN:
                result, wave.scc = result
            elif scc is not Scc.KEPT:
                wave.scc = int(result & mask != 0)
            write(wave, result)

        return execute

    semantics(*names.split())(bind)


def _careful(
    function: Callable[..., Any], destination: str, bits: int, texts: list[str], sizes: list[int], scc: Scc
) -> Execute:
    """With undefined sources. What is no logic is undefined altogether, and so is what SCC says of it."""
    reads = [known_bits(text, size) for text, size in zip(texts, sizes, strict=True)]
    write, mask = known_bits_destination(destination, bits), (1 << bits) - 1

    def execute(wave: Wave) -> None:
        values = [read(wave) for read in reads]
        result, unknown = logic_of_known_bits(function, values) if scc is Scc.LOGIC else (0, mask)
        if scc is not Scc.KEPT:
            wave.scc = 1 if result & mask & ~unknown else UNDEFINED
        write(wave, result & mask & ~unknown, unknown & mask)

    return execute


def logic_of_known_bits(function: Callable[..., int], values: list[tuple[int, int]]) -> tuple[int, int]:
    """The result of bitwise logic, and its undefined bits: those that the undefined bits of the sources can change."""
    results = [function(*choice) for choice in product(*[{value, value | unknown} for value, unknown in values])]
    first, *others = results
    unknown = 0
    for other in others:
        unknown |= first ^ other
    return first & ~unknown, unknown


def _carry(total: int) -> tuple[int, int]:
    """Of a sum or difference of unsigned words."""
    return total & WORD, int(not 0 <= total <= WORD)


def _overflow(total: int) -> tuple[int, int]:
    """Of a sum or difference of signed words."""
    return total & WORD, int(not -(1 << 31) <= total < 1 << 31)


def _field(value: int, control: int, bits: int, is_signed: bool) -> int:
    offset, width = control & (bits - 1), control >> 16 & 0x7F
    if width == 0:
        return 0
    width = min(width, bits - offset)
    field = value >> offset & ((1 << width) - 1)
    return signed(field, width) if is_signed else field


def _reverse(value: int, bits: int) -> int:
    return int(f"{value:0{bits}b}"[::-1], 2)


def _lowest(value: int) -> int:
    return (value & -value).bit_length() - 1  # -1 for none, as the hardware has it


def _highest(value: int, bits: int) -> int:
    return bits - value.bit_length() if value else -1


def real(value: int) -> np.float32:
    return np.uint32(value).view(np.float32)


def bits_of(value: Any) -> int:
    return int(np.float32(value).view(np.uint32))


def _whole(value: int, low: int, high: int) -> int:
    return int(whole_number(real(value), low, high))


def _fused(a: int, b: int, c: int) -> int:
    return bits_of(fused_multiply_add(real(a), real(b), real(c)))


def _sized(bits: int) -> None:
    """What there is for 32 and for 64 bits."""
    both = f"{bits} {bits}"
    scalar(f"s_and_b{bits}", bits, both, lambda a, b: a & b, Scc.LOGIC)
    scalar(f"s_or_b{bits}", bits, both, lambda a, b: a | b, Scc.LOGIC)
    scalar(f"s_xor_b{bits}", bits, both, lambda a, b: a ^ b, Scc.LOGIC)
    scalar(f"s_andn2_b{bits} s_and_not1_b{bits}", bits, both, lambda a, b: a & ~b, Scc.LOGIC)
    scalar(f"s_orn2_b{bits} s_or_not1_b{bits}", bits, both, lambda a, b: a | ~b, Scc.LOGIC)
    scalar(f"s_nand_b{bits}", bits, both, lambda a, b: ~(a & b), Scc.LOGIC)
    scalar(f"s_nor_b{bits}", bits, both, lambda a, b: ~(a | b), Scc.LOGIC)
    scalar(f"s_xnor_b{bits}", bits, both, lambda a, b: ~(a ^ b), Scc.LOGIC)
    scalar(f"s_not_b{bits}", bits, str(bits), lambda a: ~a, Scc.LOGIC)
    scalar(f"s_lshl_b{bits}", bits, f"{bits} 32", lambda a, b: a << (b % bits), Scc.NONZERO)
    scalar(f"s_lshr_b{bits}", bits, f"{bits} 32", lambda a, b: a >> (b % bits), Scc.NONZERO)
    scalar(f"s_ashr_i{bits}", bits, f"{bits} 32", lambda a, b: signed(a, bits) >> (b % bits), Scc.NONZERO)
    scalar(f"s_bfe_u{bits}", bits, f"{bits} 32", lambda a, b: _field(a, b, bits, False), Scc.NONZERO)
    scalar(f"s_bfe_i{bits}", bits, f"{bits} 32", lambda a, b: _field(a, b, bits, True), Scc.NONZERO)
    scalar(f"s_bfm_b{bits}", bits, "32 32", lambda a, b: ((1 << (a % bits)) - 1) << (b % bits))
    scalar(f"s_brev_b{bits}", bits, str(bits), lambda a: _reverse(a, bits))
    scalar(f"s_bcnt0_i32_b{bits}", 32, str(bits), lambda a: bits - a.bit_count(), Scc.NONZERO)
    scalar(f"s_bcnt1_i32_b{bits}", 32, str(bits), lambda a: a.bit_count(), Scc.NONZERO)
    scalar(f"s_ff1_i32_b{bits} s_ctz_i32_b{bits}", 32, str(bits), _lowest)
    scalar(f"s_flbit_i32_b{bits} s_clz_i32_u{bits}", 32, str(bits), lambda a: _highest(a, bits))
    scalar(f"s_bitcmp0_b{bits}", 0, f"{bits} 32", lambda a, b: not a >> (b % bits) & 1, Scc.ONLY)
    scalar(f"s_bitcmp1_b{bits}", 0, f"{bits} 32", lambda a, b: a >> (b % bits) & 1, Scc.ONLY)
    scalar(f"s_cmp_eq_u{bits}", 0, both, lambda a, b: a == b, Scc.ONLY)
    scalar(f"s_cmp_lg_u{bits}", 0, both, lambda a, b: a != b, Scc.ONLY)


_sized(32)
_sized(64)

for comparison, holds in {
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "eq": lambda a, b: a == b,
    "lg": lambda a, b: a != b,
}.items():

    def of_signed(a: int, b: int, holds: Callable[[int, int], bool] = holds) -> bool:
        return holds(signed(a), signed(b))

    def of_signed_short(a: int, b: int, holds: Callable[[int, int], bool] = holds) -> bool:
        return holds(signed(a), signed(b, 16))

    scalar(f"s_cmp_{comparison}_i32", 0, "32 32", of_signed, Scc.ONLY)
    if comparison not in ("eq", "lg"):
        scalar(f"s_cmp_{comparison}_u32", 0, "32 32", holds, Scc.ONLY)
    scalar(f"s_cmpk_{comparison}_u32", 0, "32 32", holds, Scc.ONLY)
    scalar(f"s_cmpk_{comparison}_i32", 0, "32 32", of_signed_short, Scc.ONLY)

scalar("s_add_u32 s_add_co_u32", 32, "32 32", lambda a, b: _carry(a + b), Scc.GIVEN)
scalar("s_sub_u32 s_sub_co_u32", 32, "32 32", lambda a, b: _carry(a - b), Scc.GIVEN)
scalar("s_addc_u32 s_add_co_ci_u32", 32, "32 32 scc", lambda a, b, c: _carry(a + b + c), Scc.GIVEN)
scalar("s_subb_u32 s_sub_co_ci_u32", 32, "32 32 scc", lambda a, b, c: _carry(a - b - c), Scc.GIVEN)
scalar("s_add_i32 s_add_co_i32", 32, "32 32", lambda a, b: _overflow(signed(a) + signed(b)), Scc.GIVEN)
scalar("s_sub_i32 s_sub_co_i32", 32, "32 32", lambda a, b: _overflow(signed(a) - signed(b)), Scc.GIVEN)
scalar("s_addk_i32 s_addk_co_i32", 32, "self 32", lambda a, k: _overflow(signed(a) + signed(k, 16)), Scc.GIVEN)
scalar("s_mulk_i32", 32, "self 32", lambda a, k: a * signed(k, 16))
scalar("s_movk_i32", 32, "32", lambda k: signed(k, 16))
scalar("s_mul_i32", 32, "32 32", lambda a, b: a * b)
scalar("s_mul_hi_u32", 32, "32 32", lambda a, b: a * b >> 32)
scalar("s_mul_hi_i32", 32, "32 32", lambda a, b: signed(a) * signed(b) >> 32)
scalar("s_add_nc_u64", 64, "64 64", lambda a, b: a + b)
scalar("s_sub_nc_u64", 64, "64 64", lambda a, b: a - b)
scalar("s_mul_u64", 64, "64 64", lambda a, b: a * b)
scalar("s_min_u32", 32, "32 32", lambda a, b: (min(a, b), int(a < b)), Scc.GIVEN)
scalar("s_max_u32", 32, "32 32", lambda a, b: (max(a, b), int(a >= b)), Scc.GIVEN)
scalar("s_min_i32", 32, "32 32", lambda a, b: (min(a, b, key=signed), int(signed(a) < signed(b))), Scc.GIVEN)
scalar("s_max_i32", 32, "32 32", lambda a, b: (max(a, b, key=signed), int(signed(a) >= signed(b))), Scc.GIVEN)
scalar("s_abs_i32", 32, "32", lambda a: abs(signed(a)), Scc.NONZERO)
scalar("s_absdiff_i32", 32, "32 32", lambda a, b: abs(signed(a) - signed(b)), Scc.NONZERO)
scalar("s_sext_i32_i8", 32, "32", lambda a: signed(a, 8))
scalar("s_sext_i32_i16", 32, "32", lambda a: signed(a, 16))
scalar("s_pack_ll_b32_b16", 32, "32 32", lambda a, b: a & 0xFFFF | b << 16)
scalar("s_pack_lh_b32_b16", 32, "32 32", lambda a, b: a & 0xFFFF | b >> 16 << 16)
scalar("s_pack_hh_b32_b16", 32, "32 32", lambda a, b: a >> 16 | b >> 16 << 16)
scalar("s_bitset0_b32", 32, "self 32", lambda a, b: a & ~(1 << b % 32))
scalar("s_bitset1_b32", 32, "self 32", lambda a, b: a | 1 << b % 32)


def _shifted_add(shift: int) -> None:
    scalar(f"s_lshl{shift}_add_u32", 32, "32 32", lambda a, b: _carry((a << shift) + b), Scc.GIVEN)


for distance in (1, 2, 3, 4):
    _shifted_add(distance)

scalar("s_add_f32", 32, "32 32", lambda a, b: bits_of(real(a) + real(b)))
scalar("s_sub_f32", 32, "32 32", lambda a, b: bits_of(real(a) - real(b)))
scalar("s_mul_f32", 32, "32 32", lambda a, b: bits_of(real(a) * real(b)))
scalar("s_fmac_f32", 32, "32 32 self", _fused)
scalar("s_trunc_f32", 32, "32", lambda a: bits_of(np.trunc(real(a))))
scalar("s_cvt_f32_u32", 32, "32", lambda a: bits_of(np.float32(a)))
scalar("s_cvt_f32_i32", 32, "32", lambda a: bits_of(np.float32(signed(a))))
scalar("s_cvt_u32_f32", 32, "32", lambda a: _whole(a, 0, WORD))
scalar("s_cvt_i32_f32", 32, "32", lambda a: _whole(a, -(1 << 31), (1 << 31) - 1))
scalar("v_s_rcp_f32", 32, "32", lambda a: bits_of(np.float32(1) / real(a)))
