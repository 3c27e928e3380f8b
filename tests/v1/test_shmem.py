"""The shmem API: init in every way, barriers, finalize, and use at the wrong time."""

from __future__ import annotations

import gc
import time

import pytest
import torch

from tests.rank_worker import RankContext
from tests.ranks import pool, private_pool
from tests.v1.exercise import exercise, raises, require
from tests.v1.test_call_faults import good_case


def identity(context: RankContext) -> tuple[int, int, int]:
    import mori

    shmem = mori.shmem
    require(shmem.MORI_SHMEM_INIT_WITH_MPI_COMM == 0 and shmem.MORI_SHMEM_INIT_WITH_UNIQUEID == 1, "flags")
    for _ in range(3):
        shmem.shmem_barrier_all()
        shmem.shmem_barrier_on_stream()
    return shmem.shmem_mype(), shmem.shmem_npes(), shmem.shmem_num_qp_per_pe()


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_ranks_and_barriers(world_size: int):
    assert pool(world_size).run(identity) == [(rank, world_size, 4) for rank in range(world_size)]


def late_into_barrier(context: RankContext) -> tuple[float, float]:
    import mori

    if context.rank == context.world_size - 1:
        time.sleep(0.3)
    entered = time.monotonic()
    mori.shmem.shmem_barrier_all()
    return entered, time.monotonic()


@pytest.mark.parametrize("world_size", [3])
def test_nobody_leaves_a_barrier_before_all_have_entered(world_size: int):
    found = pool(world_size).run(late_into_barrier)
    assert min(left for _, left in found) >= max(entered for entered, _ in found)


def not_initialised(context: RankContext, case) -> None:
    import mori

    shmem = mori.shmem
    for call in (shmem.shmem_mype, shmem.shmem_npes, shmem.shmem_barrier_all):
        raises(mori.NotInitialized, call, says="shmem_torch_process_group_init")
    raises(mori.NotInitialized, shmem.shmem_malloc, 64, says="shmem_torch_process_group_init")
    raises(mori.NotInitialized, mori.ops.EpDispatchCombineOp, case.config(context.rank), says="shmem_")
    require(shmem.shmem_finalize() == 0, "finalize without init has nothing to do")
    raises(RuntimeError, shmem.shmem_torch_process_group_init, "default", says="torch.distributed")
    raises(RuntimeError, shmem.shmem_init_attr, 1, 0, 1, b"short", says="Invalid unique ID size")
    raises(RuntimeError, shmem.shmem_init_attr, 0, 0, 1, bytes(128), says="MPI")
    raises(ValueError, shmem.shmem_init_attr, 1, 3, 2, bytes(128), says="3")


@pytest.mark.parametrize("world_size", [2])
def test_use_before_init(world_size: int):
    pool(world_size, bare=True).run(not_initialised, good_case(world_size))


def make_unique_id(context: RankContext) -> bytes | None:
    import mori

    return mori.shmem.shmem_get_unique_id() if context.rank == 0 else None


def use_unique_id(context: RankContext, unique_id: bytes, case) -> None:
    import mori

    shmem = mori.shmem
    arguments = (shmem.MORI_SHMEM_INIT_WITH_UNIQUEID, context.rank, context.world_size)
    require(shmem.shmem_init_attr(*arguments, unique_id) == 0, "init returns 0")
    require((shmem.shmem_mype(), shmem.shmem_npes()) == arguments[1:], "rank and size")
    require(shmem.shmem_init_attr(*arguments, unique_id) == 0, "the same init again has no effect")
    raises(RuntimeError, shmem.shmem_init_attr, arguments[0], context.rank, context.world_size, bytes(128))
    require(not torch.distributed.is_initialized(), "torch.distributed is in use")
    exercise(context, case)
    shmem.shmem_finalize()
    raises(mori.NotInitialized, shmem.shmem_mype)


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_unique_id_without_torch_distributed(world_size: int):
    ranks = pool(world_size, bare=True)
    for _ in range(2):
        unique_id = ranks.run(make_unique_id)[0]
        assert len(unique_id) == 128
        ranks.run(use_unique_id, unique_id, good_case(world_size))


