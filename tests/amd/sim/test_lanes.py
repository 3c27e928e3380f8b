"""Masks of lanes, and values that move between lanes: comparisons, selection, carries, DPP, SDWA, permutations."""

from __future__ import annotations

import numpy as np
import pytest

from tests.amd.sim.bench import Bench
from tests.amd.sim.errors import Refused

WAIT = "s_waitcnt lgkmcnt(0) | s_wait_dscnt 0x0"


def lane_numbers(bench: Bench) -> np.ndarray:
    return np.arange(bench.wave.lanes)


def mask(lanes: np.ndarray) -> int:
    return sum(1 << int(lane) for lane in np.flatnonzero(lanes))


COMPARISONS = [
    ("v_cmp_eq_u32_e32 {vcc}, v0, v1", lambda a, b: a == b),
    ("v_cmp_ne_u32_e32 {vcc}, v0, v1", lambda a, b: a != b),
    ("v_cmp_gt_u32_e32 {vcc}, v0, v1", lambda a, b: a > b),
    ("v_cmp_lt_i32_e32 {vcc}, v0, v1", lambda a, b: a.astype(np.int32) < b.astype(np.int32)),
    ("v_cmp_gt_f32_e32 {vcc}, v0, v1", lambda a, b: a.view(np.float32) > b.view(np.float32)),
    ("v_cmp_nlt_f32_e32 {vcc}, v0, v1", lambda a, b: ~(a.view(np.float32) < b.view(np.float32))),
    ("v_cmp_u_f32_e32 {vcc}, v0, v1", lambda a, b: np.isnan(a.view(np.float32)) | np.isnan(b.view(np.float32))),
    ("v_cmp_ne_u16_e32 {vcc}, v0, v1", lambda a, b: a & 0xFFFF != b & 0xFFFF),
]


@pytest.mark.parametrize("text, holds", COMPARISONS, ids=lambda value: value if isinstance(value, str) else "")
def test_comparisons(bench: Bench, text: str, holds: object) -> None:
    rng = np.random.default_rng(3)
    a, b = (rng.integers(0, 1 << 32, bench.wave.lanes, dtype=np.uint32) for _ in range(2))
    a[:8], b[4:12] = b[:8], 0x7FC00000  # some equal, some NaN
    bench["v0"], bench["v1"], bench["{exec}"] = a, b, bench.wave.everyone - 0b110
    expected = mask(holds(a, b)) & ~0b110  # type: ignore[operator]
    assert bench(text)["{vcc}"] == expected


def test_comparisons_of_two_words_and_their_destination(bench: Bench) -> None:
    lanes = lane_numbers(bench).astype(np.uint64)
    bench["v[0:1]"], bench["v[2:3]"] = lanes << 32, np.uint64(5) << 32
    assert bench("v_cmp_lt_u64_e64 {s4}, v[0:1], v[2:3]")["{s4}"] == 0b11111
    assert bench("v_cmp_ge_u64_e64 {s4}, v[0:1], 0")["{s4}"] == bench.wave.everyone


def test_comparison_that_sets_exec(gfx9: Bench, gfx12: Bench) -> None:
    for bench in (gfx9, gfx12):
        bench["v0"] = lane_numbers(bench)
        bench("v_cmpx_gt_u32_e32 vcc, 3, v0 | v_cmpx_gt_u32_e32 3, v0")
        assert bench["{exec}"] == 0b111
    assert gfx9["vcc"] == 0b111


def test_classes_of_floats(bench: Bench) -> None:
    values = np.zeros(bench.wave.lanes, np.float32)
    values[:7] = [np.nan, -np.inf, -1.0, -0.0, 0.0, 2.0, np.inf]
    bench["v0"] = values
    assert bench("v_cmp_class_f32_e64 {s4}, v0, 3")["{s4}"] == 0b1
    bench["s0"] = 0x204  # infinities
    assert bench("v_cmp_class_f32_e64 {s4}, v0, s0")["{s4}"] == 0b1000010
    bench["s0"] = 0x108  # normal numbers
    assert bench("v_cmp_class_f32_e64 {s4}, v0, s0")["{s4}"] == 0b100100


def test_selection_by_a_mask(bench: Bench) -> None:
    bench["v0"], bench["v1"], bench["{vcc}"], bench["{s4}"] = 1, lane_numbers(bench) + 10, 0b101, 0b010
    bench("v_cndmask_b32_e32 v2, v0, v1, {vcc}", "v_cndmask_b32_e64 v3, v0, 2.0, {s4}")
    assert bench["v2"].tolist()[:4] == [10, 1, 12, 1]
    assert bench["v3"].tolist()[:3] == [1, 0x40000000, 1]


