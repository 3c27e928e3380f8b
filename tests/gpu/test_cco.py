"""mori.cco on GPUs: the examples, barriers at every scope, ranks that are absent or die, memory of others."""

from __future__ import annotations

import gc
import importlib
import os
import signal
import sys
import time
from pathlib import Path

import pytest
import torch

from mori.cco import CCODevCommRequirements, Communicator, UniqueId, get_unique_id
from mori.errors import PeerLost
from tests.cco.members import BarrierRank, look_up
from tests.gpu.ranks import GpuPool, on_host, private_gpu_pool, synchronize
from tests.rank_worker import RankContext

pytestmark = pytest.mark.gpu

FOLDER = Path(__file__).parents[2] / "examples" / "cco"
EXAMPLES = {"barrier": "2000 rounds", "lsa_put": "all as sent", "lsa_allreduce": "equal bit for bit to torch's"}
COOPS = ("ccoCoopThread", "ccoCoopWarp", "ccoCoopBlock")
SLICE_BYTES = 64 << 20
BLOCKS, THREADS = 4, 64
LONG, SHORT = 10**11, 10**8  # cycles: a minute or more, and some hundredths of a second
WELL, MISSING = [0, 0], [0, 1]


def join(context: RankContext, unique_id: UniqueId) -> Communicator:
    return Communicator.init(context.world_size, context.rank, unique_id, SLICE_BYTES)


