"""The life of communicators and of what they hand out. Ranks are threads."""

from __future__ import annotations

import dataclasses
import pickle
from typing import Any

import pytest
import torch

from mori import cco
from mori.cco import CCODevCommRequirements, Communicator, DevCommHandle, UniqueId, get_unique_id
from mori.errors import ConfigMismatch, HeapExhausted
from tests.cco.members import SLICE_BYTES, BarrierRank, all_well, each, join, joined, leave, look_up
from tests.v1.resources import settled_snapshot

KIB = 1 << 10


def test_a_life() -> None:
    with joined(2) as members:

        def live(comm: Communicator) -> None:
            assert comm.is_valid and comm.nranks == 2 and comm is members[comm.rank] and comm.ptr
            memory = comm.alloc_mem(1000)
            window = comm.register_window(memory.ptr, 1000)
            dev_comm = comm.create_dev_comm()
            assert comm._resources == [memory, window, dev_comm]
            assert (memory.size, window.size, window.local_ptr) == (1000, 1000, memory.ptr)
            assert (dev_comm.rank, dev_comm.world_size) == (comm.rank, 2)
            assert (dev_comm.lsa_rank, dev_comm.lsa_size, dev_comm.my_node_start) == (comm.rank, 2, 0)
            assert dev_comm.flat_base + comm.rank * dev_comm.per_rank_size == comm.ptr
            memory.view(0, (250,), torch.float32).fill_(comm.rank)
            comm.barrier()
            assert memory.view(0, (250,), torch.float32, peer=1 - comm.rank).eq(1 - comm.rank).all()
            comm.barrier()
            comm.close_all_resources()
            assert comm._resources == [] and not (memory.is_valid or window.is_valid or dev_comm.is_valid)

        all_well(each(members, live))


def test_operations_on_a_destroyed_communicator_say_so() -> None:
    (comm,) = join(1)
    memory = comm.alloc_mem(64)
    comm.destroy()
    comm.destroy()
    assert not comm.is_valid and not memory.is_valid
    operations: dict[str, Any] = {
        "read the rank": lambda: comm.rank,
        "read the number of ranks": lambda: comm.nranks,
        "read the address": lambda: comm.ptr,
        "alloc_mem": lambda: comm.alloc_mem(1),
        "register_window": lambda: comm.register_window(4096, 1),
        "register_external_window": lambda: comm.register_external_window(4096, 1),
        "create_dev_comm": lambda: comm.create_dev_comm(),
        "barrier": lambda: comm.barrier(),
    }
    for what, operation in operations.items():
        with pytest.raises(RuntimeError, match=f"Cannot {what}: Communicator has been destroyed"):
            operation()


def test_closed_resources_say_so() -> None:
    with joined(1) as (comm,):
        memory = comm.alloc_mem(64)
        window = comm.register_window(memory.ptr, 64)
        external = comm.register_external_window(memory.ptr, 64)
        dev_comm = comm.create_dev_comm()
        properties = {
            memory: ["ptr", "offset", "native"],
            window: ["handle", "local_ptr"],
            external: ["handle", "local_ptr", "ext_ptr"],
            dev_comm: ["ptr", "host_ptr", "rank", "world_size", "lsa_rank", "lsa_size", "flat_base", "per_rank_size"],
        }
        assert all(isinstance(resource, cco.CCOResource) for resource in properties)
        for resource, names in properties.items():
            for name in names:
                getattr(resource, name)
            resource.close()
            resource.close()
            for name in names:
                with pytest.raises(RuntimeError, match=f"this {type(resource).__name__} has already been closed"):
                    getattr(resource, name)
        assert comm._resources == []


def test_resources_are_closed_newest_first_and_whatever_happens() -> None:
    closed = []

    class Stubborn(cco.CCOResource):
        def _release(self) -> None:
            closed.append(self)
            raise RuntimeError("no")

    with joined(1) as (comm,):
        first, second = Stubborn(comm), Stubborn(comm)
        comm.close_all_resources()
        assert closed == [second, first] and comm._resources == []


def test_a_context_manager_destroys() -> None:
    with Communicator.init(1, 0, get_unique_id(), SLICE_BYTES) as comm:
        window = comm.register_window(comm.alloc_mem(64).ptr, 64)
        assert window.is_valid
    assert not comm.is_valid and not window.is_valid


def test_init_refuses_what_cannot_be() -> None:
    unique_id = get_unique_id()
    for nranks, size, what in ((0, 1, "nranks must be between 1 and 512, got 0"), (1, 0, "per_rank_vmm must be")):
        with pytest.raises(ValueError, match=what):
            Communicator.init(nranks, 0, unique_id, size)
    with pytest.raises(RuntimeError, match="zero id"):
        Communicator.init(1, 0, UniqueId())
    with pytest.raises(ValueError, match="128 bytes"):
        Communicator.init(1, 0, b"short")
    with Communicator.init(1, 0, pickle.loads(pickle.dumps(unique_id)).ptr, SLICE_BYTES) as comm:
        assert comm.capacity_bytes == SLICE_BYTES


def test_memory_of_no_bytes_has_no_address_and_too_much_is_refused() -> None:
    with joined(1) as (comm,):
        assert comm.alloc_mem(0).ptr == 0
        with pytest.raises(ValueError, match="-1"):
            comm.alloc_mem(-1)
        used = comm.used_bytes
        with pytest.raises(HeapExhausted, match=f"needs {SLICE_BYTES + 1} bytes.*{SLICE_BYTES} bytes configured"):
            comm.alloc_mem(SLICE_BYTES + 1)
        assert comm.used_bytes == used


