"""The shmem API: memory of the symmetric heap, addresses of peers, and tensors over it."""

from __future__ import annotations

import ctypes

import pytest
import torch

from tests.rank_worker import RankContext
from tests.ranks import pool
from tests.v1.exercise import raises, require


def read(address: int, count: int) -> bytes:
    return ctypes.string_at(address, count)


def memory_and_peers(context: RankContext) -> None:
    import mori.shmem as shmem

    rank, world = context.rank, context.world_size
    sizes = [1, 255, 256, 257, 4096, 100_000]
    addresses = [shmem.shmem_malloc(size) for size in sizes]
    require(all(address and address % 256 == 0 for address in addresses), "malloc aligns to 256 bytes")
    spans = sorted(zip(addresses, sizes, strict=True))
    for (low, size), (high, _) in zip(spans, spans[1:], strict=False):
        require(low + size <= high, "allocations overlap")
    for address, size in zip(addresses, sizes, strict=True):
        ctypes.memset(address, rank + 1, size)
    shmem.shmem_barrier_all()
    for address, size in zip(addresses, sizes, strict=True):
        for peer in range(world):
            there = shmem.shmem_ptr_p2p(address, rank, peer)
            require((there == address) == (peer == rank), "only the own address is the address itself")
            require(read(there, size) == bytes([peer + 1]) * size, f"rank {peer}'s memory is not visible")
        inner = shmem.shmem_ptr_p2p(address + size - 1, rank, (rank + 1) % world)
        require(read(inner, 1) == bytes([(rank + 1) % world + 1]), "an address inside an allocation")
    shmem.shmem_barrier_all()
    right = shmem.shmem_ptr_p2p(addresses[4], rank, (rank + 1) % world)
    ctypes.memset(right, 100 + rank, 4096)
    shmem.shmem_barrier_all()
    require(
        read(addresses[4], 4096) == bytes([100 + (rank - 1) % world]) * 4096, "the left neighbour's store is missing"
    )

    require(shmem.shmem_ptr_p2p(addresses[0], rank, world) == 0, "no such rank")
    require(shmem.shmem_ptr_p2p(addresses[0], rank, -1) == 0, "no such rank")
    outside = ctypes.create_string_buffer(8)
    require(shmem.shmem_ptr_p2p(ctypes.addressof(outside), rank, (rank + 1) % world) == 0, "not in the heap")

    require(shmem.shmem_malloc(0) == 0, "size 0")
    require(shmem.shmem_malloc_align(3, 64) == 0, "an alignment that is no power of two")
    require(shmem.shmem_malloc_align(0, 64) == 0, "alignment 0")
    for alignment in (1, 64, 512, 4096):
        require(shmem.shmem_malloc_align(alignment, 100) % max(alignment, 256) == 0, f"alignment {alignment}")
    require(shmem.shmem_ext_malloc_with_flags(64, 7) % 256 == 0, "malloc with flags")
    shmem.shmem_free(0)
    own = torch.zeros(16)
    require(shmem.shmem_buffer_register(own.data_ptr(), 64) == 0, "register")
    require(shmem.shmem_buffer_deregister(own.data_ptr(), 64) == 0, "deregister")
    for address in addresses:
        shmem.shmem_free(address)
    raises(ValueError, shmem.shmem_free, addresses[0])
    raises(ValueError, shmem.shmem_malloc, -5)


@pytest.mark.parametrize("world_size", [2, 3])
def test_memory_and_addresses_of_peers(world_size: int):
    ranks = pool(world_size)
    ranks.run(memory_and_peers)
    ranks.renew()


def freed_memory_returns(context: RankContext) -> None:
    """Ten times more than the heap holds, in pieces; the order of freeing differs between ranks."""
    import mori.shmem as shmem

    for _ in range(10):
        held = [shmem.shmem_malloc(3 << 20) for _ in range(5)]
        for address in held if context.rank else reversed(held):
            shmem.shmem_free(address)


def exhausted_heap(context: RankContext) -> str:
    import mori
    import mori.shmem as shmem

    freed_memory_returns(context)
    kept = shmem.shmem_malloc(10 << 20)
    try:
        shmem.shmem_malloc(7 << 20)
    except mori.HeapExhausted as error:
        text = str(error)
    else:
        raise AssertionError("17 MB were allocated from 16 MB")
    shmem.shmem_free(kept)
    require(shmem.shmem_malloc(12 << 20) != 0, "the heap is usable after an allocation that did not fit")
    return text


@pytest.mark.parametrize("world_size", [1, 2])
def test_heap_exhaustion_states_the_numbers_and_the_variable(world_size: int):
    for text in pool(world_size, MORI_SHMEM_HEAP_SIZE="16M").run(exhausted_heap):
        plain = text.replace(",", "")
        assert "MORI_SHMEM_HEAP_SIZE" in text and str(7 << 20) in plain and str(16 << 20) in plain


def different_sizes(context: RankContext) -> str:
    import mori
    import mori.shmem as shmem

    try:
        shmem.shmem_malloc(1000 + context.rank)
    except mori.ConfigMismatch as error:
        text = str(error)
    else:
        raise AssertionError("ranks allocated different sizes")
    require(shmem.shmem_malloc(1000) != 0, "malloc after a disagreement")
    return text


@pytest.mark.parametrize("world_size", [2])
def test_different_sizes_raise_on_all_ranks(world_size: int):
    for text in pool(world_size).run(different_sizes):
        assert "1000" in text and "1001" in text


def tensors(context: RankContext) -> None:
    import mori.shmem as shmem

    rank, world = context.rank, context.world_size
    tensor = shmem.mori_shmem_create_tensor((3, 5), torch.float32)
    require(tensor.shape == (3, 5) and tensor.dtype == torch.float32, "shape and dtype")
    require(getattr(tensor, "__symm_tensor__", None), "the mark of a symmetric tensor")
    tensor.fill_(rank + 0.5)
    shmem.shmem_barrier_all()
    for peer in range(world):
        there = shmem.symm_mori_shmem_tensor(tensor, peer)
        require(bool((there == peer + 0.5).all()), f"rank {peer}'s tensor is not visible")
    listed = shmem.mori_shmem_create_tensor_list_intra_node((7,), torch.bfloat16, world)
    require(len(listed) == world, "one tensor per rank")
    listed[rank].fill_(rank)
    shmem.shmem_barrier_all()
    require([float(each.float().mean()) for each in listed] == list(range(world)), "the list shows every rank's tensor")
    empty = shmem.mori_shmem_create_tensor((0, 4), torch.float32)
    require(empty.numel() == 0, "a tensor without elements")
    shmem.shmem_barrier_all()
    shmem.mori_shmem_free_tensor(tensor)
    tensor.fill_(1.0)  # the memory stays valid as long as the tensor lives
    raises(ValueError, shmem.mori_shmem_free_tensor, torch.zeros(3))
    shmem.shmem_finalize()
    require(float(tensor.sum()) == 15.0, "a tensor changed when shmem was finalised")
    context.barrier()
    shmem.shmem_torch_process_group_init("default")


@pytest.mark.parametrize("world_size", [1, 3])
def test_symmetric_tensors(world_size: int):
    pool(world_size).run(tensors)
