"""Memory on GPUs: views that outlive op and shmem, ops that leave nothing behind, heaps and configs that do not fit."""

from __future__ import annotations

import gc

import pytest
import torch

from tests.gpu.bridge import exercise_on_device, new_exercise
from tests.gpu.ranks import GpuPool, device_of, gpu_pool, synchronize
from tests.rank_worker import RankContext
from tests.v1.cases import Case
from tests.v1.exercise import require, require_same_bits
from tests.v1.test_configuration import BASE, DISAGREEMENTS
from tests.v1.test_lifetime import small_case

pytestmark = pytest.mark.gpu


def views_outlive(context: RankContext) -> None:
    import mori

    case = small_case(context.world_size)
    exercise = new_exercise(context, case)
    exercise.run()
    held, expected = {"views": exercise.views}, exercise.expected
    buffer = exercise.op.get_registered_combine_input_buffer(torch.bfloat16)  # type: ignore[attr-defined]
    del exercise
    gc.collect()

    def check(when: str) -> None:
        views, total = held["views"], len(expected.rows)
        require(int(views[4]) == total, f"{when}: the count changed")
        require_same_bits(views[0][:total], expected.rows, f"{when}: rows")
        require_same_bits(views[1][:total], expected.weights, f"{when}: weights")
        require_same_bits(views[2][:total], expected.scales, f"{when}: scales")
        require_same_bits(views[3][:total], expected.indices, f"{when}: indices")

    check("after the op is gone")
    exercise_on_device(context, case)
    check("after another op was built and used")
    mori.shmem.shmem_finalize()
    check("after finalize")
    buffer.fill_(1.0)
    synchronize()
    require(float(buffer.float().sum()) == buffer.numel(), "the buffer is no longer ordinary memory")
    held.clear()
    del buffer
    gc.collect()
    context.barrier()
    mori.shmem.shmem_torch_process_group_init("default")
    exercise_on_device(context, case)


def test_views_outlive_op_and_communicator(gpus: GpuPool):
    gpus.run(views_outlive)
    gpus.renew()


def many_ops(context: RankContext, cycles: int) -> tuple[int, set[int]]:
    """Bytes of device memory that the later cycles took, and the addresses they used."""
    case = small_case(context.world_size)

    def one_cycle() -> int:
        exercise = new_exercise(context, case)
        exercise.run()
        return exercise.op.get_registered_combine_input_buffer(torch.bfloat16).data_ptr()  # type: ignore[attr-defined]

    for _ in range(5):
        one_cycle()
    torch.cuda.synchronize()
    context.barrier()
    before = torch.cuda.mem_get_info()[0]
    addresses = {one_cycle() for _ in range(cycles)}
    torch.cuda.synchronize()
    context.barrier()
    return before - torch.cuda.mem_get_info()[0], addresses


def test_fifty_ops_leave_nothing_behind(gpus: GpuPool):
    for taken, addresses in gpus.run(many_ops, 50):
        assert taken <= 4 << 20
        assert len(addresses) <= 2  # the freed memory is used again


def finalize_and_init_again(context: RankContext, cycles: int) -> list[int]:
    """Free device memory after each finalize."""
    import mori

    case = small_case(context.world_size)
    free = []
    for _ in range(cycles):
        mori.shmem.shmem_finalize()
        gc.collect()
        torch.cuda.synchronize()
        context.barrier()
        free.append(torch.cuda.mem_get_info()[0])
        context.barrier()
        mori.shmem.shmem_torch_process_group_init("default")
        exercise_on_device(context, case)
    return free


def test_finalize_gives_device_memory_back(gpus: GpuPool):
    for free in gpus.run(finalize_and_init_again, 6):
        assert free[2] - free[-1] <= 4 << 20, free
    gpus.renew()


def heap_of_ops(context: RankContext) -> list[str]:
    import mori

    case = Case(context.world_size, 1024, 2, 2, 256, ())
    ops, texts = [], []
    for _ in range(64):
        try:
            ops.append(mori.ops.EpDispatchCombineOp(case.config(context.rank)))
        except mori.HeapExhausted as error:
            texts.append(str(error))
            break
    require(ops and texts, f"{len(ops)} ops of over 3 MB each were built in 16 MB")
    ops.clear()
    gc.collect()
    exercise_on_device(context, small_case(context.world_size))
    return texts


def test_a_full_heap_is_an_error_on_all_ranks_that_says_what_to_do():
    for texts in gpu_pool(MORI_SHMEM_HEAP_SIZE="16M").run(heap_of_ops):
        assert "MORI_SHMEM_HEAP_SIZE" in texts[0]
        assert str(16 << 20) in texts[0].replace(",", "")


def disagree(context: RankContext, field: str, values: tuple) -> str:
    import mori

    config = {"world_size": context.world_size, field: values[context.rank % 2]}
    case = Case(**(BASE.__dict__ | {"world_size": context.world_size}))
    try:
        mori.ops.EpDispatchCombineOp(case.config(context.rank, **config))
    except mori.ConfigMismatch as error:
        text = str(error)
    else:
        raise AssertionError(f"an op was built although ranks disagree on {field}")
    exercise_on_device(context, small_case(context.world_size))
    return text


@pytest.mark.parametrize("field", DISAGREEMENTS)
def test_ranks_that_disagree_all_raise(gpus: GpuPool, field: str):
    values = DISAGREEMENTS[field]
    for text in gpus.run(disagree, field, values):
        assert field in text and all(str(value) in text for value in values)


def wrong_device(context: RankContext) -> None:
    import mori

    case = small_case(context.world_size)
    op = mori.ops.EpDispatchCombineOp(case.config(context.rank))
    ids = torch.zeros(2, case.topk, dtype=torch.int32)
    rows = torch.ones(2, case.hidden, dtype=torch.bfloat16)
    neighbour = torch.device("cuda", (context.rank + 1) % context.world_size)
    mine = device_of(context)
    for bad_rows, bad_ids in ((rows, ids), (rows.to(mine), ids), (rows.to(neighbour), ids.to(mine))):
        with pytest.raises(ValueError, match="input|indices"):
            op.dispatch(bad_rows, None, None, bad_ids)
    exercise_on_device(context, case)


def test_tensors_of_another_device_are_refused(gpus: GpuPool):
    gpus.run(wrong_device)