def test_the_creator_of_an_id_need_not_be_a_rank():
    import mori

    with private_pool(2, bare=True) as ranks:
        ranks.run(use_unique_id, mori.shmem.shmem_get_unique_id(), good_case(2))


def join_with(context: RankContext, unique_id: bytes, participants: int) -> str | None:
    import mori

    if context.rank >= participants:
        return None
    try:
        mori.shmem.shmem_init_attr(1, context.rank, context.world_size, unique_id)
    except mori.BootstrapError as error:
        return f"{type(error).__name__}: {error}"
    raise AssertionError("init succeeded")


def test_a_rank_that_never_joins_is_named():
    with private_pool(3, bare=True, MORI_BOOTSTRAP_TIMEOUT="1.5") as ranks:
        unique_id = ranks.run(make_unique_id)[0]
        found = ranks.run(join_with, unique_id, 2, timeout_s=20)
        for text in found[:2]:
            assert "Timeout" in text and "2" in text and "MORI_BOOTSTRAP_TIMEOUT" in text


def test_an_id_that_nobody_made_is_refused_in_time():
    with private_pool(2, bare=True, MORI_BOOTSTRAP_TIMEOUT="1.5") as ranks:
        started = time.monotonic()
        outcomes = ranks.outcomes(join_with, bytes(128), 2, timeout_s=20)
        assert time.monotonic() - started < 10
        for outcome in outcomes:
            assert outcome.value is not None or "Error" in (outcome.error or "")


def finalize_and_init_again(context: RankContext, case) -> None:
    import mori

    shmem = mori.shmem
    rows, ids = torch.ones(1, 16, dtype=torch.bfloat16), torch.zeros(1, case.topk, dtype=torch.int32)
    for _ in range(3):
        exercise(context, case)
        op = mori.ops.EpDispatchCombineOp(case.config(context.rank))
        op.dispatch(rows, None, None, ids)
        address = shmem.shmem_malloc(64)
        require(shmem.shmem_finalize() == 0, "finalize returns 0")
        require(shmem.shmem_finalize() == 0, "a second finalize has nothing to do")
        for call in (
            lambda op=op: op.dispatch(rows, None, None, ids),
            lambda op=op: op.combine(rows, None, ids),
            shmem.shmem_mype,
            lambda: shmem.shmem_malloc(64),
            lambda address=address: shmem.shmem_free(address),
            lambda: mori.ops.EpDispatchCombineOp(case.config(context.rank)),
        ):
            raises(mori.NotInitialized, call)
        del op
        gc.collect()
        shmem.shmem_torch_process_group_init("default")


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_finalize_and_init_again(world_size: int):
    pool(world_size).run(finalize_and_init_again, good_case(world_size))


def old_op_in_new_world(context: RankContext, case) -> None:
    import mori

    op = mori.ops.EpDispatchCombineOp(case.config(context.rank))
    mori.shmem.shmem_finalize()
    mori.shmem.shmem_torch_process_group_init("default")
    rows, ids = torch.ones(1, 16, dtype=torch.bfloat16), torch.zeros(1, case.topk, dtype=torch.int32)
    raises(mori.NotInitialized, op.dispatch, rows, None, None, ids)
    exercise(context, case)


@pytest.mark.parametrize("world_size", [2])
def test_an_op_does_not_come_back_with_the_next_init(world_size: int):
    pool(world_size).run(old_op_in_new_world, good_case(world_size))


def init_twice(context: RankContext) -> None:
    import torch.distributed as dist

    import mori

    shmem = mori.shmem
    require(shmem.shmem_torch_process_group_init("default") == 0, "the same init again has no effect")
    alone = [dist.new_group([rank]) for rank in range(context.world_size)][context.rank]
    raises(RuntimeError, shmem.shmem_torch_process_group_init, alone.group_name, says="already")
    raises(ValueError, shmem.shmem_torch_process_group_init, "no such group", says="no such group")
    require(shmem.shmem_npes() == context.world_size, "a refused init changed the world")


@pytest.mark.parametrize("world_size", [2])
def test_double_init(world_size: int):
    ranks = pool(world_size)
    ranks.run(init_twice)
    ranks.renew()


