"""Receive caps: exactly reached, not reached, and passed by one row. W is the world, M the tokens per rank.

Routing is `spread`, one expert of every rank for each token: every rank receives every token. The releases' tests stop
at caps of W x M, which cap nothing; the lower half of the table goes below.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.python.ops.check import own_tensors, play
from tests.python.ops.data import Data, new_op
from tests.python.ops.harness import ranks_of, world_size
from tests.python.ops.points import Point
from tests.rank_worker import RankContext
from tests.v1.exercise import require

# (M, cap / W); 0: no cap
CAPS_OF_RELEASES = ((32, 0), (32, 32), (1, 16), (16, 16))
CAPS_BELOW = ((32, 31), (32, 16), (32, 1), (16, 5))
KERNELS = ("IntraNode", "InterNodeV1", "InterNodeV1LL", "AsyncLL")


def capped_rounds(context: RankContext, point: Point, share: int, missing: int) -> None:
    """Every rank sends its share of the cap, less `missing` tokens; twice, with other data."""
    world = context.world_size
    point = replace(point, topk=world)
    op = new_op(context, point, max_total_recv_tokens=share * world)
    largest = min(share, point.max_tokens) if share else point.max_tokens
    require(op.max_num_tokens_to_recv() == largest * world, f"R is {op.max_num_tokens_to_recv()}")
    for number in range(2):
        data = Data(point, world, number, [max(largest - missing, 0)] * world, spread=True)
        require(data.routing.received(context.rank) == max(largest - missing, 0) * world, "the routing is not spread")
        views = play(context, op, data)
        require(views[0].shape[0] == largest * world, "the views are not those of the cap")


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("caps", CAPS_OF_RELEASES + CAPS_BELOW, ids=lambda caps: f"M={caps[0]}, cap={caps[1]}W")
@pytest.mark.parametrize("missing", [0, 1], ids=["at the cap", "below the cap"])
def test_up_to_the_cap(kernel: str, caps: tuple[int, int], missing: int):
    ranks_of().run(capped_rounds, Point(kernel=kernel, hidden=4096, max_tokens=caps[0]), caps[1], missing)


def overflow(context: RankContext, point: Point, share: int) -> str:
    """One rank sends one token too many; the op serves the rounds before and after."""
    import mori

    world = context.world_size
    point = replace(point, topk=world)
    op = new_op(context, point, max_total_recv_tokens=share * world)
    fits = Data(point, world, 0, [share] * world, spread=True)
    too_many = Data(point, world, 1, [share] * (world - 1) + [share + 1], spread=True)
    play(context, op, fits)
    with pytest.raises(mori.ReceiveOverflow) as caught:
        op.dispatch_send(*own_tensors(too_many, context))
        op.dispatch_recv()
        op.check()
    play(context, op, fits)
    return str(caught.value)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("caps", CAPS_BELOW[1:], ids=lambda caps: f"M={caps[0]}, cap={caps[1]}W")
def test_one_row_above_the_cap(kernel: str, caps: tuple[int, int]):
    """On CPUs the call itself raises, on GPUs check(): on every rank."""
    (tokens, share), world = caps, world_size()
    for text in ranks_of().run(overflow, Point(kernel=kernel, hidden=4096, max_tokens=tokens), share):
        assert f"{world * share + 1}" in text and f"{world * share}" in text and "max_total_recv_tokens" in text
