"""The interface of functions: the same objects, and failures in its own words."""

from __future__ import annotations

import ctypes
import mmap

import pytest

from mori import cco
from mori.cco import cco as low
from mori.cco import get_unique_id
from tests.cco.members import SLICE_BYTES, all_well, each, look_up

PAGE = mmap.PAGESIZE


def test_the_package_has_most_of_it() -> None:
    inside_only = {"mem_import", "window_register_external"}
    assert {name for name in low.__all__ if not hasattr(cco, name)} == inside_only
    for name in set(low.__all__) - inside_only:
        assert getattr(cco, name) is getattr(low, name)
    assert set(cco.__all__) >= {"CCODevCommRequirements", "CCOResource", "ImportedWindow", "communicator_of_window"}


def test_a_life_in_functions() -> None:
    unique_id = get_unique_id()

    def live(rank: int) -> None:
        comm = low.comm_create(unique_id.ptr, 2, rank, SLICE_BYTES)
        ptr = low.mem_alloc(comm, PAGE)
        window = low.window_register_ptr(comm, ptr, PAGE)
        both = low.window_register(comm, 2 * PAGE)
        alias = low.mem_import(comm, ptr, PAGE)
        over_alias = low.window_register_ptr(comm, alias, PAGE)
        external, other_alias = low.window_register_external(comm, ptr, PAGE)
        assert len({window, both[0], over_alias, external}) == 4 and len({ptr, both[1], alias, other_alias}) == 4
        ctypes.memset(ptr, 40 + rank, PAGE)
        assert ctypes.string_at(alias, PAGE) == ctypes.string_at(other_alias, PAGE) == bytes([40 + rank]) * PAGE
        requirements = low.DevCommRequirements(lsa_barrier_count=2)
        dev_comm = low.dev_comm_create(comm, requirements)
        assert look_up(comm, dev_comm, ptr)[0] == window
        low.barrier_all(comm)
        low.dev_comm_destroy(comm, dev_comm)
        for handle in (external, over_alias, both[0], window):
            low.window_deregister(comm, handle)
        for address in (alias, both[1], ptr):
            low.mem_free(comm, address)
        assert low.mem_alloc(comm, 0) == 0
        assert comm._resources == []
        low.comm_destroy(comm)
        low.comm_destroy(None)

    all_well(each([0, 1], live))


def test_failures_name_the_function_of_c() -> None:
    comm = low.comm_create(get_unique_id(), 1, 0, SLICE_BYTES)
    ptr = low.mem_alloc(comm, PAGE)
    for function, arguments, what in (
        (low.mem_alloc, (comm, -1), r"ccoMemAlloc failed: -1 \(size must not be negative"),
        (low.mem_alloc, (comm, SLICE_BYTES * 2), "ccoMemAlloc failed: -1 "),
        (low.mem_free, (comm, ptr + 1), r"ccoMemFree failed: -1 \(.* is the ptr of nothing"),
        (low.mem_import, (comm, 8, 8), "ccoMemImport failed: -1 "),
        (low.window_register, (comm, 0), "ccoWindowRegister failed: -1 "),
        (low.window_register_ptr, (comm, ptr + PAGE, 8), "ccoWindowRegister failed: -1 "),
        (low.window_register_external, (comm, 8, 8), "ccoWindowRegister failed: -1 "),
        (low.window_deregister, (comm, 4711), "ccoWindowDeregister failed: -1 "),
        (low.dev_comm_create, (comm, low.DevCommRequirements(barrier_count=-1)), "ccoDevCommCreate failed: -1 "),
        (low.comm_create, (get_unique_id(), 0, 0), "ccoCommCreate failed: -1 "),
    ):
        with pytest.raises(RuntimeError, match=what):
            function(*arguments)  # type: ignore[operator]
    low.comm_destroy(comm)
    with pytest.raises(RuntimeError, match=r"ccoBarrierAll failed: -1 \(Cannot barrier: Communicator has been"):
        low.barrier_all(comm)
