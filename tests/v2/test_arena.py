"""Symmetric regions of an op: how they are packed, named and given back."""

from __future__ import annotations

import pytest
import torch

from mori.cco import Communicator, get_unique_id
from mori.errors import ConfigMismatch, HeapExhausted
from mori.ops.dispatch_combine_v2 import EpDispatchCombineConfig
from mori.ops.dispatch_combine_v2.hip_backend import REGION_NAMES, EpDispatchCombineOpHip, shape_of
from mori.ops.dispatch_combine_v2.symm_arena import SymmArena, align_up
from mori.ops.engine import layout
from tests.cco.members import each, joined


@pytest.fixture
def comm():
    with Communicator.init(1, 0, get_unique_id(), per_rank_vmm=16 << 20) as alone:
        yield alone


def test_align_up():
    assert [align_up(value, 256) for value in (0, 1, 255, 256, 257)] == [0, 256, 256, 256, 512]


def test_regions_are_packed_in_order(comm):
    arena = SymmArena(comm, [("a", 4), ("b", 300), ("c", 256)])
    assert [arena.offset(name) for name in "abc"] == [0, 256, 768]
    assert [arena.size(name) for name in "abc"] == [4, 300, 256]
    assert (arena.total_bytes, arena.regions) == (1024, ("a", "b", "c"))
    assert arena.local_ptr("b") - arena.local_ptr("a") == 256
    assert arena.has("a") and not arena.has("d")
    for ask in (arena.offset, arena.size, arena.local_ptr, arena.zero):
        with pytest.raises(KeyError, match="d"):
            ask("d")


def test_the_last_of_two_equal_names_counts(comm):
    arena = SymmArena(comm, [("a", 100), ("a", 300)])
    assert (arena.offset("a"), arena.size("a"), arena.total_bytes) == (256, 300, 768)


def test_an_arena_without_regions_has_a_window_all_the_same(comm):
    assert SymmArena(comm, []).total_bytes == 256


def test_it_accounts_for_two_resources_until_it_is_closed(comm):
    before = list(comm._resources)
    arena = SymmArena(comm, [("a", 64)])
    assert len(comm._resources) == len(before) + 2
    assert arena.handle != 0
    arena.close()
    arena.close()
    assert comm._resources == before
    with pytest.raises(RuntimeError, match="closed"):
        arena.local_ptr("a")


def test_views_are_memory_of_their_region_and_survive_it(comm):
    arena = SymmArena(comm, [("a", 64), ("b", 64)])
    a, b = arena.view("a", (4, 4), torch.float32), arena.view("b", (32,), torch.bfloat16)
    a.fill_(3)
    b.fill_(5)
    assert a.data_ptr() == arena.local_ptr("a") and bool((a == 3).all())
    arena.zero("a")
    assert not a.any() and bool((b == 5).all())
    arena.zero()
    assert not b.any()
    with pytest.raises(ValueError, match="needs 68 bytes, region a has 64"):
        arena.view("a", (17,), torch.float32)
    assert arena.view("a", (0, 7), torch.float32).shape == (0, 7)
    arena.close()
    comm.destroy()
    assert not b.any()


def test_too_little_memory_leaves_nothing_behind(comm):
    with pytest.raises(HeapExhausted, match="per_rank_vmm"):
        SymmArena(comm, [("a", 32 << 20)])
    assert comm._resources == []


@pytest.mark.parametrize("scale_dim", [0, 7])
def test_the_engine_finds_its_regions_where_the_arena_puts_them(comm, scale_dim: int):
    config = EpDispatchCombineConfig(0, 1, 64, 5, 2, 3, scale_dim=scale_dim, scale_type_size=4)
    expected = layout(shape_of(config))
    op = EpDispatchCombineOpHip(config, comm)
    named = {REGION_NAMES.get(region.name, region.name): region for region in expected.regions if region.bytes}
    assert list(named) == list(op.arena.regions)
    assert all(
        (op.arena.offset(name), op.arena.size(name)) == (region.offset, region.bytes) for name, region in named.items()
    )
    assert op.arena.total_bytes == expected.total_bytes
    assert op.arena.has("out_scales") == bool(scale_dim)
    assert {"disp_out", "out_tok", "out_wts", "out_idx", "recv_to_src_token"} <= set(op.arena.regions)


def test_arenas_of_different_sizes_are_an_error_of_all_ranks():
    with joined(2) as members:
        found = each(members, lambda comm: SymmArena(comm, [("a", 256 * (1 + comm.rank))]))
        for error, comm in zip(found, members, strict=True):
            assert isinstance(error, ConfigMismatch)
            assert "bytes of symmetric memory: 256 on rank 0; 512 on rank 1" in str(error)
            assert comm._resources == []
