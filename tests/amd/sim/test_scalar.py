"""Scalar instructions: arithmetic, SCC, moves, EXEC, and what is known bit by bit of undefined masks."""

from __future__ import annotations

import struct

import pytest

from tests.amd.sim.bench import Bench
from tests.amd.sim.errors import Refused, Unknown

TOP = 0x80000000
ALL = 0xFFFFFFFF


def f32(value: float) -> int:
    return int.from_bytes(struct.pack("<f", value), "little")


# Operands are s0 and s1, or pairs at s2 and s4; the result is s8; SCC after it, None where it is left as it was, 1.
WORDS = [
    ("s_add_u32 | s_add_co_u32", ALL, 2, 1, 1),
    ("s_add_u32 | s_add_co_u32", 3, 4, 7, 0),
    ("s_sub_u32 | s_sub_co_u32", 3, 4, ALL, 1),
    ("s_addc_u32 | s_add_co_ci_u32", ALL, 0, 0, 1),
    ("s_subb_u32 | s_sub_co_ci_u32", 5, 3, 1, 0),
    ("s_add_i32 | s_add_co_i32", 0x7FFFFFFF, 1, TOP, 1),
    ("s_add_i32 | s_add_co_i32", ALL, 1, 0, 0),
    ("s_sub_i32 | s_sub_co_i32", TOP, 1, 0x7FFFFFFF, 1),
    ("s_mul_i32", 0x10001, 0x10001, 0x20001, None),
    ("s_mul_hi_u32", ALL, ALL, 0xFFFFFFFE, None),
    ("s_mul_hi_i32", ALL, 5, ALL, None),
    ("s_min_u32", 7, ALL, 7, 1),
    ("s_max_u32", 7, ALL, ALL, 0),
    ("s_min_i32", 7, ALL, ALL, 0),
    ("s_max_i32", 7, ALL, 7, 1),
    ("s_and_b32", 0xF0F0, 0xFF00, 0xF000, 1),
    ("s_and_b32", 0xF0, 0x0F, 0, 0),
    ("s_or_b32", 0xF0, 0x0F, 0xFF, 1),
    ("s_xor_b32", 0xFF, 0x0F, 0xF0, 1),
    ("s_andn2_b32 | s_and_not1_b32", 0xFF, 0x0F, 0xF0, 1),
    ("s_orn2_b32 | s_or_not1_b32", 1, ALL, 1, 1),
    ("s_nand_b32", ALL, ALL, 0, 0),
    ("s_nor_b32", ALL, 0, 0, 0),
    ("s_xnor_b32", 0xF, 0xF, ALL, 1),
    ("s_lshl_b32", 3, 33, 6, 1),
    ("s_lshr_b32", TOP, 31, 1, 1),
    ("s_ashr_i32", TOP, 31, ALL, 1),
    ("s_bfe_u32", 0x12345678, 0x80008, 0x56, 1),
    ("s_bfe_i32", 0x0000FF00, 0x80008, ALL, 1),
    ("s_bfe_u32", 0x12345678, 0x00008, 0, 0),
    ("s_bfm_b32", 4, 8, 0xF00, None),
    ("s_lshl1_add_u32", TOP, 3, 3, 1),
    ("s_lshl3_add_u32", 2, 5, 21, 0),
    ("s_pack_ll_b32_b16", 0x11112222, 0x33334444, 0x44442222, None),
    ("s_pack_lh_b32_b16", 0x11112222, 0x33334444, 0x33332222, None),
    ("s_pack_hh_b32_b16", 0x11112222, 0x33334444, 0x33331111, None),
    ("s_absdiff_i32", 3, 10, 7, 1),
]


@pytest.mark.parametrize("names, a, b, result, scc", WORDS)
def test_words(bench: Bench, names: str, a: int, b: int, result: int, scc: int | None) -> None:
    bench.wave.scc = 1
    bench["s0"], bench["s1"] = a, b
    bench(" | ".join(f"{name} s8, s0, s1" for name in names.split(" | ")))
    assert bench["s8"] == result
    assert bench["scc"] == (1 if scc is None else scc)


PAIRS = [
    ("s_and_b64 s[8:9], s[2:3], s[4:5]", 0xF00000000F, 0xF0000000F0, 0xF000000000, 1),
    ("s_lshl_b64 s[8:9], s[2:3], s4", 1, 36, 1 << 36, 1),
    ("s_lshr_b64 s[8:9], s[2:3], s4", 1 << 40, 38, 4, 1),
    ("s_ashr_i64 s[8:9], s[2:3], s4", 1 << 63, 60, 2**64 - 8, 1),
    ("s_not_b64 s[8:9], s[2:3]", 2**64 - 1, 0, 0, 0),
    ("s_mov_b64 s[8:9], s[2:3]", 0x123456789A, 0, 0x123456789A, None),
    ("s_cselect_b64 s[8:9], s[2:3], s[4:5]", 5, 6, 5, None),
]


