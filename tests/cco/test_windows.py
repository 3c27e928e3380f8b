"""Windows over symmetric memory and over memory of others. Ranks are threads."""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
from typing import Any

import pytest
import torch

from mori import _core, jit
from mori.cco import Communicator, ImportedWindow, communicator_of_window, device
from mori.cco.cco import mem_import, window_register_ptr
from mori.errors import ConfigMismatch
from tests.cco.members import BarrierRank, Question, all_well, each, joined, look_up

PAGE = mmap.PAGESIZE


def descriptor(handle: int) -> tuple[int, int, int, int, int]:
    """(base, stride, size, rank, ranks) as a kernel reads it."""
    words = (ctypes.c_uint64 * 3).from_address(handle)
    return *words, *(ctypes.c_uint32 * 2).from_address(handle + 24)  # type: ignore[return-value]


def bytes_of(handle: int, peer: int, count: int) -> bytes:
    """What a kernel that follows the descriptor finds."""
    base, stride, *_ = descriptor(handle)
    return ctypes.string_at(base + peer * stride, count)


def test_a_window_leads_to_every_rank() -> None:
    with joined(3) as members:

        def check(comm: Communicator) -> None:
            memories = [comm.alloc_mem(size) for size in (PAGE, 3 * PAGE)]
            windows = [comm.register_window(memory.ptr, memory.size) for memory in memories]
            for number, window in enumerate(windows):
                ctypes.memset(window.local_ptr, 16 * number + comm.rank, window.size)
            comm.barrier()
            for number, window in enumerate(windows):
                assert descriptor(window.handle)[2:] == (window.size, comm.rank, 3)
                for peer in range(3):
                    assert bytes_of(window.handle, peer, window.size) == bytes([16 * number + peer]) * window.size
            comm.barrier()

        all_well(each(members, check))


def test_kernels_find_windows_by_address() -> None:
    with joined(2) as members:

        def check(comm: Communicator) -> None:
            dev_comm = comm.create_dev_comm()
            memories = [comm.alloc_mem(PAGE) for _ in range(3)]
            windows = [comm.register_window(memory.ptr, 1000) for memory in memories]
            windows[1].close()
            for memory, window in ((memories[0], windows[0]), (memories[2], windows[2])):
                for offset in (0, 999):
                    found, peer_0, *_ = look_up(comm, dev_comm, memory.ptr + offset)
                    assert found == window.handle
                    assert peer_0 == memory.ptr - comm.rank * dev_comm.per_rank_size + 8
            assert look_up(comm, dev_comm, memories[0].ptr + 1000)[0] == 0
            assert look_up(comm, dev_comm, memories[1].ptr)[0] == 0  # closed
            again = comm.register_window(memories[1].ptr, PAGE)  # takes the free place
            assert look_up(comm, dev_comm, memories[1].ptr + 1000)[0] == again.handle

        all_well(each(members, check))


def test_arguments_are_refused_before_anything_happens() -> None:
    with joined(1) as (comm,):
        memory = comm.alloc_mem(PAGE)
        empty = comm.alloc_mem(0)
        for ptr, size, what in (
            (memory.ptr + 64, 64, "is not the base address"),
            (0, 64, "0x0 is not the base address"),
            (memory.ptr, PAGE + 1, f"size {PAGE + 1} is not within the {PAGE} bytes"),
            (memory.ptr, 0, "size 0 is not within"),
        ):
            with pytest.raises(RuntimeError, match=what):
                comm.register_window(ptr, size)
        assert comm._resources == [memory, empty]


def test_ranks_that_register_differently_all_raise() -> None:
    with joined(2) as members:

        def other_size(comm: Communicator) -> Any:
            memory = comm.alloc_mem(PAGE)
            try:
                comm.register_window(memory.ptr, 100 + comm.rank)
            finally:
                memory.close()

        for error in each(members, other_size):
            assert isinstance(error, ConfigMismatch)
            assert "window size: 100 on rank 0; 101 on rank 1" in str(error)

        def other_order(comm: Communicator) -> Any:
            memories = [comm.alloc_mem(PAGE) for _ in range(2)]
            comm.register_window(memories[comm.rank].ptr, PAGE)

        for error in each(members, other_order):
            assert isinstance(error, ConfigMismatch)
            assert "window offset" in str(error)
        # All ranks raised, so all can go on.
        handles = all_well(each(members, lambda comm: comm.register_window(comm.alloc_mem(PAGE).ptr, PAGE).handle))
        assert all(handles)