def test_selection_needs_only_what_it_chooses(bench: Bench) -> None:
    bench["v1"], bench["{vcc}"] = 7, bench.wave.everyone
    assert (bench("v_cndmask_b32_e32 v2, v0, v1, {vcc}")["v2"] == 7).all()
    bench["{vcc}"] = bench.wave.everyone - 1
    bench("v_cndmask_b32_e32 v2, v0, v1, {vcc}")
    with pytest.raises(Refused, match="lane 0 of v2 was never written"):
        bench["v2"]


def test_carries(bench: Bench) -> None:
    low = np.where(lane_numbers(bench) % 2 == 0, 0xFFFFFFFF, 5)
    bench["v0"], bench["v1"], bench["v2"] = low, 1, 10
    bench("v_add_co_u32_e64 v4, {s4}, v0, v1")
    bench("v_addc_co_u32_e64 v5, {s6}, v2, v2, {s4} | v_add_co_ci_u32_e64 v5, {s6}, v2, v2, {s4}")
    even = mask(lane_numbers(bench) % 2 == 0)
    assert bench["{s4}"] == even and bench["{s6}"] == 0
    assert bench["v4"].tolist()[:2] == [0, 6] and bench["v5"].tolist()[:2] == [21, 20]
    bench("v_sub_co_u32_e64 v4, {s4}, v1, v0")
    assert bench["{s4}"] == bench.wave.everyone and bench["v4"].tolist()[:2] == [2, 0xFFFFFFFC]
    bench("v_subb_co_u32_e64 v5, {s6}, v2, v1, {s4} | v_sub_co_ci_u32_e64 v5, {s6}, v2, v1, {s4}")
    assert (bench["v5"] == 8).all()


def test_product_with_carry(gfx9: Bench) -> None:
    gfx9["v0"], gfx9["v[2:3]"] = 0xFFFFFFFF, (1 << 64) - 1
    gfx9("v_mad_u64_u32 v[4:5], s[4:5], v0, v0, v[2:3]")
    assert gfx9["s[4:5]"] == gfx9.wave.everyone
    assert (gfx9["v[4:5]"] == np.uint64(0xFFFFFFFF**2 - 1)).all()


def test_counting_lanes_below(bench: Bench) -> None:
    bench["s0"], bench["s1"], bench["v1"] = 0b10110, 0b11, 100
    bench("v_mbcnt_lo_u32_b32 v2, s0, v1")
    assert bench["v2"].tolist()[:6] == [100, 100, 101, 102, 102, 103]
    if bench.wave.lanes == 64:
        bench("v_mbcnt_hi_u32_b32 v3, s1, v2")
        assert bench["v3"].tolist()[30:36] == [103, 103, 103, 104, 105, 105]


def test_between_lanes_and_scalars(bench: Bench) -> None:
    bench["v0"], bench["s3"] = lane_numbers(bench) + 50, 0x1234
    bench["{exec}"] = bench.wave.everyone - 0b111
    bench("v_readlane_b32 s0, v0, 2", "v_readfirstlane_b32 s1, v0")
    assert (bench["s0"], bench["s1"]) == (52, 53)
    bench("v_writelane_b32 v1, s3, 1", "v_readlane_b32 s2, v1, 1")
    assert bench["s2"] == 0x1234
    bench("v_readlane_b32 s2, v1, 3")  # keeps registers for functions that have values of their own
    with pytest.raises(Refused, match="s2 was never written"):
        bench["s2"]


