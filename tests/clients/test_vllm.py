"""The call forms of vLLM: all by keyword, positional, whole calls and halves whose bound methods are hooks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.clients.callers import WORLD_SIZE, check_received, check_result, kernel_type, new_op, on_ranks
from tests.clients.layer import Layer, Wire
from tests.rank_worker import RankContext

FP8, FP4 = torch.float8_e4m3fn, torch.float4_e2m1fn_x2
HIDDEN = 256
WIRES = {
    "bf16": Wire(),
    "fp8, scale per 128 values": Wire(FP8, 128),
    "fp8, scale per token": Wire(FP8, HIDDEN),
    "fp8 fnuz, scale per token": Wire(torch.float8_e4m3fnuz, HIDDEN),
    "fp4, e8m0 scale per 32 values": Wire(FP4, 32, torch.float8_e8m0fnu),
}
# kernel: block_num, warp_num_per_block, rdma_block_num
GEOMETRY = {
    "IntraNode": (80, 16, 0),
    "InterNodeV1": (32, 16, 16),
    "InterNodeV1LL": (64, 8, 32),
    "AsyncLL": (64, 8, 32),
}


def make_op(layer: Layer, context: RankContext, kernel: str = "IntraNode") -> Any:
    block_num, warps, rdma_blocks = GEOMETRY[kernel]
    return new_op(
        layer,
        context,
        warp_num_per_block=warps,
        block_num=block_num,
        kernel_type=kernel_type(kernel),
        rdma_block_num=rdma_blocks,
        gpu_per_node=min(8, layer.world_size),
    )


def experts(layer: Layer, rank: int, views: tuple) -> torch.Tensor:
    """The expert kernel gets whole views and the count on the device; it reads no count on the host."""
    rows, weights, scales, ids, _ = views
    return layer.experts(rank, rows, scales, weights, ids)


def by_keyword(op: Any, layer: Layer, rank: int) -> torch.Tensor:
    """The older caller. Its combine gets the weights of the sender: n rows, not one per received row."""
    a1, scale, topk_weights, topk_ids = layer.rows[rank], layer.scales[rank], layer.weights[rank], layer.ids[rank]
    views = op.dispatch(input=a1, weights=topk_weights, scales=scale, indices=topk_ids)
    check_received(layer, rank, views)
    result = op.combine(input=experts(layer, rank, views), weights=topk_weights, indices=topk_ids)[0]
    return result[: len(a1)].clone()


def positional(op: Any, layer: Layer, rank: int) -> torch.Tensor:
    a1, scale, topk_weights, topk_ids = layer.rows[rank], layer.scales[rank], layer.weights[rank], layer.ids[rank]
    dispatch_a1, dispatch_weights, dispatch_scale, dispatch_ids, recv_token_num = op.dispatch(
        a1, topk_weights, scale, topk_ids
    )
    views = (dispatch_a1, dispatch_weights, dispatch_scale, dispatch_ids, recv_token_num)
    check_received(layer, rank, views)
    result = op.combine(experts(layer, rank, views), None, topk_ids)[0]
    output = torch.empty(len(a1), layer.hidden, dtype=layer.returned)
    output.copy_(result[: len(a1)])
    return output


FORMS: dict[str, Callable[[Any, Layer, int], torch.Tensor]] = {"by keyword": by_keyword, "positional": positional}


def run_layers(context: RankContext, form: str, kernel: str, layers: list[Layer]) -> None:
    op = make_op(layers[0], context, kernel)
    for layer in layers:
        check_result(layer, context.rank, FORMS[form](op, layer, context.rank))


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("form", FORMS)
def test_forms_and_payloads(form: str, wire: str):
    counts = ([9, 16], [16, 0], [3, 5])
    layers = [Layer(n, wire=WIRES[wire], hidden=HIDDEN, seed=seed) for seed, n in enumerate(counts)]
    on_ranks(run_layers, form, "IntraNode", layers)


@pytest.mark.parametrize("kernel", ["InterNodeV1", "InterNodeV1LL"])
def test_kernel_types_of_several_nodes_on_one(kernel: str):
    layers = [Layer([7, 16], wire=WIRES["fp8, scale per 128 values"], seed=seed) for seed in range(3)]
    on_ranks(run_layers, "positional", kernel, layers)


def sender_weights(context: RankContext, layer: Layer) -> None:
    """Weights given to combine may have fewer rows than were received, or more."""
    op, rank = make_op(layer, context), context.rank
    check_result(layer, rank, by_keyword(op, layer, rank))
    received = layer.routing.received(rank)
    assert received > len(layer.rows[rank]) if rank == 0 else received < len(layer.rows[rank])


def test_weights_of_the_sender_in_combine():
    on_ranks(sender_weights, Layer([5, 12], only_rank=0))


class LowLatency:
    """One op per micro-batch, made when first needed; the receive halves are handed out as hooks."""

    def __init__(self, layer: Layer, context: RankContext) -> None:
        self._make_op = lambda: make_op(layer, context, "AsyncLL")
        self._ops: dict[int, Any] = {}

    def op(self, micro_batch: int) -> Any:
        if micro_batch not in self._ops:
            self._ops[micro_batch] = self._make_op()
        return self._ops[micro_batch]

    def prepare(self, layer: Layer, rank: int, topk_ids: torch.Tensor, micro_batch: int) -> tuple[tuple, Callable]:
        op = self.op(micro_batch)
        out = op.dispatch_send(layer.rows[rank], layer.weights[rank], layer.scales[rank], topk_ids)
        return out, op.dispatch_recv

    def finalize(self, fused: torch.Tensor, topk_ids: torch.Tensor, micro_batch: int) -> tuple[torch.Tensor, Callable]:
        op = self.op(micro_batch)
        return op.combine_send(fused, None, topk_ids)[0], op.combine_recv


def overlap(context: RankContext, batches: list[Layer], rounds: int) -> None:
    rank, caller = context.rank, LowLatency(batches[0], context)
    # Logical to physical ids: a tensor of its own in every call, also for combine.
    physical = torch.arange(WORLD_SIZE * batches[0].experts_per_rank, dtype=torch.int32)
    for _ in range(rounds):
        sent = [caller.prepare(layer, rank, physical[layer.ids[rank]], n) for n, layer in enumerate(batches)]
        returned = []
        for number, (layer, (views, hook)) in enumerate(zip(batches, sent, strict=True)):
            assert hook() is None
            check_received(layer, rank, views)
            returned.append(caller.finalize(experts(layer, rank, views), physical[layer.ids[rank]], number))
        for layer, (result, hook) in zip(batches, returned, strict=True):
            assert hook() is None
            check_result(layer, rank, result[: len(layer.rows[rank])])


@pytest.mark.parametrize("wire", ["bf16", "fp8, scale per 128 values", "fp4, e8m0 scale per 32 values"])
def test_halves_of_two_micro_batches_overlap(wire: str):
    batches = [Layer(n, wire=WIRES[wire], seed=seed) for seed, n in enumerate(([9, 16], [0, 5]))]
    on_ranks(overlap, batches, 3)


def outputs_stay(context: RankContext, layers: list[Layer]) -> None:
    """Addresses are fixed, so graphs may keep them; the count is int32 [1] on the device."""
    op, rank = make_op(layers[0], context), context.rank
    addresses = set()
    for layer in layers:
        views = op.dispatch(layer.rows[rank], layer.weights[rank], layer.scales[rank], layer.ids[rank])
        result = op.combine(experts(layer, rank, views), None, layer.ids[rank])[0]
        addresses.add(tuple(tensor.data_ptr() for tensor in (*views, result)))
        assert result.shape[0] == layer.max_tokens
    assert len(addresses) == 1, addresses


def test_outputs_have_fixed_addresses():
    wire = WIRES["fp8, scale per 128 values"]
    on_ranks(outputs_stay, [Layer(n, wire=wire, seed=n[0]) for n in ([1, 16], [16, 2], [0, 0])])
