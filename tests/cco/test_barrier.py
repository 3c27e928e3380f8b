"""The barrier of the device header on CPUs: what it orders, how it counts, how it ends when a rank does not come."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from typing import Any

import pytest

from mori.cco import CCODevCommRequirements, Communicator, UniqueId, get_unique_id
from mori.errors import PeerLost
from tests.cco.members import SLICE_BYTES, BarrierRank, all_well, each, joined
from tests.rank_worker import RankContext
from tests.ranks import private_pool

SECOND = 2 * 10**9  # cycles: about that, or more
SHORT = 10**7
WELL, MISSING = [0, 0], [0, 1]


def ready(members: list[Communicator], groups: int, hybrid: int = 0) -> list[BarrierRank]:
    requirements = CCODevCommRequirements(lsa_barrier_count=groups, barrier_count=hybrid)
    return all_well(each(members, lambda comm: BarrierRank(comm, comm.create_dev_comm(requirements), groups)))


def epochs(rank: BarrierRank) -> list[int]:
    comm = rank.comm
    slab = comm.ptr + rank.dev_comm._slabs.offset
    return list((ctypes.c_uint32 * rank.groups).from_address(slab))


@pytest.mark.parametrize("nranks, groups", [(2, 1), (3, 2)])
def test_thousands_of_syncs_over_several_launches(nranks: int, groups: int) -> None:
    with joined(nranks) as members:
        ranks = ready(members, groups, hybrid=groups)
        for launch in range(1, 5):
            found = all_well(each(ranks, lambda rank: rank.run(1024, cycles=60 * SECOND)))
            assert all(marks.tolist() == [WELL] * groups for marks in found)
            assert [epochs(rank) for rank in ranks] == [[1024 * launch] * groups] * nranks
        # Barriers of the other handle count for themselves.
        found = all_well(each(ranks, lambda rank: rank.run(3, hybrid=True)))
        assert all(marks.tolist() == [WELL] * groups for marks in found)
        assert [epochs(rank) for rank in ranks] == [[4096] * groups] * nranks


def test_arrive_and_wait_may_be_split() -> None:
    with joined(2) as members:
        ranks = ready(members, 1)
        found = all_well(each(ranks, lambda rank: rank.run(5000, split=True)))
        assert all(marks.tolist() == [WELL] for marks in found)
        assert [epochs(rank) for rank in ranks] == [[5000]] * 2


def test_a_lone_rank_waits_for_nobody() -> None:
    with joined(1) as members:
        (rank,) = ready(members, 1)
        assert rank.run(100).tolist() == [WELL]
        assert epochs(rank) == [100]


@pytest.mark.parametrize("split", [False, True], ids=["sync", "arrive and wait"])
def test_an_absent_rank_is_a_timeout_that_changes_nothing(split: bool) -> None:
    with joined(3) as members:
        ranks = ready(members, 2)
        found = all_well(each(ranks[1:], lambda rank: rank.run(5, cycles=SHORT, split=split)))
        assert all(marks.tolist() == [MISSING] * 2 for marks in found)
        assert [epochs(rank) for rank in ranks] == [[0, 0]] * 3
        # Now it comes, and the others repeat their arrival.
        found = all_well(each(ranks, lambda rank: rank.run(5, cycles=60 * SECOND, split=split)))
        assert all(marks.tolist() == [WELL] * 2 for marks in found)
        assert [epochs(rank) for rank in ranks] == [[5, 5]] * 3


def test_the_count_wraps_around() -> None:
    with joined(2) as members:
        ranks = ready(members, 1)
        for rank in ranks:
            words = (ctypes.c_uint32 * 3).from_address(rank.comm.ptr + rank.dev_comm._slabs.offset)
            words[:] = [2**32 - 3] * 3  # the epoch and what has come from both ranks
        found = all_well(each(ranks, lambda rank: rank.run(10)))
        assert all(marks.tolist() == [WELL] for marks in found)
        assert [epochs(rank) for rank in ranks] == [[7]] * 2


def test_a_rank_that_leaves_ends_the_wait_of_others() -> None:
    with joined(2) as members:
        ranks = ready(members, 1)

        def last_round(rank: BarrierRank) -> Any:
            if rank is ranks[1]:
                return rank.comm.destroy()
            marks = rank.run(5)
            assert rank.comm.has_left(1)
            rank.comm.destroy()
            return marks

        assert all_well(each(ranks, last_round))[0].tolist() == [MISSING]


def wait_for_the_dead(context: RankContext, unique_id: UniqueId) -> tuple[list[list[int]], str, float]:
    comm = Communicator.init(context.world_size, context.rank, unique_id, SLICE_BYTES)
    rank = BarrierRank(comm, comm.create_dev_comm(CCODevCommRequirements(lsa_barrier_count=2)), 2)
    assert rank.run(10).tolist() == [WELL] * 2
    if context.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    begin_s = time.monotonic()
    marks = rank.run(10).tolist()
    took_s = time.monotonic() - begin_s
    with pytest.raises(PeerLost) as caught:
        comm.barrier()
    return marks, str(caught.value), took_s


def test_a_rank_that_dies_ends_the_wait_of_others(kernel_folder: object) -> None:
    with private_pool(3, bare=True, MORI_JIT_CACHE_DIR=str(kernel_folder)) as ranks:
        first, dead, last = ranks.outcomes(wait_for_the_dead, get_unique_id())
    assert dead.exit_code == -signal.SIGKILL
    for survivor in (first, last):
        assert survivor.failure is None, survivor.failure
        marks, text, took_s = survivor.value
        assert marks == [MISSING] * 2
        assert "rank 1" in text and "died" in text
        assert took_s < 2.0