def test_there_is_room_for_so_many_windows() -> None:
    with joined(1) as (comm,):
        memory = comm.alloc_mem(PAGE)
        windows = [comm.register_window(memory.ptr, PAGE) for _ in range(_core.CCO_MAX_WINDOWS)]
        with pytest.raises(RuntimeError, match="all 1024 windows of this communicator are open"):
            comm.register_window(memory.ptr, PAGE)
        handle = windows[500].handle
        windows[500].close()
        assert comm.register_window(memory.ptr, PAGE).handle == handle


def test_a_handle_leads_to_its_communicator() -> None:
    with joined(1) as (comm,):
        window = comm.register_window(comm.alloc_mem(PAGE).ptr, PAGE)
        handle = window.handle
        assert communicator_of_window(handle) is comm
        window.close()
        assert communicator_of_window(handle) is None and communicator_of_window(0) is None


def test_a_forked_child_takes_nothing_away() -> None:
    with joined(1) as (comm,):
        window = comm.register_window(comm.alloc_mem(PAGE).ptr, PAGE)
        before = descriptor(window.handle)
        child = os.fork()
        if child == 0:
            window.close()
            comm.destroy()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert descriptor(window.handle) == before and window.is_valid
        comm.barrier()


def test_imported_memory_is_mapped_once_by_all_or_by_none() -> None:
    with joined(2) as members:

        def check(comm: Communicator) -> None:
            memory = comm.alloc_mem(PAGE)
            alias = mem_import(comm, memory.ptr, PAGE)
            handles = [window_register_ptr(comm, alias, PAGE) for _ in range(2)]
            assert descriptor(handles[0]) == descriptor(handles[1])
            ctypes.memset(memory.ptr, 5 + comm.rank, PAGE)
            comm.barrier()
            assert bytes_of(handles[1], 1 - comm.rank, PAGE) == bytes([6 - comm.rank]) * PAGE
            comm.barrier()
            other = mem_import(comm, memory.ptr, PAGE)
            with pytest.raises(
                RuntimeError, match="imported memory: 'mapped, an allocation of .* bytes' on rank 0; 'new"
            ):
                window_register_ptr(comm, (alias, other)[comm.rank], PAGE)

        all_well(each(members, check))


def test_memory_under_an_open_window_is_not_used_again() -> None:
    with joined(1) as (comm,):
        memory = comm.alloc_mem(PAGE)
        address = memory.ptr
        window = comm.register_window(address, PAGE)
        memory.close()
        other = comm.alloc_mem(PAGE)
        comm.register_window(other.ptr, PAGE).close()
        other.close()
        assert comm.alloc_mem(PAGE).ptr != address
        window.close()
        comm.register_window(comm.alloc_mem(PAGE).ptr, PAGE).close()
        assert comm.alloc_mem(PAGE).ptr == address


class Memfd:
    """Shared memory of the test's own."""

    def __init__(self, size: int) -> None:
        self.descriptor = os.memfd_create("test")
        os.ftruncate(self.descriptor, size)
        self.mapping = mmap.mmap(self.descriptor, size)
        self.ptr = ctypes.addressof(ctypes.c_char.from_buffer(self.mapping))

    def close(self) -> None:
        gc.collect()  # of the object whose address was taken
        self.mapping.close()
        os.close(self.descriptor)


def test_shared_memory_of_others_becomes_a_window() -> None:
    """At another place of the file on every rank; a kernel of each stores into all of them."""
    with joined(2) as members:

        def check(comm: Communicator) -> None:
            mine = Memfd(4 * PAGE)
            address = mine.ptr + comm.rank * PAGE
            window = comm.register_external_window(address, 2 * PAGE)
            assert isinstance(window, ImportedWindow)
            assert (window.ext_ptr, window.size) == (address, 2 * PAGE) and window.local_ptr != address
            assert communicator_of_window(window.handle) is comm
            assert comm._resources == [window]
            ctypes.memset(address, 65 + comm.rank, 2 * PAGE)
            comm.barrier()
            for peer in range(2):
                assert bytes_of(window.handle, peer, 2 * PAGE) == bytes([65 + peer]) * 2 * PAGE
            comm.barrier()
            base, stride, *_ = descriptor(window.handle)
            ctypes.memset(base + (1 - comm.rank) * stride + PAGE, 97 + comm.rank, PAGE)
            comm.barrier()
            assert ctypes.string_at(address, 2 * PAGE) == bytes([65 + comm.rank] * PAGE + [98 - comm.rank] * PAGE)
            assert look_up(comm, comm.create_dev_comm(), window.local_ptr + PAGE)[0] == window.handle
            window.close()
            assert ctypes.string_at(address, 1) == bytes([65 + comm.rank])  # the owner's mapping is untouched
            mine.close()

        all_well(each(members, check))


