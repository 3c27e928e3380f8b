"""Memory instructions: what they move, when it arrives, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest

from tests.amd.sim.bench import LDS_BYTES, Bench
from tests.amd.sim.errors import Refused
from tests.amd.sim.operands import PRIVATE_APERTURE, SHARED_APERTURE

GIVEN, RESERVED = 0x1000_0000, 0x2000_0000
WAIT = "s_waitcnt vmcnt(0) | s_wait_loadcnt 0x0"
WAIT_STORE = "s_waitcnt vmcnt(0) | s_wait_storecnt 0x0"
WAIT_LDS = "s_waitcnt lgkmcnt(0) | s_wait_dscnt 0x0"
WAIT_SCALAR = "s_waitcnt lgkmcnt(0) | s_wait_kmcnt 0x0"


def lane_numbers(bench: Bench) -> np.ndarray:
    return np.arange(bench.wave.lanes, dtype=np.uint64)


def test_loads_of_all_sizes(bench: Bench) -> None:
    given = np.random.default_rng(1).integers(0, 256, 16 * bench.wave.lanes, dtype=np.uint8)
    bench.give(given)
    rows = given.reshape(-1, 16)
    bench["v[0:1]"] = GIVEN + 16 * lane_numbers(bench)
    bench("global_load_dwordx4 v[4:7], v[0:1], off | global_load_b128 v[4:7], v[0:1], off", WAIT)
    assert (bench["v[4:7]"] == rows.view(np.uint32)).all()
    bench("flat_load_dwordx3 v[4:6], v[0:1] | flat_load_b96 v[4:6], v[0:1]", WAIT)
    assert (bench["v[4:6]"] == rows.view(np.uint32)[:, :3]).all()
    bench("global_load_dwordx2 v[4:5], v[0:1], off offset:8 | global_load_b64 v[4:5], v[0:1], off offset:8", WAIT)
    assert (bench["v[4:5]"] == rows.view(np.uint64)[:, 1]).all()
    narrow = {
        "global_load_ubyte v4, v[0:1], off | global_load_u8 v4, v[0:1], off": rows[:, 0].astype(np.uint32),
        "global_load_sbyte v4, v[0:1], off | global_load_i8 v4, v[0:1], off": rows[:, 0]
        .view(np.int8)
        .astype(np.uint32),
        "global_load_ushort v4, v[0:1], off | global_load_u16 v4, v[0:1], off": rows.view(np.uint16)[:, 0].astype(
            np.uint32
        ),
        "global_load_sshort v4, v[0:1], off | global_load_i16 v4, v[0:1], off": rows.view(np.int16)[:, 0].astype(
            np.uint32
        ),
    }
    for text, expected in narrow.items():
        assert (bench(text, WAIT)["v4"] == expected).all(), text


def test_halves_of_registers(bench: Bench) -> None:
    bench.give(np.array([0xAABB, 0xCCDD], np.uint16))
    target = bench.reserve(4)
    bench["v[0:1]"], bench["v[2:3]"], bench["v4"], bench["{exec}"] = GIVEN, RESERVED, 0x11112222, 1
    bench("global_load_short_d16_hi v4, v[0:1], off | global_load_d16_hi_b16 v4, v[0:1], off", WAIT)
    assert bench["v4"][0] == 0xAABB2222
    bench("global_load_ubyte_d16 v4, v[0:1], off offset:2 | global_load_d16_u8 v4, v[0:1], off offset:2", WAIT)
    assert bench["v4"][0] == 0xAABB00DD
    bench("global_store_short_d16_hi v[2:3], v4, off | global_store_d16_hi_b16 v[2:3], v4, off")
    bench("global_store_byte v[2:3], v4, off offset:2 | global_store_b8 v[2:3], v4, off offset:2")
    bench("global_store_byte_d16_hi v[2:3], v4, off offset:3 | global_store_d16_hi_b8 v[2:3], v4, off offset:3")
    bench.settle()
    assert target.read(0, 4).tobytes().hex() == "bbaaddbb"


def test_addresses_from_a_scalar_base(bench: Bench) -> None:
    bench.give(np.arange(256, dtype=np.uint32))
    bench["s[0:1]"], bench["v0"] = GIVEN, 4 * lane_numbers(bench)
    bench("global_load_dword v4, v0, s[0:1] offset:16 | global_load_b32 v4, v0, s[0:1] offset:16", WAIT)
    assert (bench["v4"] == lane_numbers(bench) + 4).all()


def test_offsets_of_gfx12_are_signed_and_may_be_scaled(gfx12: Bench) -> None:
    gfx12.give(np.arange(256, dtype=np.uint64))
    gfx12["s[0:1]"], gfx12["v0"] = GIVEN + 8 * 64, lane_numbers(gfx12) - np.uint64(16)
    gfx12("global_load_b64 v[4:5], v0, s[0:1] scale_offset", WAIT)
    assert (gfx12["v[4:5]"] == lane_numbers(gfx12) + 48).all()


def test_stores_reach_memory_at_the_latest_with_the_wait(bench: Bench) -> None:
    target = bench.reserve(16 * bench.wave.lanes)
    bench["v[0:1]"], bench["v[4:5]"] = RESERVED + 16 * lane_numbers(bench), lane_numbers(bench) + np.uint64(7 << 32)
    bench("flat_store_dwordx2 v[0:1], v[4:5] sc0 sc1 | flat_store_b64 v[0:1], v[4:5] scope:SCOPE_SYS")
    assert not target.defined.any()
    bench(WAIT_STORE)
    written = np.add.outer(16 * lane_numbers(bench), np.arange(8)).astype(int).reshape(-1)
    assert target.defined.sum() == len(written)
    assert (target.bytes[written].view(np.uint64) == bench["v[4:5]"]).all()


def test_loads_arrive_with_the_wait_and_not_before(bench: Bench) -> None:
    bench.give(np.arange(1, 9, dtype=np.uint32))
    bench["v[0:1]"], bench["{exec}"] = GIVEN, 1
    load = "global_load_dword v{}, v[0:1], off offset:{} | global_load_b32 v{}, v[0:1], off offset:{}"
    bench(load.format(4, 0, 4, 0), load.format(5, 4, 5, 4))
    for refused in ("v_mov_b32_e32 v6, v4", "v_mov_b32_e32 v4, 0", "v_readfirstlane_b32 s0, v4"):
        with pytest.raises(Refused, match="v4 is (being loaded: a wait is missing|written while a load)"):
            bench(refused)
    bench("s_waitcnt vmcnt(1) | s_wait_loadcnt 0x1")
    assert bench("v_readfirstlane_b32 s0, v4")["s0"] == 1
    with pytest.raises(Refused, match="lane 0 of v5 is being loaded"):
        bench("v_readfirstlane_b32 s0, v5")
    assert bench(WAIT, "v_readfirstlane_b32 s0, v5")["s0"] == 2


def test_one_wait_for_two_counters(gfx12: Bench) -> None:
    gfx12.give(np.arange(1, 9, dtype=np.uint32))
    gfx12["v[0:1]"], gfx12["v2"] = GIVEN, 0
    gfx12(
        "ds_store_b32 v2, v2",
        "ds_load_b32 v4, v2",
        "global_load_b32 v5, v[0:1], off",
        "global_load_b32 v6, v[0:1], off",
    )
    gfx12("s_wait_loadcnt_dscnt 0x100")  # one load may be outstanding
    assert (gfx12["v4"] == 0).all() and (gfx12["v5"] == 1).all()
    with pytest.raises(Refused, match="v6 is being loaded"):
        gfx12["v6"]


def test_scalar_loads(bench: Bench) -> None:
    bench.give(np.arange(100, 120, dtype=np.uint32))
    bench["s[0:1]"], bench["s2"] = GIVEN, 8
    bench("s_load_dwordx4 s[4:7], s[0:1], 0x10 | s_load_b128 s[4:7], s[0:1], 0x10")
    bench("s_load_dword s8, s[0:1], s2 | s_load_b32 s8, s[0:1], s2 offset:0x0")
    with pytest.raises(Refused, match="s5 is being loaded: a wait is missing"):
        bench("s_mov_b32 s9, s5")
    with pytest.raises(Refused, match="s5 is written while a load into it is under way"):
        bench("s_mov_b32 s5, 0")
    bench(WAIT_SCALAR)
    assert [bench[f"s{i}"] for i in range(4, 9)] == [104, 105, 106, 107, 102]


def test_scalar_loads_return_in_any_order(bench: Bench) -> None:
    bench.give(np.arange(100, 120, dtype=np.uint32))
    bench["s[0:1]"] = GIVEN
    bench("s_load_dword s4, s[0:1], 0x0 | s_load_b32 s4, s[0:1], 0x0")
    bench("s_load_dword s5, s[0:1], 0x4 | s_load_b32 s5, s[0:1], 0x4", "s_waitcnt lgkmcnt(1) | s_wait_kmcnt 0x1")
    with pytest.raises(Refused, match="s4 is being loaded"):
        bench("s_mov_b32 s9, s4")


def test_padding_that_is_loaded_along_is_undefined(bench: Bench) -> None:
    bench.reserve(8).write(0, np.array([5], np.uint32))
    bench["s[0:1]"] = RESERVED
    bench("s_load_dwordx2 s[4:5], s[0:1], 0x0 | s_load_b64 s[4:5], s[0:1], 0x0", WAIT_SCALAR)
    assert bench["s4"] == 5
    with pytest.raises(Refused, match="s5 was never written"):
        bench["s5"]


@pytest.mark.parametrize(
    "address, problem", [(GIVEN + 61, "out of bounds"), (GIVEN - 4, "out of bounds"), (0, "no memory")]
)
def test_accesses_out_of_bounds_are_refused(bench: Bench, address: int, problem: str) -> None:
    bench.give(np.zeros(64, np.uint8))
    bench["v[0:1]"] = address
    with pytest.raises(Refused, match=problem):
        bench("flat_load_dword v4, v[0:1] | flat_load_b32 v4, v[0:1]", WAIT)
    with pytest.raises(Refused, match=problem):
        bench("flat_store_dword v[0:1], v0 | flat_store_b32 v[0:1], v0", WAIT_STORE)


def test_reading_what_nobody_wrote_is_refused(bench: Bench) -> None:
    bench.reserve(64).write(0, np.zeros(6, np.uint8))
    bench["v[0:1]"], bench["v2"] = RESERVED, 12
    with pytest.raises(Refused, match="byte 6 of reserved is read, but was never written.*bench, wave 0, here"):
        bench("flat_load_dwordx2 v[4:5], v[0:1] | flat_load_b64 v[4:5], v[0:1]", WAIT)
    with pytest.raises(Refused, match="byte 12 of the LDS"):
        bench("ds_read_b32 v4, v2 | ds_load_b32 v4, v2", WAIT_LDS)
    with pytest.raises(Refused, match="lane 0 of v9 was never written"):
        bench("flat_store_dword v[0:1], v9 | flat_store_b32 v[0:1], v9")
    with pytest.raises(Refused, match="lane 0 of v9 was never written"):
        bench("flat_load_dword v4, v[8:9] | flat_load_b32 v4, v[8:9]")


def test_lds(bench: Bench) -> None:
    lane = lane_numbers(bench)
    bench["v0"], bench["v[4:5]"], bench["v6"] = 8 * lane, lane + np.uint64(3 << 40), 77
    bench(
        "ds_write_b64 v0, v[4:5] | ds_store_b64 v0, v[4:5]", "ds_read_b64 v[8:9], v0 | ds_load_b64 v[8:9], v0", WAIT_LDS
    )
    assert (bench["v[8:9]"] == bench["v[4:5]"]).all()
    bench("ds_read_u16 v8, v0 | ds_load_u16 v8, v0", WAIT_LDS)
    assert (bench["v8"] == lane).all()
    bench["{exec}"] = 1
    bench("ds_write2_b32 v0, v6, v4 offset0:2 offset1:5 | ds_store_2addr_b32 v0, v6, v4 offset0:2 offset1:5")
    bench("ds_read2_b32 v[8:9], v0 offset0:2 offset1:5 | ds_load_2addr_b32 v[8:9], v0 offset0:2 offset1:5", WAIT_LDS)
    assert bench.wave.vgpr[0, 8:10].tolist() == [77, 0]
    bench["v0"] = LDS_BYTES - 4
    with pytest.raises(Refused, match=f"8 bytes at {LDS_BYTES - 4} of LDS are out of bounds"):
        bench("ds_read_b64 v[8:9], v0 | ds_load_b64 v[8:9], v0", WAIT_LDS)


def test_flat_addresses_reach_lds_and_scratch(bench: Bench) -> None:
    lane = lane_numbers(bench)
    bench.give(np.arange(64, dtype=np.uint32))
    bench["v[0:1]"] = np.where(
        lane == 0, SHARED_APERTURE + 16, np.where(lane == 1, PRIVATE_APERTURE + 8, GIVEN + 4 * lane)
    )
    bench["v2"] = lane + np.uint64(500)
    bench("flat_store_dword v[0:1], v2 | flat_store_b32 v[0:1], v2")
    bench("flat_load_dword v4, v[0:1] | flat_load_b32 v4, v[0:1]")
    with pytest.raises(Refused, match="v4 is being loaded"):
        bench(WAIT)["v4"]  # some lanes reach LDS, which is waited for by another counter
    assert (bench(WAIT_LDS)["v4"] == lane + 500).all()
    bench.settle()
    assert bench.block.lds.read(16, 4).view(np.uint32)[0] == 500
    assert bench.wave.scratch[1, 8:12].view(np.uint32)[0] == 501


def test_apertures_are_where_the_registers_say(bench: Bench) -> None:
    bench("s_mov_b64 s[0:1], src_shared_base", "s_mov_b64 s[2:3], src_private_base")
    assert (bench["s[0:1]"], bench["s[2:3]"]) == (SHARED_APERTURE, PRIVATE_APERTURE)


def test_scratch_keeps_registers_with_their_undefined_lanes(bench: Bench) -> None:
    bench["{exec}"] = 0b1
    bench("v_mov_b32_e32 v4, 9")
    bench["{exec}"], bench["s33"] = bench.wave.everyone, 16
    bench("scratch_store_dword off, v4, s33 offset:4 | scratch_store_b32 off, v4, s33 offset:4")
    bench("scratch_load_dword v5, off, s33 offset:4 | scratch_load_b32 v5, off, s33 offset:4", WAIT)
    assert bench("v_readfirstlane_b32 s0, v5")["s0"] == 9
    with pytest.raises(Refused, match="lane 1 of v5 was never written"):
        bench["v5"]
    bench["v6"] = 62
    with pytest.raises(Refused, match="4 bytes at 62 of scratch are out of bounds, a lane has 64"):
        bench("scratch_load_dword v5, v6, off | scratch_load_b32 v5, v6, off", WAIT)


ATOMICS = [
    (
        "flat_atomic_add v4, v[0:1], v2 sc0 | flat_atomic_add_u32 v4, v[0:1], v2 th:TH_ATOMIC_RETURN",
        lambda old, v: old + v,
    ),
    (
        "flat_atomic_sub v4, v[0:1], v2 sc0 | flat_atomic_sub_u32 v4, v[0:1], v2 th:TH_ATOMIC_RETURN",
        lambda old, v: old - v,
    ),
    ("flat_atomic_swap v4, v[0:1], v2 sc0 | flat_atomic_swap_b32 v4, v[0:1], v2 th:TH_ATOMIC_RETURN", lambda old, v: v),
    ("flat_atomic_umax v4, v[0:1], v2 sc0 | flat_atomic_max_u32 v4, v[0:1], v2 th:TH_ATOMIC_RETURN", max),
    (
        "flat_atomic_or v4, v[0:1], v2 sc0 | flat_atomic_or_b32 v4, v[0:1], v2 th:TH_ATOMIC_RETURN",
        lambda old, v: old | v,
    ),
]


@pytest.mark.parametrize("text, update", ATOMICS, ids=lambda value: value if isinstance(value, str) else "")
def test_atomics_return_what_they_found(bench: Bench, text: str, update: object) -> None:
    word = bench.give(np.array([1000], np.uint32))
    values = (7 * lane_numbers(bench) + 3).tolist()
    bench["v[0:1]"], bench["v2"] = GIVEN, values
    bench(text, WAIT)
    bench.settle()
    expected, now = [], 1000
    for value in values:
        expected.append(now)
        now = update(now, value) % (1 << 32)  # type: ignore[operator]
    assert bench["v4"].tolist() == expected
    assert word.read(0, 4).view(np.uint32)[0] == now


def test_atomics_of_eight_bytes(bench: Bench) -> None:
    word = bench.give(np.array([0], np.uint64))
    bench["v[0:1]"], bench["v[2:3]"], bench["v[4:5]"] = GIVEN, lane_numbers(bench) + np.uint64(1), 0
    operands = "v[6:7], v[0:1], v[2:5], off"
    bench(f"global_atomic_cmpswap_x2 {operands} sc0 | global_atomic_cmpswap_b64 {operands} th:TH_ATOMIC_RETURN")
    bench(WAIT)
    assert bench["v[6:7]"].tolist() == [0] + [1] * (bench.wave.lanes - 1)  # the first lane found 0, the others its 1
    bench("global_atomic_add_x2 v[0:1], v[2:3], off | global_atomic_add_u64 v[0:1], v[2:3], off")
    bench.settle()
    assert word.read(0, 8).view(np.uint64)[0] == 1 + sum(range(1, bench.wave.lanes + 1))


def test_atomics_on_lds(bench: Bench) -> None:
    bench["v0"], bench["v1"], bench["v2"] = 4, 0, 1
    bench("ds_write_b32 v0, v1 | ds_store_b32 v0, v1", "ds_add_rtn_u32 v4, v0, v2", WAIT_LDS)
    assert (bench["v4"] == lane_numbers(bench)).all()
    bench("ds_add_u32 v0, v2", "ds_max_rtn_u32 v4, v0, v1", WAIT_LDS)
    assert (bench["v4"] == 2 * bench.wave.lanes).all()
    bench["v0"] = 2
    with pytest.raises(Refused, match="not aligned"):
        bench("ds_add_u32 v0, v2", WAIT_LDS)