def test_what_a_kernel_sees_of_a_device_communicator() -> None:
    requirements = CCODevCommRequirements(
        gda_connection_type=cco.GDA_CONNECTION_RAIL,
        lsa_barrier_count=4,
        rail_gda_barrier_count=2,
        barrier_count=3,
    )
    with joined(2) as members:

        def ask(comm: Communicator) -> list[int]:
            handle = comm.create_dev_comm(requirements)
            assert handle.gda_conn_type == cco.GDA_CONNECTION_NONE  # there is no other node
            return look_up(comm, handle, 0)

        for comm, found in zip(members, all_well(each(members, ask)), strict=True):
            flat_base = comm.ptr - comm.rank * comm._memory.bytes_per_rank
            ours = [comm.rank, 2, comm.rank, 2, 0, 0, flat_base, comm._memory.bytes_per_rank, 4, 3]
            assert found == [0, 0, 1, *ours]


def test_requirements_are_what_releases_have_and_are_checked() -> None:
    assert dataclasses.asdict(CCODevCommRequirements()) == {
        "gda_connection_type": cco.GDA_CONNECTION_CROSSNODE,
        "gda_context_count": 4,
        "gda_signal_count": 16,
        "gda_counter_count": 16,
        "gda_queue_depth": 0,
        "gda_traffic_class": -1,
        "lsa_barrier_count": 0,
        "rail_gda_barrier_count": 0,
        "sdma_queue_count": 0,
        "barrier_count": 0,
    }
    names = ("NONE", "FULL", "CROSSNODE", "RAIL")
    assert [getattr(cco, f"GDA_CONNECTION_{name}") for name in names] == [0, 1, 2, 3]
    with joined(1) as (comm,):
        for field, value, error, text in (
            ("gda_connection_type", 4, ValueError, "gda_connection_type must be between 0 and 3, got 4"),
            ("lsa_barrier_count", -1, ValueError, "lsa_barrier_count must be between 0 and 65536, got -1"),
            ("gda_traffic_class", -2, ValueError, "gda_traffic_class must be between -1 and 65536, got -2"),
            ("barrier_count", "3", TypeError, "barrier_count must be an int, got '3'"),
        ):
            requirements = CCODevCommRequirements()
            setattr(requirements, field, value)
            with pytest.raises(error, match=text):
                comm.create_dev_comm(requirements)
        assert comm._resources == []


def test_requirements_that_differ_are_an_error_on_all_ranks() -> None:
    with joined(2) as members:
        found = each(
            members, lambda comm: comm.create_dev_comm(CCODevCommRequirements(lsa_barrier_count=comm.rank + 7))
        )
        for error in found:
            assert isinstance(error, ConfigMismatch)
            assert "lsa_barrier_count: 7 on rank 0; 8 on rank 1" in str(error)


def test_a_handle_that_is_constructed_is_not_tracked() -> None:
    with joined(1) as (comm,):
        handle = DevCommHandle(comm, CCODevCommRequirements(lsa_barrier_count=5))
        assert comm._resources == [] and look_up(comm, handle, 0)[11] == 5
        handle.close()


def test_a_handle_that_outlives_its_communicator_says_so() -> None:
    with joined(1) as (comm,):
        handle = DevCommHandle(comm)
        comm.destroy()
        for name in ("ptr", "host_ptr", "rank", "flat_base", "per_rank_size"):
            with pytest.raises(RuntimeError, match="Communicator has been destroyed"):
                getattr(handle, name)


def test_an_op_like_user_takes_exactly_two_resources() -> None:
    """Memory and window; barriers and descriptors are not counted, and nothing is left."""
    with joined(2) as members:

        def cycles(comm: Communicator) -> set[int]:
            handles = set()
            used = []
            for _ in range(5):
                base = len(comm._resources)
                memory = comm.alloc_mem(64 * KIB)
                window = comm.register_window(memory.ptr, memory.size)
                assert len(comm._resources) == base + 2
                handles.add(window.handle)
                window.close()
                memory.close()
                assert len(comm._resources) == base
                comm.create_dev_comm(CCODevCommRequirements(lsa_barrier_count=64)).close()
                used.append(comm.used_bytes)
            assert used[-1] == used[1]
            return handles

        assert [len(handles) for handles in all_well(each(members, cycles))] == [1, 1]


def test_two_communicators_of_one_process_know_nothing_of_each_other() -> None:
    """Four threads, two communicators, kernels of both at once."""
    with joined(2) as first, joined(2) as second:
        requirements = CCODevCommRequirements(lsa_barrier_count=1)

        def run(comm: Communicator) -> tuple[list[list[int]], int]:
            rank = BarrierRank(comm, comm.create_dev_comm(requirements), 1)
            marks = rank.run(500)
            assert cco.communicator_of_window(rank.windows[0].handle) is comm
            return marks.tolist(), rank.windows[0].handle

        found = all_well(each([*first, *second], run))
        assert [marks for marks, _ in found] == [[[0, 0]]] * 4
        assert len({handle for _, handle in found}) == 4
    assert all(cco.communicator_of_window(handle) is None for _, handle in found)


def test_cycles_leave_nothing_behind() -> None:
    def cycle() -> None:
        members = join(2, 64 << 20)
        requirements = CCODevCommRequirements(lsa_barrier_count=1)

        def use(comm: Communicator) -> None:
            rank = BarrierRank(comm, comm.create_dev_comm(requirements), 1)
            comm.register_external_window(rank.data.ptr, 4 * KIB)
            rank.run(5)

        all_well(each(members, use))
        leave(members)

    for _ in range(2):
        cycle()
    before = settled_snapshot()
    for _ in range(8):
        cycle()
    after = settled_snapshot()
    assert after[:4] == before[:4]
    assert after.resident_bytes - before.resident_bytes < 8 << 20
