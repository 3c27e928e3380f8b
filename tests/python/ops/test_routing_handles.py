"""Routing handles: a dispatch with one equals a plain one, a replay brings other rows to the same places."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.python.ops.check import check_dispatch, combine
from tests.python.ops.data import Data, new_op
from tests.python.ops.harness import device_of, ranks_of
from tests.python.ops.points import Point
from tests.rank_worker import RankContext
from tests.v1.exercise import require, require_same_bits

KERNELS = ("IntraNode", "InterNodeV1")


def all_full(kernel: str, world_size: int, number: int) -> Data:
    point = Point(kernel=kernel, hidden=4096, max_tokens=32, experts_per_rank=4, topk=4)
    return Data(point, world_size, number, [32] * world_size)


def sent(data: Data, context: RankContext) -> list[Any]:
    tensors = (data.rows, data.weights, data.scales, data.ids)
    return [None if each[context.rank] is None else each[context.rank].to(device_of(context)) for each in tensors]


def parity(context: RankContext, kernel: str) -> None:
    """With and without a handle: the same views, the same results."""
    data = all_full(kernel, context.world_size, 0)
    op = new_op(context, data.point)
    results = []
    for options in ({}, {"return_routing": True}):
        *views, handle = [*op.dispatch(*sent(data, context), **options), None][:6]
        check_dispatch(op, data, context.rank, tuple(views))
        routing = {} if handle is None else {"routing": handle}
        combine(op, data, context, tuple(views), **routing)
        out, _ = op.combine(views[0], None, sent(data, context)[3], **routing)
        results.append(out.clone())
    require_same_bits(results[1], results[0], "combine with a handle")


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_handle_changes_no_result(kernel: str):
    ranks_of().run(parity, kernel)


def replay(context: RankContext, kernel: str) -> None:
    """Other rows, weights and a call between: the rows arrive where those of the first dispatch were."""
    first, between, other = (all_full(kernel, context.world_size, number) for number in range(3))
    op = new_op(context, first.point)
    *_, handle = op.dispatch(*sent(first, context), return_routing=True)
    before = [tensor.clone() for tensor in handle.tensors()]
    tokens = handle.cur_rank_num_token
    views = op.dispatch(*sent(between, context))
    combine(op, between, context, views)

    other.ids, other.routing = first.ids, first.routing  # its rows, on the way of the first ones
    for _ in range(2):
        views = op.dispatch(*sent(other, context), routing=handle)
        require(int(views[4]) == first.routing.received(context.rank), "the count of a replay")
        check_dispatch(op, other, context.rank, views)
        combine(op, other, context, views, routing=handle)
    for name, now, then in zip(("maps",) * 5, handle.tensors(), before, strict=True):
        require(torch.equal(now, then), f"a replay changed {name} of the handle")
    require(handle.cur_rank_num_token == tokens, "a replay changed the handle's count")


@pytest.mark.parametrize("kernel", KERNELS)
def test_replays_bring_the_new_rows_and_leave_the_handle_alone(kernel: str):
    ranks_of().run(replay, kernel)


def two_layers(context: RankContext, kernel: str) -> None:
    """Two dispatches, then a combine of the first one: its rows, not what the second one left behind."""
    first, second = (all_full(kernel, context.world_size, number) for number in range(2))
    op = new_op(context, first.point)
    *views, handle = op.dispatch(*sent(first, context), return_routing=True)
    kept = [None if view is None else view.clone() for view in views]
    *later, other_handle = op.dispatch(*sent(second, context), return_routing=True)
    later = [None if view is None else view.clone() for view in later]
    for data, held, routing in ((first, kept, handle), (second, later, other_handle), (first, kept, handle)):
        combine(op, data, context, tuple(held), routing=routing)


@pytest.mark.parametrize("kernel", KERNELS)
def test_handles_of_several_layers_do_not_mix(kernel: str):
    ranks_of().run(two_layers, kernel)