@pytest.mark.parametrize("text, a, b, result, scc", PAIRS)
def test_pairs(bench: Bench, text: str, a: int, b: int, result: int, scc: int | None) -> None:
    bench.wave.scc = 1
    bench["s[2:3]"], bench["s[4:5]"] = a, b
    bench(text)
    assert bench["s[8:9]"] == result
    assert bench["scc"] == (1 if scc is None else scc)


SINGLE = [
    ("s_not_b32", 0xF, 0xFFFFFFF0),
    ("s_brev_b32", 1, TOP),
    ("s_bcnt1_i32_b32", 0xF0F, 8),
    ("s_bcnt0_i32_b32", 0xF0F, 24),
    ("s_ff1_i32_b32 | s_ctz_i32_b32", 0x50, 4),
    ("s_ff1_i32_b32 | s_ctz_i32_b32", 0, ALL),
    ("s_flbit_i32_b32 | s_clz_i32_u32", 0x50, 25),
    ("s_abs_i32", ALL, 1),
    ("s_sext_i32_i8", 0x80, 0xFFFFFF80),
    ("s_sext_i32_i16", 0x7FFF, 0x7FFF),
    ("s_mov_b32", 0x1234, 0x1234),
]


@pytest.mark.parametrize("names, a, result", SINGLE)
def test_single_operands(bench: Bench, names: str, a: int, result: int) -> None:
    bench["s0"] = a
    bench(" | ".join(f"{name} s8, s0" for name in names.split(" | ")))
    assert bench["s8"] == result


def test_constants_in_instructions(bench: Bench) -> None:
    bench("s_movk_i32 s0, 0xffff")
    bench("s_mov_b32 s1, -1", "s_mov_b32 s2, 1.0", "s_mov_b64 s[4:5], -2", "s_mov_b32 s3, 0x12345678")
    assert [bench[name] for name in ("s0", "s1", "s2", "s3", "s[4:5]")] == [ALL, ALL, f32(1), 0x12345678, 2**64 - 2]
    bench("s_addk_i32 s3, 0xfff8 | s_addk_co_i32 s3, 0xfff8")
    bench("s_mulk_i32 s1, 0x3")
    assert bench["s3"] == 0x12345670 and bench["s1"] == ALL - 2


def test_float_and_wide_arithmetic_of_gfx12(gfx12: Bench) -> None:
    gfx12["s0"], gfx12["s1"], gfx12["s[2:3]"], gfx12["s[4:5]"] = f32(3.5), 3000000000, 2**63, 2**63 + 1
    gfx12("s_mul_f32 s8, s0, s0", "s_cvt_f32_u32 s9, s1", "s_cvt_u32_f32 s10, s0", "s_trunc_f32 s11, s0")
    gfx12("s_add_nc_u64 s[12:13], s[2:3], s[4:5]", "s_mul_u64 s[14:15], s[2:3], s[4:5]")
    assert [gfx12[f"s{i}"] for i in (8, 9, 10, 11)] == [f32(12.25), f32(3e9), 3, f32(3)]
    assert gfx12["s[12:13]"] == 1 and gfx12["s[14:15]"] == 2**63
    gfx12("s_fmac_f32 s8, s0, s0")
    assert gfx12["s8"] == f32(24.5)


COMPARED = [
    ("s_cmp_eq_u32 s0, s1", 5, 5, 1),
    ("s_cmp_lg_u32 s0, s1", 5, 5, 0),
    ("s_cmp_lt_u32 s0, s1", 5, ALL, 1),
    ("s_cmp_lt_i32 s0, s1", 5, ALL, 0),
    ("s_cmp_ge_i32 s0, s1", 5, ALL, 1),
    ("s_cmp_gt_u32 s0, s1", 5, 4, 1),
    ("s_cmp_le_u32 s0, s1", 5, 4, 0),
    ("s_bitcmp1_b32 s0, s1", 4, 2, 1),
    ("s_bitcmp0_b32 s0, s1", 4, 2, 0),
]


@pytest.mark.parametrize("text, a, b, scc", COMPARED)
def test_comparisons(bench: Bench, text: str, a: int, b: int, scc: int) -> None:
    bench["s0"], bench["s1"] = a, b
    assert bench(text)["scc"] == scc


