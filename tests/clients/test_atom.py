"""The call forms of ATOM: launch sizes by position, and two micro-batches that share one AsyncLL op."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.clients.callers import check_received, check_result, kernel_type, new_op, on_ranks
from tests.clients.layer import Layer, Wire
from tests.rank_worker import RankContext

PREFILL, DECODE = (128, 16), (64, 4)
WIRES = {"fp8": Wire(torch.float8_e4m3fn, 128), "fp4": Wire(torch.float4_e2m1fn_x2, 32, torch.float8_e8m0fnu)}
MICRO_BATCHES = [Layer([9, 16], wire=WIRES["fp8"], seed=1), Layer([3, 0], wire=WIRES["fp8"], seed=2)]


def uses_halves(op: Any) -> bool:
    """As the client asks: older releases had neither the attribute nor the member."""
    from mori.ops import EpDispatchCombineKernelType as KernelType

    return hasattr(KernelType, "AsyncLL") and op.config.kernel_type is KernelType.AsyncLL


def arguments(layer: Layer, rank: int) -> tuple:
    return layer.rows[rank], layer.weights[rank], layer.scales[rank], layer.ids[rank]


def answer(layer: Layer, rank: int, views: tuple) -> torch.Tensor:
    rows, weights, scales, ids, _ = views
    return layer.experts(rank, rows, scales, weights, ids)


def positional(context: RankContext, layer: Layer, block_num: int, warp_per_block: int) -> dict[str, tuple]:
    op, rank = new_op(layer, context), context.rank
    assert not uses_halves(op)
    views = op.dispatch(*arguments(layer, rank), block_num, warp_per_block)
    check_received(layer, rank, views)
    result = op.combine(answer(layer, rank, views), None, layer.ids[rank], block_num, warp_per_block)[0]
    check_result(layer, rank, result)
    return {"dispatch": tuple(op._cached_dispatch_launch), "combine": tuple(op._cached_combine_launch)}


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("sizes", [PREFILL, DECODE], ids=["prefill", "decode"])
def test_launch_sizes_by_position(sizes: tuple[int, int], wire: str):
    """The sixth argument is rdma_block_num: the client's warps land there, and the config's 8 stay."""
    block_num, warps = sizes
    for launches in on_ranks(positional, Layer([9, 16], wire=WIRES[wire]), block_num, warps):
        assert launches == dict.fromkeys(("dispatch", "combine"), (block_num, warps, 8))


def test_launch_sizes_by_position_in_auto_mode():
    """The client sets AUTO between nodes: then its numbers do not count."""
    for launches in on_ranks(positional, MICRO_BATCHES[0], *DECODE, MORI_EP_LAUNCH_CONFIG_MODE="AUTO"):
        assert launches == dict.fromkeys(("dispatch", "combine"), (128, 0, 16))


def one_batch_after_the_other(context: RankContext) -> None:
    rank = context.rank
    op = new_op(MICRO_BATCHES[0], context, kernel_type=kernel_type("AsyncLL"), gpu_per_node=2)
    assert uses_halves(op)
    for layer in MICRO_BATCHES:
        views = op.dispatch_send(*arguments(layer, rank))
        op.dispatch_recv()
        check_received(layer, rank, views)
        result = op.combine_send(answer(layer, rank, views), None, layer.ids[rank])[0]
        op.combine_recv()
        check_result(layer, rank, result)


def test_micro_batches_that_take_turns_on_one_op():
    on_ranks(one_batch_after_the_other)


def two_in_flight(context: RankContext) -> list[str]:
    """The second send is refused on every rank before it sends; the first one is unharmed."""
    rank, layer = context.rank, MICRO_BATCHES[0]
    op = new_op(layer, context, kernel_type=kernel_type("AsyncLL"), gpu_per_node=2)
    refused = []

    def refuse(send: Any, *given: Any) -> None:
        with pytest.raises(RuntimeError) as caught:
            send(*given)
        refused.append(str(caught.value))

    views = op.dispatch_send(*arguments(layer, rank))
    refuse(op.dispatch_send, *arguments(MICRO_BATCHES[1], rank))
    refuse(op.combine_send, torch.zeros(32, layer.hidden, dtype=layer.returned), None, layer.ids[rank])
    op.dispatch_recv()
    check_received(layer, rank, views)
    result = op.combine_send(answer(layer, rank, views), None, layer.ids[rank])[0]
    refuse(op.combine_send, answer(layer, rank, views), None, layer.ids[rank])
    refuse(op.dispatch_send, *arguments(MICRO_BATCHES[1], rank))
    op.combine_recv()
    check_result(layer, rank, result)
    return refused


def test_two_micro_batches_in_flight_on_one_op_are_refused():
    for refused in on_ranks(two_in_flight):
        assert ["dispatch_recv" in text for text in refused] == [True, True, False, False]
        assert ["combine_recv" in text for text in refused] == [False, False, True, True]
