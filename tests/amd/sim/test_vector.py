"""Vector arithmetic: expected values are computed lane by lane with Python's numbers."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from tests.amd.sim.bench import Bench
from tests.amd.sim.errors import Refused, Unknown

ALL, LOW24 = 0xFFFFFFFF, 0xFFFFFF


def signed(value: int, bits: int = 32) -> int:
    return value - (1 << bits) if value >> (bits - 1) else value


def sample(bench: Bench, seed: int, bits: int = 32) -> np.ndarray:
    """Random values of all sizes, and the extremes."""
    rng = np.random.default_rng(seed)
    kind = np.uint32 if bits == 32 else np.uint64
    values = rng.integers(0, 1 << bits, bench.wave.lanes, dtype=kind) >> rng.integers(
        0, bits, bench.wave.lanes, dtype=kind
    )
    values[:4] = [0, 1, (1 << bits) - 1, 1 << (bits - 1)]
    rng.shuffle(values)
    return values


# v0, v1, v2 and the pairs v[4:5], v[6:7] are sources; names of instructions, operands, what comes out per lane.
WORDS: list[tuple[str, str, Callable[..., int]]] = [
    ("v_add_u32_e32 | v_add_nc_u32_e32", "v0, v1", lambda a, b, c: a + b),
    ("v_sub_u32_e32 | v_sub_nc_u32_e32", "v0, v1", lambda a, b, c: a - b),
    ("v_subrev_u32_e32 | v_subrev_nc_u32_e32", "v0, v1", lambda a, b, c: b - a),
    ("v_add3_u32", "v0, v1, v2", lambda a, b, c: a + b + c),
    ("v_mul_lo_u32", "v0, v1", lambda a, b, c: a * b),
    ("v_mul_hi_u32", "v0, v1", lambda a, b, c: a * b >> 32),
    ("v_mul_hi_i32", "v0, v1", lambda a, b, c: signed(a) * signed(b) >> 32),
    ("v_mul_u32_u24_e32", "v0, v1", lambda a, b, c: (a & LOW24) * (b & LOW24)),
    ("v_mad_u32_u24", "v0, v1, v2", lambda a, b, c: (a & LOW24) * (b & LOW24) + c),
    ("v_and_b32_e32", "v0, v1", lambda a, b, c: a & b),
    ("v_or_b32_e32", "v0, v1", lambda a, b, c: a | b),
    ("v_xor_b32_e32", "v0, v1", lambda a, b, c: a ^ b),
    ("v_not_b32_e32", "v0", lambda a, b, c: ~a),
    ("v_or3_b32", "v0, v1, v2", lambda a, b, c: a | b | c),
    ("v_and_or_b32", "v0, v1, v2", lambda a, b, c: a & b | c),
    ("v_lshlrev_b32_e32", "v0, v1", lambda a, b, c: b << a % 32),
    ("v_lshrrev_b32_e32", "v0, v1", lambda a, b, c: b >> a % 32),
    ("v_ashrrev_i32_e32", "v0, v1", lambda a, b, c: signed(b) >> a % 32),
    ("v_lshl_add_u32", "v0, v1, v2", lambda a, b, c: (a << b % 32) + c),
    ("v_add_lshl_u32", "v0, v1, v2", lambda a, b, c: ((a + b) & ALL) << c % 32),
    ("v_lshl_or_b32", "v0, v1, v2", lambda a, b, c: a << b % 32 | c),
    ("v_xad_u32", "v0, v1, v2", lambda a, b, c: (a ^ b) + c),
    ("v_bfi_b32", "v0, v1, v2", lambda a, b, c: a & b | ~a & c),
    ("v_bfm_b32", "v0, v1", lambda a, b, c: ((1 << a % 32) - 1) << b % 32),
    ("v_bfe_u32", "v0, v1, v2", lambda a, b, c: a >> b % 32 & ((1 << c % 32) - 1)),
    ("v_bfe_i32", "v0, 4, 8", lambda a, b, c: signed(a >> 4 & 0xFF, 8)),
    ("v_bfrev_b32_e32", "v0", lambda a, b, c: int(f"{a:032b}"[::-1], 2)),
    ("v_bcnt_u32_b32", "v0, v1", lambda a, b, c: a.bit_count() + b),
    ("v_ffbh_u32_e32 | v_clz_i32_u32_e32", "v0", lambda a, b, c: 32 - a.bit_length() if a else -1),
    ("v_ffbl_b32_e32 | v_ctz_i32_b32_e32", "v0", lambda a, b, c: (a & -a).bit_length() - 1),
    ("v_alignbit_b32", "v0, v1, v2", lambda a, b, c: (a << 32 | b) >> c % 32),
    ("v_alignbyte_b32", "v0, v1, v2", lambda a, b, c: (a << 32 | b) >> 8 * (c % 4)),
    ("v_min_u32_e32", "v0, v1", lambda a, b, c: min(a, b)),
    ("v_max_i32_e32", "v0, v1", lambda a, b, c: max(a, b, key=signed)),
    ("v_max3_u32", "v0, v1, v2", lambda a, b, c: max(a, b, c)),
    ("v_med3_u32", "v0, v1, v2", lambda a, b, c: sorted([a, b, c])[1]),
    ("v_med3_i32", "v0, v1, v2", lambda a, b, c: sorted([a, b, c], key=signed)[1]),
]


def expect(bench: Bench, destination: str, values: list[int]) -> None:
    size = 64 if "[" in destination else 32
    assert bench[destination].tolist() == [value & ((1 << size) - 1) for value in values]


@pytest.mark.parametrize("names, sources, function", WORDS, ids=lambda value: value if isinstance(value, str) else "")
def test_words(bench: Bench, names: str, sources: str, function: Callable[..., int]) -> None:
    columns = [sample(bench, seed) for seed in range(3)]
    for index, column in enumerate(columns):
        bench[f"v{index}"] = column
    bench(" | ".join(f"{name} v8, {sources}" for name in names.split(" | ")))
    expect(bench, "v8", [function(*row) for row in zip(*(column.tolist() for column in columns), strict=True)])


PAIRS: list[tuple[str, Callable[..., int]]] = [
    ("v_lshlrev_b64 v[8:9], v0, v[4:5] | v_lshlrev_b64_e32 v[8:9], v0, v[4:5]", lambda a, b, c: b << a % 64),
    ("v_lshrrev_b64 v[8:9], v0, v[4:5]", lambda a, b, c: b >> a % 64),
    ("v_ashrrev_i64 v[8:9], v0, v[4:5]", lambda a, b, c: signed(b, 64) >> a % 64),
    ("v_lshl_add_u64 v[8:9], v[4:5], 3, v[6:7]", lambda a, b, c: (b << 3) + c),
    ("v_mov_b64_e32 v[8:9], v[4:5]", lambda a, b, c: b),
    ("v_mad_u64_u32 v[8:9], vcc, v0, v0, v[4:5] | v_mad_nc_u64_u32 v[8:9], v0, v0, v[4:5]", lambda a, b, c: a * a + b),
]
PAIRS_OF_GFX12: list[tuple[str, Callable[..., int]]] = [
    ("v_add_nc_u64_e32 v[8:9], v[4:5], v[6:7]", lambda a, b, c: b + c),
    ("v_sub_nc_u64_e32 v[8:9], v[4:5], v[6:7]", lambda a, b, c: b - c),
    ("v_mul_u64_e32 v[8:9], v[4:5], v[6:7]", lambda a, b, c: b * c),
    ("v_max_u64 v[8:9], v[4:5], v[6:7]", lambda a, b, c: max(b, c)),
]


def check_pairs(bench: Bench, text: str, function: Callable[..., int]) -> None:
    columns = [sample(bench, 0), sample(bench, 1, 64), sample(bench, 2, 64)]
    for name, column in zip(("v0", "v[4:5]", "v[6:7]"), columns, strict=True):
        bench[name] = column
    bench(text)
    expect(bench, "v[8:9]", [function(*row) for row in zip(*(column.tolist() for column in columns), strict=True)])


@pytest.mark.parametrize("text, function", PAIRS, ids=lambda value: value if isinstance(value, str) else "")
def test_pairs(bench: Bench, text: str, function: Callable[..., int]) -> None:
    check_pairs(bench, text, function)


@pytest.mark.parametrize("text, function", PAIRS_OF_GFX12, ids=lambda value: value if isinstance(value, str) else "")
def test_pairs_of_gfx12(gfx12: Bench, text: str, function: Callable[..., int]) -> None:
    check_pairs(gfx12, text, function)


def test_logic_of_three_operands_by_truth_table(gfx12: Bench) -> None:
    for index in range(3):
        gfx12[f"v{index}"] = sample(gfx12, index)
    a, b, c = (gfx12[f"v{index}"] for index in range(3))
    gfx12("v_bitop3_b32 v8, v0, v1, v2 bitop3:0xe8")  # the majority
    assert (gfx12["v8"] == (a & b | b & c | a & c)).all()
    gfx12("v_dual_add_nc_u32 v9, v1, v2 :: v_dual_bitop2_b32 v8, v0, v1 bitop3:0x14")
    assert (gfx12["v8"] == a ^ b).all() and (gfx12["v9"] == b + c).all()
    gfx12("v_xor3_b32 v8, v0, v1, v2", "v_mad_u32 v9, v0, v1, v2")
    assert (gfx12["v8"] == a ^ b ^ c).all() and (gfx12["v9"] == a * b + c).all()


def test_both_halves_of_a_dual_instruction_read_before_either_writes(gfx12: Bench) -> None:
    gfx12["v0"], gfx12["v1"] = 1, 2
    gfx12("v_dual_mov_b32 v0, v1 :: v_dual_mov_b32 v1, v0")
    assert (gfx12["v0"] == 2).all() and (gfx12["v1"] == 1).all()


@pytest.mark.parametrize("selector", [0x07060504, 0x03020100, 0x0C0D0B08, 0x0A090100])
def test_permutation_of_bytes(bench: Bench, selector: int) -> None:
    columns = [sample(bench, seed) for seed in range(2)]
    bench["v0"], bench["v1"], bench["v2"] = *columns, selector
    bench("v_perm_b32 v8, v0, v1, v2")

    def byte(both: bytes, choice: int) -> int:
        if choice < 8:
            return both[choice]
        if choice < 12:  # the sign of a half
            return 0xFF if both[2 * (choice - 8) + 1] & 0x80 else 0
        return 0 if choice == 12 else 0xFF

    expected = []
    for high, low in zip(*(column.tolist() for column in columns), strict=True):
        both = struct.pack("<II", low, high)
        expected.append(int.from_bytes([byte(both, choice) for choice in selector.to_bytes(4, "little")], "little"))
    expect(bench, "v8", expected)


def test_only_lanes_that_are_switched_on_are_written(bench: Bench) -> None:
    bench["v0"], bench["v8"] = 5, 1
    bench["{exec}"] = 0b1010
    bench("v_add_u32_e32 v8, 1, v0 | v_add_nc_u32_e32 v8, 1, v0")
    assert bench["v8"].tolist()[:5] == [1, 6, 1, 6, 1]


FLOATS: list[tuple[str, Callable[..., Fraction]]] = [
    ("v_add_f32_e32 v8, v0, v1", lambda a, b, c: Fraction(a) + Fraction(b)),
    ("v_sub_f32_e32 v8, v0, v1", lambda a, b, c: Fraction(a) - Fraction(b)),
    ("v_mul_f32_e32 v8, v0, v1", lambda a, b, c: Fraction(a) * Fraction(b)),
    ("v_mul_f32_e64 v8, -v0, |v1|", lambda a, b, c: -Fraction(a) * abs(Fraction(b))),
    ("v_fma_f32 v8, v0, v1, v2", lambda a, b, c: Fraction(a) * Fraction(b) + Fraction(c)),
    ("v_trunc_f32_e32 v8, v0", lambda a, b, c: Fraction(math.trunc(a))),
    ("v_rndne_f32_e32 v8, v0", lambda a, b, c: Fraction(round(a))),
    ("v_rcp_f32_e32 v8, v1", lambda a, b, c: 1 / Fraction(b)),
]


def nearest_f32(value: Fraction) -> np.float32:
    """Rounds once: the float32 whose distance is smallest, the even one of two."""
    guess = np.float32(float(value))
    near = [np.nextafter(guess, np.float32(-np.inf)), guess, np.nextafter(guess, np.float32(np.inf))]
    return min(near, key=lambda x: (abs(Fraction(float(x)) - value), int(x.view(np.uint32)) & 1))


@pytest.mark.parametrize("text, function", FLOATS, ids=lambda value: value if isinstance(value, str) else "")
def test_floats_are_rounded_once(bench: Bench, text: str, function: Callable[..., Any]) -> None:
    rng = np.random.default_rng(7)
    columns = [rng.standard_normal(bench.wave.lanes).astype(np.float32) * np.float32(4.0) for _ in range(3)]
    columns[0][0], columns[1][0] = np.float32(1 + 2**-23), np.float32(1 + 2**-23)
    columns[2][0] = np.float32(-1 - 2**-22)  # a fused sum keeps 2^-46, one of two roundings gives 0
    columns[0][1], columns[1][1], columns[2][1] = np.float32(1 + 2**-12), np.float32(1 + 2**-12), np.float32(2**-60)
    for index, column in enumerate(columns):
        bench[f"v{index}"] = column
    bench(text)
    rows = zip(*(column.tolist() for column in columns), strict=True)
    assert bench.floats("v8").tolist() == [float(nearest_f32(function(*row))) for row in rows]


def test_conversions_between_floats_and_whole_numbers(bench: Bench) -> None:
    given = np.zeros(bench.wave.lanes, np.float32)
    given[:6] = [-1.5, 2.5, 3e9, 5e9, np.nan, -3e9]
    bench["v0"] = given
    bench("v_cvt_u32_f32_e32 v8, v0", "v_cvt_i32_f32_e32 v9, v0")
    assert bench["v8"].tolist()[:6] == [0, 2, 3_000_000_000, ALL, 0, 0]
    assert bench["v9"].view(np.int32).tolist()[:6] == [-1, 2, 2**31 - 1, 2**31 - 1, 0, -(2**31)]
    bench["v1"] = 0xFFFFFF81
    bench("v_cvt_f32_u32_e32 v8, v1", "v_cvt_f32_i32_e32 v9, v1")
    assert bench.floats("v8")[0] == 2**32 and bench.floats("v9")[0] == -127  # to nearest


def test_packed_floats(bench: Bench) -> None:
    low, high = (np.arange(bench.wave.lanes, dtype=np.float32) + start for start in (0.5, 100.25))
    pair = np.stack([low, high], axis=1).view(np.uint64)[:, 0]
    bench["v[4:5]"] = pair
    bench["s[2:3]"] = int(np.array([2.0, 3.0], np.float32).view(np.uint64)[0])
    bench("v_pk_add_f32 v[8:9], v[4:5], v[4:5]", "v_pk_mul_f32 v[10:11], v[4:5], s[2:3] op_sel_hi:[1,0]")
    assert (bench.floats("v8") == 2 * low).all() and (bench.floats("v9") == 2 * high).all()
    assert (bench.floats("v10") == 2 * low).all() and (bench.floats("v11") == 2 * high).all()
    bench("v_pk_mul_f32 v[10:11], v[4:5], v[8:9]", "v_pk_add_f32 v[12:13], v[4:5], v[4:5] neg_lo:[0,1]")
    assert (bench.floats("v11") == 2 * high * high).all() and (bench.floats("v12") == 0).all()


def test_packed_floats_look_at_the_halves_that_they_take(bench: Bench) -> None:
    bench["v4"], bench["v[6:7]"] = 0x40000000, 0x40800000_3F800000
    bench("v_pk_mul_f32 v[8:9], v[4:5], v[6:7] op_sel_hi:[0,1]")
    assert (bench.floats("v8") == 2).all() and (bench.floats("v9") == 8).all()
    bench("v_pk_mul_f32 v[8:9], v[4:5], v[6:7]")
    assert (bench.floats("v8") == 2).all()
    with pytest.raises(Refused, match="v5 was never written|v9 was never written"):
        bench("v_cmp_eq_u32_e32 {vcc}, 0, v9")


def test_computing_with_undefined_lanes_gives_undefined_lanes(bench: Bench) -> None:
    bench["v1"] = 3
    bench["{exec}"] = 0b11
    bench("v_mov_b32_e32 v0, 7")
    bench["{exec}"] = bench.wave.everyone
    bench("v_add_u32_e32 v8, v0, v1 | v_add_nc_u32_e32 v8, v0, v1")
    with pytest.raises(Refused, match="lane 2 of v8 was never written"):
        bench("v_cmp_eq_u32_e32 {vcc}, v8, v1")
    bench["{exec}"] = 0b11
    assert bench("v_cmp_gt_u32_e32 {vcc}, v8, v1")["{vcc}"] == 0b11


def test_the_low_word_of_a_sum_needs_no_high_words(bench: Bench) -> None:
    bench["v0"], bench["v4"] = 3, 5
    bench("v_mad_u64_u32 v[8:9], vcc, v0, v0, v[4:5] | v_mad_nc_u64_u32 v[8:9], v0, v0, v[4:5]")
    assert (bench["v8"] == 14).all()
    with pytest.raises(Refused, match="v9 was never written"):
        bench("v_mov_b32_e32 v1, v9", "v_cmp_eq_u32_e32 {vcc}, 0, v9")


@pytest.mark.parametrize(
    "text", ["v_add_f32_e64 v8, v0, v1 clamp mul:2", "v_frobnicate_b32 v0, v1", "v_add_f32_e32 v8, v0"]
)
def test_what_is_not_known_is_refused(arch: str, text: str) -> None:
    with pytest.raises(Unknown):
        Bench(arch)(text)