def test_memory_of_another_communicator_becomes_a_window() -> None:
    with joined(2) as owners, joined(2) as members:

        def check(pair: tuple[Communicator, Communicator]) -> None:
            owner, comm = pair
            memory = owner.alloc_mem(2 * PAGE)
            window = comm.register_external_window(memory.ptr + PAGE, PAGE)
            memory.view(PAGE, (PAGE,), torch.uint8).fill_(7 + comm.rank)
            comm.barrier()
            assert bytes_of(window.handle, 1 - comm.rank, PAGE) == bytes([8 - comm.rank]) * PAGE
            comm.barrier()

        all_well(each(list(zip(owners, members, strict=True)), check))


def test_a_shared_tensor_becomes_a_window() -> None:
    with joined(1) as (comm,):
        tensor = torch.zeros(PAGE, dtype=torch.int32)
        with pytest.raises(RuntimeError, match="belongs to this process alone.*share_memory_"):
            comm.register_external_window(tensor.data_ptr() // PAGE * PAGE, PAGE)
        tensor.share_memory_()
        window = comm.register_external_window(tensor.data_ptr(), 4 * PAGE)
        tensor.fill_(0x01010101)
        assert bytes_of(window.handle, 0, 4 * PAGE) == b"\1" * 4 * PAGE


def test_memory_that_cannot_be_shared_is_refused_with_the_remedy() -> None:
    with joined(1) as (comm,):
        mine = Memfd(2 * PAGE)
        private = mmap.mmap(-1, PAGE, flags=mmap.MAP_PRIVATE)
        at = ctypes.addressof(ctypes.c_char.from_buffer(private))
        for address, size, what in (
            (mine.ptr + 8, 8, f"is not a multiple of the page size, {PAGE}"),
            (mine.ptr, 2 * PAGE + 1, f"has {2 * PAGE} bytes from {mine.ptr:#x} on, {2 * PAGE + 1} were asked for"),
            (at, PAGE, "belongs to this process alone"),
            (PAGE, PAGE, "there is no memory at"),
        ):
            with pytest.raises(RuntimeError, match=what) as caught:
                comm.register_external_window(address, size)
            assert "Communicator.alloc_mem" in str(caught.value)
        with pytest.raises(RuntimeError, match="size must be positive, got 0"):
            comm.register_external_window(mine.ptr, 0)
        shared = mmap.mmap(-1, PAGE)  # with children, by no descriptor
        with pytest.raises(RuntimeError, match="no descriptor of the memory at"):
            comm.register_external_window(ctypes.addressof(ctypes.c_char.from_buffer(shared)), PAGE)
        assert comm._resources == []
        mine.close()


def test_ranks_that_import_different_sizes_all_raise() -> None:
    with joined(2) as members:

        def check(comm: Communicator) -> None:
            mine = Memfd(4 * PAGE)
            try:
                comm.register_external_window(mine.ptr, (1 + comm.rank) * PAGE)
            finally:
                mine.close()

        for error in each(members, check):
            assert isinstance(error, ConfigMismatch) and f"{PAGE} on rank 0; {2 * PAGE} on rank 1" in str(error)
        assert [comm._resources for comm in members] == [[], []]


def test_launches_that_cannot_be_are_refused() -> None:
    with joined(1) as (comm,):
        rank = BarrierRank(comm, comm.create_dev_comm(), 1)
        for blocks, threads in ((0, 32), (1, 0), (1, 1025)):
            with pytest.raises(ValueError, match=f"{blocks} blocks of {threads} threads"):
                rank.kernel.launch(Question(), blocks=blocks, threads=threads)
        with pytest.raises(jit.CompileError, match="lacks nowhere"):
            device.compile("#include <mori/cco.hpp>\n", "nowhere", comm)