def subgroups(context: RankContext, case) -> None:
    """Ranks 0..3 of 4 in two groups, the second of which lacks global rank 0 and counts backwards."""
    import torch.distributed as dist

    import mori

    mori.shmem.shmem_finalize()
    context.barrier()
    members = [[0, 2], [1, 3]]
    groups = [dist.new_group(ranks) for ranks in members]
    mine = context.rank % 2
    mori.shmem.shmem_torch_process_group_init(groups[mine].group_name)
    inner = RankContext(members[mine].index(context.rank), type(context.world)(2))
    require((mori.shmem.shmem_mype(), mori.shmem.shmem_npes()) == (inner.rank, 2), "PE numbers are group ranks")
    exercise(inner, case)
    mori.shmem.shmem_finalize()
    context.barrier()
    if context.rank:  # a group that simply leaves rank 0 out
        trio = dist.new_group([1, 2, 3], use_local_synchronization=True)
        torch._C._distributed_c10d._register_process_group("mori_trio", trio)
        mori.shmem.shmem_torch_process_group_init("mori_trio")
        require(mori.shmem.shmem_mype() == context.rank - 1, "PE numbers are group ranks")
        mori.shmem.shmem_barrier_all()
        mori.shmem.shmem_finalize()
        torch._C._distributed_c10d._unregister_process_group("mori_trio")
    context.barrier()
    mori.shmem.shmem_torch_process_group_init("default")
    exercise(context, good_case(context.world_size))


@pytest.mark.parametrize("world_size", [4])
def test_subgroups_with_and_without_global_rank_zero(world_size: int):
    pool(world_size).run(subgroups, good_case(2))


def registered_default(context: RankContext, case) -> None:
    """A program that registers "default" itself, as the guide shows."""
    import torch.distributed as dist

    import mori

    mori.shmem.shmem_finalize()
    context.barrier()
    pair = dist.new_group([0, 1])
    if context.rank < 2:
        torch._C._distributed_c10d._register_process_group("default", pair)
        mori.shmem.shmem_torch_process_group_init("default")
        require(mori.shmem.shmem_npes() == 2, "the registered group was not used")
        mori.shmem.shmem_finalize()
        torch._C._distributed_c10d._unregister_process_group("default")
    context.barrier()
    mori.shmem.shmem_torch_process_group_init("default")
    require(mori.shmem.shmem_npes() == context.world_size, "unregistered, the name means WORLD")
    exercise(context, case)


@pytest.mark.parametrize("world_size", [3])
def test_default_means_world_unless_it_is_registered(world_size: int):
    pool(world_size).run(registered_default, good_case(world_size))


def finalize_after_group_is_gone(context: RankContext, case) -> None:
    import torch.distributed as dist

    import mori

    exercise(context, case)
    dist.barrier()
    dist.destroy_process_group()
    exercise(context, case)
    mori.shmem.shmem_finalize()


@pytest.mark.parametrize("world_size", [1, 3])
def test_finalize_after_destroy_process_group(world_size: int):
    ranks = pool(world_size)
    ranks.run(finalize_after_group_is_gone, good_case(world_size))
    ranks.renew()


def different_heaps(context: RankContext, unique_id: bytes) -> str:
    import os

    import mori

    os.environ["MORI_SHMEM_HEAP_SIZE"] = f"{64 + context.rank}M"
    try:
        mori.shmem.shmem_init_attr(1, context.rank, context.world_size, unique_id)
    except mori.ConfigMismatch as error:
        return str(error)
    raise AssertionError("ranks with heaps of different size were joined")


def test_heaps_of_different_size_raise_on_all_ranks():
    with private_pool(2, bare=True) as ranks:
        unique_id = ranks.run(make_unique_id)[0]
        for text in ranks.run(different_heaps, unique_id):
            assert str(64 << 20) in text and str(65 << 20) in text


@pytest.mark.parametrize("value", ["6 gigabytes", "-1", "12X"])
def test_malformed_heap_size(value: str):
    with private_pool(1, bare=True, MORI_SHMEM_HEAP_SIZE=value) as ranks:
        unique_id = ranks.run(make_unique_id)[0]
        [outcome] = ranks.outcomes(join_with, unique_id, 1)
        error = outcome.error or ""
        assert "ValueError" in error and "MORI_SHMEM_HEAP_SIZE" in error and value in error
