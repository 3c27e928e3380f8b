"""Faults of single calls on GPUs: `check` raises them on every rank alike, and the op goes on."""

from __future__ import annotations

import warnings
from dataclasses import replace

import pytest
import torch

from tests.gpu.bridge import BridgedOp
from tests.gpu.ranks import GpuPool, device_of, gpu_pool
from tests.rank_worker import RankContext
from tests.v1.cases import Case, Step, routing
from tests.v1.exercise import Exercise, require
from tests.v1.test_call_faults import MISMATCHES, good_case

pytestmark = pytest.mark.gpu


def new_op(context: RankContext, case: Case):
    import mori

    return BridgedOp(mori.ops.EpDispatchCombineOp(case.config(context.rank)), device_of(context))


def flood(context: RankContext, op: BridgedOp, case: Case, flooded: int) -> torch.Tensor:
    """All tokens of all ranks go to one, which has no room for them."""
    ids = torch.full((6, case.topk), flooded * case.experts_per_rank, dtype=torch.int32)
    op.dispatch(torch.ones(6, case.hidden, dtype=torch.bfloat16), None, None, ids)
    return ids


def overflow(context: RankContext, case: Case, flooded: int) -> list[str]:
    import mori

    op = new_op(context, case)
    Exercise(context, case, op=op).run()
    texts = []
    for _ in range(2):
        ids = flood(context, op, case, flooded)
        try:
            op.check()
        except mori.ReceiveOverflow as error:
            texts.append(str(error))
        op.check()  # a fault is told once
        require(op._plan.received == 0, f"{op._plan.received} rows were received all the same")
        out, _ = op.combine(torch.ones(0, case.hidden, dtype=torch.bfloat16), None, ids)
        require(not out[:6].view(torch.int16).any(), "combine after an overflow is not zero")
        Exercise(context, case, op=op).run()
    return texts


@pytest.mark.parametrize("flooded", [0, -1])
def test_receive_overflow_raises_on_all_ranks_with_both_numbers(gpus: GpuPool, flooded: int):
    world = gpus.world_size
    results = gpus.run(overflow, good_case(world, 2 * world), flooded % world)
    for texts in results:
        assert len(texts) == 2
        for text in texts:
            assert str(2 * world) in text and str(6 * world) in text and "max_total_recv_tokens" in text
        assert texts == results[0]


def warned(context: RankContext, case: Case) -> list[str]:
    """Nobody asks for the fault; the next calls are launched and say so, once."""
    import mori

    op = new_op(context, case)
    flood(context, op, case, 0)
    torch.cuda.synchronize()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        Exercise(context, case, op=op).run()
    return [str(each.message) for each in caught if issubclass(each.category, mori.CallFaultWarning)]


def test_a_fault_that_nobody_asked_for_is_warned_of_once(gpus: GpuPool):
    for texts in gpus.run(warned, good_case(gpus.world_size, 2 * gpus.world_size)):
        assert len(texts) == 1 and "check" in texts[0]


def raised_by_the_call(context: RankContext, case: Case) -> str:
    import mori

    op = new_op(context, case)
    try:
        flood(context, op, case, 0)
    except mori.ReceiveOverflow as error:
        text = str(error)
    else:
        raise AssertionError("the call itself raised nothing")
    Exercise(context, case, op=op).run()
    return text


def test_calls_raise_their_own_faults_when_asked_to(world: int):
    for text in gpu_pool(MORI_EP_SYNC_ERRORS="1").run(raised_by_the_call, good_case(world, 2 * world)):
        assert "max_total_recv_tokens" in text


def mismatch(context: RankContext, name: str) -> str:
    import mori

    first, second, wide, narrow = MISMATCHES[name]
    case = good_case(context.world_size)
    op = new_op(context, case)
    odd_one_out = context.rank == context.world_size - 1
    dtype, hidden = (second, narrow) if odd_one_out else (first, wide)
    rows = torch.zeros(3, hidden * dtype.itemsize, dtype=torch.uint8).view(dtype)
    op.dispatch(rows, None, None, torch.zeros(3, case.topk, dtype=torch.int32))
    try:
        op.check()
    except mori.RowMismatch as error:
        text = str(error)
    else:
        raise AssertionError("ranks that send different rows got no error")
    Exercise(context, case, op=op).run()
    return text


@pytest.mark.parametrize("name", MISMATCHES)
def test_ranks_that_send_different_rows_all_raise(gpus: GpuPool, name: str):
    first, second, wide, narrow = MISMATCHES[name]
    for text in gpus.run(mismatch, name):
        if first != second:
            assert str(first).split(".")[1] in text and str(second).split(".")[1] in text
        if wide * first.itemsize != narrow * second.itemsize:
            assert str(wide * first.itemsize) in text and str(narrow * second.itemsize) in text


def fault_under_replay(context: RankContext, case: Case) -> str:
    """A captured call overflows in one replay and is good in the next."""
    import mori

    device = device_of(context)
    op = mori.ops.EpDispatchCombineOp(case.config(context.rank))
    rows = torch.ones(6, case.hidden, dtype=torch.bfloat16, device=device)
    ids = torch.zeros(6, case.topk, dtype=torch.int32, device=device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        count = op.dispatch(rows, None, None, ids)[4]
    ids.fill_(-1)
    graph.replay()
    op.check()
    require(int(count) == 0, "rows arrived although no id names an expert")
    ids.fill_(0)
    graph.replay()
    try:
        op.check()
    except mori.ReceiveOverflow as error:
        text = str(error)
    else:
        raise AssertionError("the replay that overflows raised nothing")
    require(int(count) == 0, "the count of a failed dispatch is not 0")
    ids.fill_(-1)
    ids[0] = 0
    graph.replay()
    op.check()
    require(int(count) == (context.world_size if context.rank == 0 else 0), f"then {int(count)} rows arrived")
    return text


def test_a_replay_that_overflows_and_one_that_does_not(gpus: GpuPool):
    case = replace(good_case(gpus.world_size, 2 * gpus.world_size))
    for text in gpus.run(fault_under_replay, case):
        assert "max_total_recv_tokens" in text


def invalid_ids(context: RankContext) -> str:
    """The rank that passes such an id learns of it before anything is sent, and calls again; its peers wait for it."""
    case = Case(context.world_size, 16, 3, 2, 6, (Step("dispatch", routing("any", [6] * context.world_size, 3, 2)),))
    op = new_op(context, case)
    ids = torch.zeros(6, 3, dtype=torch.int32)
    text = ""
    if context.rank == 0:
        ids[4, 1] = 12345
        try:
            op.dispatch(torch.ones(6, 16, dtype=torch.bfloat16), None, None, ids)
        except ValueError as error:
            text = str(error)
    Exercise(context, case, op=op).run()
    op.check()
    return text


def test_validation_names_token_and_column():
    text, *others = gpu_pool(MORI_EP_VALIDATE="1").run(invalid_ids)
    assert "indices[4, 1] is 12345" in text
    assert set(others) == {""}
