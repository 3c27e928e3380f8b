"""Views that stay where they are and outlive their op, and ops that leave nothing behind."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from tests.rank_worker import RankContext
from tests.ranks import pool, private_pool
from tests.v1 import cases
from tests.v1.cases import Case, Step, routing
from tests.v1.exercise import Exercise, require, require_same_bits
from tests.v1.resources import Resources, settled_snapshot, snapshot

RESIDENT_NOISE_BYTES = 12 << 20


def small_case(world_size: int) -> Case:
    steps = (Step("dispatch", routing("any", [12] * world_size, 4, 3)), Step("combine"))
    return Case(world_size, 96, 4, 3, 12, steps, scale_dim=4, values="bits")


def arguments(case: Case, rank: int) -> tuple:
    return (
        cases.payload(case, 0, rank),
        cases.weights(case, 0, rank),
        cases.scales(case, 0, rank),
        torch.from_numpy(case.steps[0].indices[rank]),
    )


def views_keep_their_place(context: RankContext) -> None:
    import mori

    case = small_case(context.world_size)
    op = mori.ops.EpDispatchCombineOp(case.config(context.rank))
    given = arguments(case, context.rank)
    first = op.dispatch(*given)
    first_combined = op.combine(first[0], first[1], given[3])
    buffer = op.get_registered_combine_input_buffer(torch.bfloat16).data_ptr()
    for _ in range(3):
        again = op.dispatch(*given)
        require(all(view is old for view, old in zip(again, first, strict=True)), "dispatch gives other tensor objects")
        combined = op.combine(again[0], again[1], given[3])
        require(all(view is old for view, old in zip(combined, first_combined, strict=True)), "combine likewise")
        require(op.get_registered_combine_input_buffer(torch.bfloat16).data_ptr() == buffer, "the buffer moved")
    fewer = op.dispatch(given[0][:1], given[1][:1], given[2][:1], given[3][:1])
    require([view.data_ptr() for view in fewer] == [view.data_ptr() for view in first], "views moved with n")
    narrow = op.dispatch(given[0][:, :8].contiguous(), *given[1:])
    require(narrow[0].data_ptr() == first[0].data_ptr() and narrow[0].shape[1] == 8, "another h moved the rows")
    require(narrow[0].stride() == (8, 1), f"row stride must follow h, is {narrow[0].stride()}")


@pytest.mark.parametrize("world_size", [1, 2])
def test_views_are_the_same_objects_at_the_same_addresses(world_size: int):
    pool(world_size).run(views_keep_their_place)


def fresh_views(context: RankContext) -> None:
    import mori

    case = small_case(context.world_size)
    op = mori.ops.EpDispatchCombineOp(case.config(context.rank))
    given = arguments(case, context.rank)
    first, again = op.dispatch(*given), op.dispatch(*given)
    require(all(view is not old for view, old in zip(again, first, strict=True)), "the view cache is still on")
    require([view.data_ptr() for view in again] == [view.data_ptr() for view in first], "fresh views moved")


@pytest.mark.parametrize("world_size", [2])
def test_the_view_cache_can_be_switched_off(world_size: int):
    pool(world_size, MORI_EP_DISABLE_VIEW_CACHE="1").run(fresh_views)


def views_outlive_op_and_communicator(context: RankContext) -> None:
    import mori

    case = small_case(context.world_size)
    exercise = Exercise(context, case)
    exercise.run()
    held, expected = {"views": exercise.views}, exercise.expected
    buffer = exercise.op.get_registered_combine_input_buffer(torch.bfloat16)
    del exercise
    gc.collect()

    def check(when: str) -> None:
        total = len(expected.rows)
        views = held["views"]
        require(int(views[4]) == total, f"{when}: the count changed")
        require_same_bits(views[0][:total], expected.rows, f"{when}: rows")
        require_same_bits(views[1][:total], expected.weights, f"{when}: weights")
        require_same_bits(views[2][:total], expected.scales, f"{when}: scales")
        require_same_bits(views[3][:total], expected.indices, f"{when}: indices")

    check("after the op is gone")
    # Its memory must not be handed to another op while views of it live.
    Exercise(context, case).run()
    check("after another op was built and used")
    mori.shmem.shmem_finalize()
    check("after finalize")
    buffer.fill_(1.0)
    held["views"][0].fill_(0)
    require(float(buffer.float().sum()) == buffer.numel(), "the buffer is no longer ordinary memory")
    held.clear()
    del buffer
    gc.collect()
    context.barrier()
    mori.shmem.shmem_torch_process_group_init("default")
    Exercise(context, case).run()


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_views_outlive_op_and_communicator(world_size: int):
    pool(world_size).run(views_outlive_op_and_communicator)


def one_cycle(context: RankContext, case: Case) -> int:
    exercise = Exercise(context, case)
    exercise.run()
    address = exercise.views[0].data_ptr()
    exercise.op.reset()
    return address


def op_is_freed_without_a_collection(context: RankContext) -> None:
    gc.disable()
    try:
        exercise = Exercise(context, small_case(context.world_size))
        exercise.run()
        alive = weakref.ref(exercise.op)
        del exercise
        require(alive() is None, "the op is part of a reference cycle: its memory waits for the garbage collector")
    finally:
        gc.enable()


@pytest.mark.parametrize("world_size", [1])
def test_an_op_is_freed_when_its_last_reference_goes(world_size: int):
    pool(world_size).run(op_is_freed_without_a_collection)


def create_and_destroy(context: RankContext, cycles: int) -> tuple[Resources, Resources, int]:
    case = small_case(context.world_size)
    for _ in range(10):
        one_cycle(context, case)
    context.barrier()
    before = snapshot()
    addresses = {one_cycle(context, case) for _ in range(cycles)}
    context.barrier()
    return before, snapshot(), len(addresses)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_a_hundred_ops_leave_nothing_behind(world_size: int):
    for before, after, places in pool(world_size).run(create_and_destroy, 100):
        assert after[:4] == before[:4]
        assert abs(after.resident_bytes - before.resident_bytes) < RESIDENT_NOISE_BYTES
        assert places <= 2  # the freed memory is used again


def finalize_and_init_again(context: RankContext, cycles: int) -> list[Resources]:
    import mori

    case = small_case(context.world_size)
    found = []
    for _ in range(cycles):
        mori.shmem.shmem_finalize()
        context.barrier()
        found.append(settled_snapshot())
        mori.shmem.shmem_torch_process_group_init("default")
        Exercise(context, case).run()
    return found


@pytest.mark.parametrize("world_size", [1, 3])
def test_finalize_gives_everything_back(world_size: int):
    with private_pool(world_size) as ranks:  # what other tests leave in a process has memory too
        results = ranks.run(finalize_and_init_again, 12)
    for found in results:
        settled = found[3:]
        assert {resources.descriptors for resources in settled} == {settled[0].descriptors}
        assert {resources.threads for resources in settled} == {settled[0].threads}
        assert all(resources.memory_file_bytes == resources.mappings == 0 for resources in settled)
        assert settled[-1].resident_bytes - settled[0].resident_bytes < RESIDENT_NOISE_BYTES


def input_may_be_deleted(context: RankContext) -> None:
    import mori

    case = small_case(context.world_size)
    op = mori.ops.EpDispatchCombineOp(case.config(context.rank))
    exercise = Exercise(context, case, op=op)
    exercise.run()
    for _ in range(20):
        op.dispatch(*arguments(case, context.rank))
        gc.collect()
        _ = [torch.full((12, 96), 7.0) for _ in range(4)]  # takes the place of freed inputs
        exercise.check_dispatch("inputs deleted right after the call")


@pytest.mark.parametrize("world_size", [2])
def test_inputs_may_be_deleted_right_after_the_call(world_size: int):
    pool(world_size).run(input_may_be_deleted)


def heap_of_ops(context: RankContext) -> list[str]:
    """Fills a small heap with ops; the error must leave the heap usable."""
    import mori

    case = Case(context.world_size, 1024, 2, 2, 256, ())
    ops, texts = [], []
    for _ in range(64):
        try:
            ops.append(mori.ops.EpDispatchCombineOp(case.config(context.rank)))
        except mori.HeapExhausted as error:
            texts.append(str(error))
            break
    require(ops, "not even one op fits")
    require(texts, "64 ops of over 3 MB each fit into 16 MB")
    ops.pop()
    gc.collect()
    ops.append(mori.ops.EpDispatchCombineOp(case.config(context.rank)))
    return texts


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_full_heap_is_an_error_on_all_ranks_that_says_what_to_do(world_size: int):
    for texts in pool(world_size, MORI_SHMEM_HEAP_SIZE="16M").run(heap_of_ops):
        assert "MORI_SHMEM_HEAP_SIZE" in texts[0]
        assert str(16 << 20) in texts[0].replace(",", "")