def test_comparisons_of_gfx9_with_short_constants(gfx9: Bench) -> None:
    gfx9["s0"] = ALL
    assert gfx9("s_cmpk_gt_u32 s0, 0xfff")["scc"] == 1
    assert gfx9("s_cmpk_eq_i32 s0, 0xffff")["scc"] == 1


def test_exec_and_what_depends_on_it(bench: Bench) -> None:
    bits, everyone = bench.target.lanes, bench.wave.everyone
    bench["{s4}"] = 0b1100
    bench(f"s_and_saveexec_b{bits} {{s8}}, {{s4}}")
    assert bench["{exec}"] == 0b1100 and bench["{s8}"] == everyone and bench["scc"] == 1
    bench(f"s_xor_saveexec_b{bits} {{s10}}, -1")
    assert bench["{exec}"] == everyone - 0b1100 and bench["{s10}"] == 0b1100
    name = "andn2" if bench.target.is_gfx9 else "and_not1"
    bench(f"s_{name}_saveexec_b{bits} {{s12}}, {{s8}}")
    assert bench["{exec}"] == 0b1100  # source and not EXEC
    bench(f"s_mov_b{bits} {{exec}}, 1", f"s_or_b{bits} {{exec}}, {{exec}}, {{s4}}")
    assert bench["{exec}"] == 0b1101
    assert bench.wave.active.tolist()[:5] == [True, False, True, True, False]


def test_undefined_bits_matter_only_where_they_can_change_a_result(bench: Bench) -> None:
    """Masks of lanes that are put together from pieces start from an undefined register."""
    bits = bench.target.lanes
    bench["{exec}"] = 0xF
    bench["{s4}"] = 0b0101
    name = "andn2" if bench.target.is_gfx9 else "and_not1"
    bench(f"s_{name}_b{bits} {{s8}}, {{s20}}, {{exec}}", f"s_or_b{bits} {{s8}}, {{s8}}, {{s4}}")
    with pytest.raises(Refused, match="s8 was never written"):
        bench("s_mov_b32 s30, s8", "s_cmp_eq_u32 s8, 0")
    bench(f"s_and_b{bits} {{s10}}, {{exec}}, {{s8}}")
    assert bench["{s10}"] == 0b0101
    with pytest.raises(Refused, match="undefined value for exec"):
        bench(f"s_mov_b{bits} {{exec}}, {{s8}}")
    bench(f"s_and_saveexec_b{bits} {{s12}}, {{s8}}")
    assert bench["{exec}"] == 0b0101


def test_undefined_registers_are_refused_when_computed_with(bench: Bench) -> None:
    bench["s1"] = 4
    bench("s_add_u32 s8, s0, s1 | s_add_co_u32 s8, s0, s1")
    with pytest.raises(Refused, match="s8 was never written"):
        bench("s_cmp_eq_u32 s8, s1")
    with pytest.raises(Refused, match="SCC was never written"):
        bench("s_cselect_b32 s9, s1, s1")


@pytest.mark.parametrize("text", ["s_frobnicate_b32 s0, s1", "s_add_u32 s0, s1", "s_mov_b32 s0, shared_limit"])
def test_what_is_not_known_is_refused(arch: str, text: str) -> None:
    with pytest.raises(Unknown):
        Bench(arch)(text)


def test_hardware_registers(gfx12: Bench) -> None:
    gfx12("s_getreg_b32 s0, hwreg(HW_REG_IB_STS2, 6, 4)")
    assert gfx12["s0"] == 0
    with pytest.raises(Unknown, match="HW_REG_WAVE_STATUS"):
        gfx12("s_getreg_b32 s0, hwreg(HW_REG_WAVE_STATUS, 0, 4)")
    gfx12("s_setreg_imm32_b32 hwreg(HW_REG_WAVE_MODE, 25, 1), 1")
    with pytest.raises(Unknown, match="HW_REG_WAVE_MODE, 4, 2"):
        gfx12("s_setreg_imm32_b32 hwreg(HW_REG_WAVE_MODE, 4, 2), 1")


def test_clocks_run(bench: Bench) -> None:
    wait = "s_waitcnt lgkmcnt(0) | s_wait_kmcnt 0x0"
    bench.machine.cycles = 5 << 32
    bench("s_memrealtime s[0:1] | s_sendmsg_rtn_b64 s[0:1], sendmsg(MSG_RTN_GET_REALTIME)")
    with pytest.raises(Refused, match="s0 is being loaded"):
        bench("s_mov_b32 s4, s0")
    assert bench(wait)["s[0:1]"] == 5 << 32
    bench.machine.cycles += 7
    assert bench("s_memtime s[0:1] | s_get_shader_cycles_u64 s[0:1]", wait)["s[0:1]"] == (5 << 32) + 7