DPP = [
    ("quad_perm:[1,0,3,2] row_mask:0xf bank_mask:0xf", lambda lane: lane ^ 1),
    ("row_mirror row_mask:0xf bank_mask:0xf", lambda lane: lane // 16 * 16 + 15 - lane % 16),
    ("row_half_mirror row_mask:0xf bank_mask:0xf", lambda lane: lane // 8 * 8 + 7 - lane % 8),
    ("row_ror:4 row_mask:0xf bank_mask:0xf", lambda lane: lane // 16 * 16 + (lane - 4) % 16),
    ("row_shr:1 row_mask:0xf bank_mask:0xf", lambda lane: np.where(lane % 16 == 0, -1, lane - 1)),
    ("row_shl:3 row_mask:0xf bank_mask:0xf", lambda lane: np.where(lane % 16 > 12, -1, lane + 3)),
]


@pytest.mark.parametrize("control, origin", DPP, ids=lambda value: value if isinstance(value, str) else "")
def test_dpp(bench: Bench, control: str, origin: object) -> None:
    lane = lane_numbers(bench)
    bench["v0"], bench["v2"] = lane + 100, 7
    bench(f"v_mov_b32_dpp v2, v0 {control}")
    came_from = origin(lane)  # type: ignore[operator]
    assert (bench["v2"] == np.where(came_from < 0, 7, came_from + 100)).all()
    bench["v3"] = 7
    bench(f"v_mov_b32_dpp v3, v0 {control} bound_ctrl:1")
    assert (bench["v3"] == np.where(came_from < 0, 0, came_from + 100)).all()


def test_dpp_writes_chosen_rows_and_banks_only(bench: Bench) -> None:
    lane = lane_numbers(bench)
    bench["v0"], bench["v1"], bench["v2"] = 1, 2, lane
    control = "row_mirror row_mask:0x1 bank_mask:0x2"
    bench(f"v_add_u32_dpp v2, v0, v1 {control} | v_add_nc_u32_dpp v2, v0, v1 {control}")
    assert (bench["v2"] == np.where((lane // 16 == 0) & (lane // 4 % 4 == 1), 3, lane)).all()


def test_dpp_from_lanes_that_are_switched_off(bench: Bench) -> None:
    bench["v0"], bench["v2"], bench["{exec}"] = 5, 9, 0b0111
    bench("v_mov_b32_dpp v2, v0 quad_perm:[3,0,1,2] row_mask:0xf bank_mask:0xf")
    assert bench["v2"].tolist()[:4] == [9, 5, 5, 9]  # lane 0 would take lane 3


def test_dpp_of_broadcasts(gfx9: Bench, gfx12: Bench) -> None:
    gfx9["v0"], gfx9["v2"] = lane_numbers(gfx9), 100
    gfx9("v_mov_b32_dpp v2, v0 row_bcast:15 row_mask:0xa bank_mask:0xf")
    assert gfx9["v2"].tolist()[::16] == [100, 15, 100, 47]
    gfx9("v_mov_b32_dpp v2, v0 row_newbcast:3 row_mask:0xf bank_mask:0xf")
    assert (gfx9["v2"] == lane_numbers(gfx9) // 16 * 16 + 3).all()
    gfx12["v0"] = lane_numbers(gfx12)
    gfx12("v_mov_b32_dpp v2, v0 row_xmask:8 row_mask:0xf bank_mask:0xf", "v_mov_b32_dpp v3, v0 dpp8:[7,6,5,4,3,2,1,0]")
    assert (gfx12["v2"] == lane_numbers(gfx12) ^ 8).all()
    assert (gfx12["v3"] == lane_numbers(gfx12) ^ 7).all()


def test_sdwa(gfx9: Bench) -> None:
    gfx9["v0"], gfx9["v1"], gfx9["v2"] = 0x81828384, 0x0000FFFF, 0x11111111
    gfx9("v_and_b32_sdwa v3, v0, v1 dst_sel:DWORD dst_unused:UNUSED_PAD src0_sel:WORD_1 src1_sel:DWORD")
    assert gfx9["v3"][0] == 0x8182
    gfx9("v_or_b32_sdwa v2, v0, v0 dst_sel:BYTE_1 dst_unused:UNUSED_PRESERVE src0_sel:BYTE_3 src1_sel:BYTE_0")
    assert gfx9["v2"][0] == 0x11118511
    gfx9("v_add_u32_sdwa v3, v1, sext(v0) dst_sel:DWORD dst_unused:UNUSED_PAD src0_sel:BYTE_3 src1_sel:BYTE_0")
    assert gfx9["v3"][0] == 0xFFFFFF84


def test_permutations_through_the_lds_hardware(bench: Bench) -> None:
    lane = lane_numbers(bench)
    bench["v0"], bench["v1"] = (lane ^ 3) * 4, lane + 100
    bench("ds_bpermute_b32 v2, v0, v1")
    with pytest.raises(Refused, match="v2 is being loaded"):
        bench("v_mov_b32_e32 v3, v2")
    assert (bench(WAIT)["v2"] == (lane ^ 3) + 100).all()
    bench["v0"] = (lane + 1) * 4
    assert (bench("ds_permute_b32 v2, v0, v1", WAIT)["v2"] == (lane - 1) % len(lane) + 100).all()


def test_swapping_rows_of_lanes() -> None:
    bench = Bench("gfx950")
    lane = lane_numbers(bench)
    bench["v0"], bench["v1"] = lane, lane + 100
    bench("v_permlane32_swap_b32 v0, v1")
    assert bench["v0"].tolist() == [*range(32), *range(100, 132)]
    assert bench["v1"].tolist() == [*range(32, 64), *range(132, 164)]


def test_permuting_inside_rows(gfx12: Bench) -> None:
    lane = lane_numbers(gfx12)
    gfx12["v0"], gfx12["s0"], gfx12["s1"] = lane, 0x01234567, 0x89ABCDEF
    gfx12("v_permlane16_b32 v1, v0, s0, s1", "v_permlanex16_b32 v2, v0, s0, s1")
    place = np.array([0x89ABCDEF01234567 >> 4 * i & 15 for i in range(16)])[lane % 16]
    assert (gfx12["v1"] == lane // 16 * 16 + place).all()
    assert (gfx12["v2"] == (lane // 16 ^ 1) * 16 + place).all()