def ready(comm: Communicator, coop: str = "ccoCoopBlock") -> BarrierRank:
    lanes = 1 if on_host() else 32
    threads = 1 if on_host() else THREADS
    per_block = {"ccoCoopThread": threads, "ccoCoopWarp": threads // lanes, "ccoCoopBlock": 1}[coop]
    groups = BLOCKS * per_block
    dev_comm = comm.create_dev_comm(CCODevCommRequirements(lsa_barrier_count=groups))
    rank = BarrierRank(comm, dev_comm, groups, coop)
    comm.barrier()  # everybody has loaded the kernel
    return rank


def go(rank: BarrierRank, rounds: int, cycles: int = LONG, split: bool = False) -> list[list[int]]:
    return rank.run(rounds, cycles=cycles, split=split, blocks=BLOCKS, threads=THREADS).tolist()


def epochs(rank: BarrierRank) -> list[int]:
    slab = rank.dev_comm._slabs.view(0, (rank.groups,), torch.int32)
    return slab.tolist()


def run_example(context: RankContext, name: str, unique_id: UniqueId) -> str:
    sys.path.insert(0, str(FOLDER))  # as for a program that is started there
    try:
        module = importlib.import_module(name)
    finally:
        sys.path.remove(str(FOLDER))
    with join(context, unique_id) as comm:
        return module.example(comm)


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example(gpus: GpuPool, name: str):
    for said in gpus.run(run_example, name, get_unique_id()):
        assert EXAMPLES[name] in said


def stress(context: RankContext, coop: str, unique_id: UniqueId) -> None:
    with join(context, unique_id) as comm:
        rank = ready(comm, coop)
        for launch in range(1, 5):
            assert go(rank, 1024) == [WELL] * rank.groups
            assert epochs(rank) == [1024 * launch] * rank.groups
        assert go(rank, 5000, split=True) == [WELL] * rank.groups
        assert epochs(rank) == [9096] * rank.groups
        assert rank.run(100, blocks=BLOCKS, threads=THREADS).tolist() == [WELL] * rank.groups  # without a limit


@pytest.mark.parametrize("coop", COOPS)
def test_thousands_of_syncs_over_several_launches(gpus: GpuPool, coop: str):
    gpus.run(stress, coop, get_unique_id())


def late_rank(context: RankContext, coop: str, split: bool, unique_id: UniqueId) -> None:
    with join(context, unique_id) as comm:
        rank = ready(comm, coop)
        if context.rank != 0:
            assert go(rank, 5, SHORT, split) == [MISSING] * rank.groups
            assert epochs(rank) == [0] * rank.groups
        comm.barrier()
        assert go(rank, 5, LONG, split) == [WELL] * rank.groups
        assert epochs(rank) == [5] * rank.groups


@pytest.mark.parametrize("split", [False, True], ids=["sync", "arrive and wait"])
@pytest.mark.parametrize("coop", COOPS)
def test_an_absent_rank_is_a_timeout_that_changes_nothing(gpus: GpuPool, coop: str, split: bool):
    gpus.run(late_rank, coop, split, get_unique_id())


def wait_for_the_dead(context: RankContext, unique_id: UniqueId) -> tuple[list[list[int]], str, float]:
    comm = join(context, unique_id)
    rank = ready(comm)
    assert go(rank, 10) == [WELL] * rank.groups
    if context.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    begin_s = time.monotonic()
    marks = rank.run(10, blocks=BLOCKS, threads=THREADS).tolist()
    took_s = time.monotonic() - begin_s
    with pytest.raises(PeerLost) as caught:
        comm.barrier()
    return marks, str(caught.value), took_s


def test_a_rank_that_dies_ends_the_wait_of_others():
    with private_gpu_pool() as own:
        outcomes = own.outcomes(wait_for_the_dead, get_unique_id())
    assert outcomes[1].exit_code == -signal.SIGKILL
    for survivor in (outcome for number, outcome in enumerate(outcomes) if number != 1):
        assert survivor.failure is None, survivor.failure
        marks, text, took_s = survivor.value
        assert marks == [MISSING] * BLOCKS
        assert "rank 1" in text and "died" in text
        assert took_s < 5.0  # the driver takes its time to tear a process down


def facts(context: RankContext, unique_id: UniqueId) -> None:
    with join(context, unique_id) as comm:
        requirements = CCODevCommRequirements(lsa_barrier_count=4, barrier_count=3)
        dev_comm = comm.create_dev_comm(requirements)
        memories = [comm.alloc_mem(size) for size in (4096, 40 << 20)]
        windows = [comm.register_window(memory.ptr, memory.size) for memory in memories]
        for memory, window in zip(memories, windows, strict=True):
            found, peer_0, compatible, *seen = look_up(comm, dev_comm, memory.ptr + memory.size - 1)
            assert (found, compatible) == (window.handle, 1)
            assert peer_0 == memory.ptr - comm.rank * dev_comm.per_rank_size + 8
            size = context.world_size
            where = [dev_comm.flat_base, dev_comm.per_rank_size]
            assert seen == [comm.rank, size, comm.rank, size, 0, 0, *where, 4, 3]
            window.close()
            assert look_up(comm, dev_comm, memory.ptr)[0] == 0


def test_what_a_kernel_sees(gpus: GpuPool):
    gpus.run(facts, get_unique_id())


def import_memory(context: RankContext, owner_id: UniqueId, unique_id: UniqueId) -> None:
    """The other communicator's first block is the beginning of an allocation by the driver's virtual memory calls."""
    with join(context, owner_id) as owner, join(context, unique_id) as comm:
        memory = owner.alloc_mem(2 << 20)
        values = memory.view(0, (1024,), torch.int32)
        values.fill_(10 + comm.rank)
        synchronize()
        window = comm.register_external_window(memory.ptr, memory.size)
        assert window.ext_ptr == memory.ptr and window.local_ptr != memory.ptr
        comm.barrier()
        symmetric = window._memory.symmetric
        for peer in range(comm.nranks):
            raw = torch.utils.dlpack.from_dlpack(window._memory.native.view(0, 4096, peer))
            assert raw.view(torch.int32).eq(10 + peer).all()
            assert symmetric.address(peer, 0) == symmetric.base + peer * symmetric.bytes_per_rank
        comm.barrier()
        window.close()
        assert values.eq(10 + comm.rank).all()
        if not on_host():
            tensor = torch.zeros(1 << 20, device=comm.device)
            with pytest.raises(RuntimeError, match="pass the base address of memory of"):
                comm.register_external_window(tensor.data_ptr(), 4096)
            with pytest.raises(RuntimeError, match="belongs to an allocation that begins at"):
                comm.register_external_window(memory.ptr + 4096, 4096)


def test_memory_of_another_communicator_becomes_a_window(gpus: GpuPool):
    gpus.run(import_memory, get_unique_id(), get_unique_id())


def cycles(context: RankContext, unique_ids: list[UniqueId]) -> list[int]:
    """Free device memory after each cycle."""
    free = []
    for unique_id in unique_ids:
        with join(context, unique_id) as comm:
            assert go(ready(comm), 10) == [WELL] * BLOCKS
        del comm
        gc.collect()
        if not on_host():
            torch.cuda.synchronize()
            free.append(torch.cuda.mem_get_info()[0])
        context.barrier()
    return free


def test_cycles_leave_no_device_memory_behind(gpus: GpuPool):
    unique_ids = [get_unique_id() for _ in range(6)]
    for free in gpus.run(cycles, unique_ids):
        assert not free or free[2] - free[-1] <= 4 << 20, free
