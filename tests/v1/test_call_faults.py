"""Faults of a single call: every rank raises the same, and the op goes on."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.rank_worker import RankContext
from tests.ranks import pool
from tests.v1.cases import Case, Step, routing
from tests.v1.exercise import Exercise, exercise, require


def good_case(world_size: int, receive_cap: int = 0) -> Case:
    spread = routing("spread", [2] * world_size, world_size, 2)
    steps = (Step("dispatch", spread), Step("combine"), Step("dispatch", spread), Step("combine", external=False))
    return Case(world_size, 16, world_size, 2, 6, steps, receive_cap=receive_cap, values="bits")


def overflow(context: RankContext, case: Case, flooded: int) -> list[str]:
    import mori

    op = mori.ops.EpDispatchCombineOp(case.config(context.rank))
    Exercise(context, case, op=op).run()
    texts = []
    ids = torch.full((6, case.topk), flooded * case.experts_per_rank, dtype=torch.int32)
    rows = torch.ones(6, case.hidden, dtype=torch.bfloat16)
    for attempt in range(2):
        try:
            op.dispatch(rows, None, None, ids)
        except mori.errors.ReceiveOverflow as error:
            texts.append(str(error))
            require(isinstance(error, mori.errors.CallFault), "an overflow is a fault of one call")
        else:
            raise AssertionError(f"attempt {attempt}: no overflow was raised")
        op._plan.check()
        require(op._plan.received == 0, f"{op._plan.received} rows were received all the same")
        # The call counts like any other: its combine is legal and gives zeros.
        out, _ = op.combine(torch.ones(0, case.hidden, dtype=torch.bfloat16), None, ids)
        require(not out[:6].view(torch.int16).any(), "combine after an overflow is not zero")
        Exercise(context, case, op=op).run()
    return texts


@pytest.mark.parametrize("world_size", [2, 3, 8])
@pytest.mark.parametrize("flooded", [0, -1])
def test_receive_overflow_raises_on_all_ranks_with_both_numbers(world_size: int, flooded: int):
    cap, needed = 2 * world_size, 6 * world_size
    results = pool(world_size).run(overflow, good_case(world_size, cap), flooded % world_size)
    for texts in results:
        assert len(texts) == 2
        for text in texts:
            assert str(cap) in text and str(needed) in text and "max_total_recv_tokens" in text
        assert texts == results[0]


def exactly_the_cap(context: RankContext, case: Case) -> None:
    """The last row that fits, and one more."""
    import mori

    op = mori.ops.EpDispatchCombineOp(case.config(context.rank))
    capacity = op.max_num_tokens_to_recv()
    for excess in (0, 1, 0):
        mine = 6 if context.rank else capacity - 6 * (context.world_size - 1) + excess
        ids = torch.zeros(mine, case.topk, dtype=torch.int32)
        rows = torch.full((mine, case.hidden), 1.0 + context.rank, dtype=torch.bfloat16)
        try:
            received, *_, count = op.dispatch(rows, None, None, ids)
        except mori.errors.ReceiveOverflow:
            require(excess, "an overflow was raised although the rows fit")
            continue
        require(not excess, "no overflow although one row too many was sent")
        require(int(count) == (0 if context.rank else capacity), f"received {int(count)}")
        if context.rank == 0:
            require(float(received[capacity - 1, 0]) == context.world_size, "the last row is not the last rank's")


@pytest.mark.parametrize("world_size", [2, 3])
def test_the_cap_itself_is_no_overflow(world_size: int):
    case = replace(good_case(world_size), receive_cap=6 * world_size - world_size, max_tokens=6)
    pool(world_size).run(exactly_the_cap, case)


MISMATCHES = {
    "fp8 flavours": (torch.float8_e4m3fn, torch.float8_e4m3fnuz, 16, 16),
    "row sizes": (torch.bfloat16, torch.bfloat16, 16, 8),
    "dtypes of equal size": (torch.float8_e4m3fn, torch.float4_e2m1fn_x2, 16, 16),
    "dtype and size": (torch.bfloat16, torch.float8_e4m3fn, 16, 16),
}


def mismatch(context: RankContext, name: str) -> str:
    import mori

    first, second, wide, narrow = MISMATCHES[name]
    case = good_case(context.world_size)
    op = mori.ops.EpDispatchCombineOp(case.config(context.rank))
    odd_one_out = context.rank == context.world_size - 1
    dtype, hidden = (second, narrow) if odd_one_out else (first, wide)
    rows = torch.zeros(3, hidden * dtype.itemsize, dtype=torch.uint8).view(dtype)
    ids = torch.zeros(3, case.topk, dtype=torch.int32)
    Exercise(context, case, op=op).run()
    try:
        op.dispatch(rows, None, None, ids)
    except mori.errors.RowMismatch as error:
        text = str(error)
    else:
        raise AssertionError("ranks that send different rows got no error")
    Exercise(context, case, op=op).run()
    return text


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("name", MISMATCHES)
def test_ranks_that_send_different_rows_all_raise(world_size: int, name: str):
    first, second, wide, narrow = MISMATCHES[name]
    for text in pool(world_size).run(mismatch, name):
        if first != second:
            assert str(first).split(".")[1] in text and str(second).split(".")[1] in text
        if wide * first.itemsize != narrow * second.itemsize:
            assert str(wide * first.itemsize) in text and str(narrow * second.itemsize) in text


def combine_mismatch(context: RankContext) -> str:
    import mori

    case = replace(good_case(context.world_size), combine_dtype=torch.float32)
    op = mori.ops.EpDispatchCombineOp(case.config(context.rank))
    ids = torch.zeros(3, case.topk, dtype=torch.int32)
    received = op.dispatch(torch.ones(3, 16, dtype=torch.bfloat16), None, None, ids)[0]
    answer = received.float() if context.rank else received
    try:
        op.combine(answer, None, ids)
    except mori.errors.RowMismatch as error:
        text = str(error)
    else:
        raise AssertionError("ranks that return different rows got no error")
    out, _ = op.combine(received, None, ids)
    require(bool((out[:3] == 1).all()), "the same dispatch can be combined again")
    Exercise(context, case, op=op).run()
    return text


@pytest.mark.parametrize("world_size", [2, 4])
def test_ranks_that_return_different_rows_all_raise(world_size: int):
    for text in pool(world_size).run(combine_mismatch):
        assert "float32" in text and "bfloat16" in text


@pytest.mark.parametrize("world_size", [2])
def test_good_case_itself(world_size: int):
    pool(world_size).run(exercise, good_case(world_size))
