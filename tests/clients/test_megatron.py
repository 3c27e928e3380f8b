"""The call forms of the Megatron fork: routing handles saved for the backward pass, one op for all layers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.clients.callers import check_received, check_result, kernel_type, new_op, on_ranks
from tests.clients.layer import Layer, Wire
from tests.rank_worker import RankContext

F32 = torch.float32
WIRE = {"wire": Wire(F32), "returned": F32, "hidden": 64}
BALANCED = [Layer(n, seed=n[0], **WIRE) for n in ([9, 16], [16, 2], [4, 4])]  # type: ignore[arg-type]
ONE_SIDED = [Layer([5, 7], only_rank=0, **WIRE), Layer([5, 7], **WIRE)]  # type: ignore[arg-type]
KERNELS = {"IntraNode": {}, "InterNodeV1": {"gpu_per_node": 2, "block_num": 96, "rdma_block_num": 64}}


def rebase(ids: torch.Tensor, rank: int, experts_per_rank: int) -> torch.Tensor:
    """Global ids as numbers of local experts, -1 for those of other ranks."""
    local = ids - rank * experts_per_rank
    return torch.where((local >= 0) & (local < experts_per_rank), local, -1)


def never_empty(weights: torch.Tensor, topk: int) -> torch.Tensor:
    """Older releases read the weights of a rank that received nothing: the client passes a row of zeros then."""
    return weights if len(weights) else torch.zeros(1, topk)


class Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, op: Any, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, handles: list) -> Any:
        rows, row_weights, scales, row_ids, count, handle = op.dispatch(x, weights, None, ids, return_routing=True)
        assert scales is None
        received = int(count)
        handles.append(handle)
        ctx.op, ctx.tokens = op, len(x)
        ctx.save_for_backward(ids, *handle.tensors())
        return rows[:received].clone(), row_weights[:received].clone(), row_ids[:received].clone()

    @staticmethod
    def backward(ctx: Any, grad_rows: torch.Tensor, grad_weights: torch.Tensor, _: Any) -> Any:
        from mori.ops.dispatch_combine import EpDispatchRoutingHandle

        ids, *saved = ctx.saved_tensors
        handle = EpDispatchRoutingHandle.from_tensors(saved, ctx.tokens)
        weights = never_empty(grad_weights.contiguous(), ids.shape[1])
        grad_x, grad_w = ctx.op.combine(grad_rows.contiguous(), weights, ids, routing=handle)
        return None, grad_x[: ctx.tokens].clone(), grad_w[: ctx.tokens].clone(), None, None


class Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, op: Any, rows: torch.Tensor, ids: torch.Tensor, handles: list) -> torch.Tensor:
        [handle] = handles
        ctx.op, ctx.received = op, len(rows)
        ctx.save_for_backward(ids, *handle.tensors())
        weights = never_empty(rows.new_zeros(len(rows), ids.shape[1]), ids.shape[1])
        return op.combine(rows, weights, ids, routing=handle)[0][: len(ids)].clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        from mori.ops.dispatch_combine import EpDispatchRoutingHandle

        ids, *saved = ctx.saved_tensors
        handle = EpDispatchRoutingHandle.from_tensors(saved, len(grad))
        rows, *_, count = ctx.op.dispatch(grad.contiguous(), None, None, ids, routing=handle)
        assert int(count) == ctx.received
        return None, rows[: ctx.received].clone(), None, None


def forward(op: Any, layer: Layer, rank: int, x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    ids, handles = layer.ids[rank], []
    rows, row_weights, row_ids = Dispatch.apply(op, x, weights, ids, handles)
    local = rebase(row_ids, rank, layer.experts_per_rank)
    factors = torch.where(local >= 0, row_weights * (1 + local), 0.0).sum(dim=1)
    return Combine.apply(op, rows * factors[:, None], ids, handles)


def train(context: RankContext, kernel: str, layers: list[Layer]) -> None:
    """All forward passes, then the backward passes in opposite order: every handle outlives other layers' calls."""
    rank = context.rank
    op = new_op(layers[0], context, kernel_type=kernel_type(kernel), **KERNELS[kernel])
    for _ in range(2):
        steps = []
        for layer in layers:
            x, weights = layer.rows[rank].clone().requires_grad_(), layer.weights[rank].clone().requires_grad_()
            out = forward(op, layer, rank, x, weights)
            check_result(layer, rank, out.detach())
            steps.append((layer, x, weights, out))
        for layer, x, weights, out in reversed(steps):
            out.backward(layer.rows[rank])
            numbers = 1.0 + layer.ids[rank] % layer.experts_per_rank
            factor = (layer.weights[rank] * numbers).sum(dim=1)
            assert torch.equal(x.grad, layer.rows[rank] * factor[:, None]), "gradient of x"
            expected = (layer.rows[rank] ** 2).sum(dim=1)[:, None] * numbers
            assert torch.equal(weights.grad, expected), "gradient of weights"
        op.reset()


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("layers", [BALANCED, ONE_SIDED], ids=["balanced", "a rank receives nothing"])
def test_training_with_handles(kernel: str, layers: list[Layer]):
    on_ranks(train, kernel, layers)


def six_values(context: RankContext) -> None:
    import mori
    from mori.ops.dispatch_combine import EpDispatchRoutingHandle

    layer, rank = BALANCED[0], context.rank
    op = new_op(layer, context)
    arguments = (layer.rows[rank], layer.weights[rank], None, layer.ids[rank])
    *views, handle = op.dispatch(*arguments, return_routing=True)
    assert len(views) == 5 and isinstance(handle, EpDispatchRoutingHandle)
    check_received(layer, rank, tuple(views))
    assert handle.cur_rank_num_token == len(layer.rows[rank])
    tensors = handle.tensors()
    assert len(tensors) == 5 and all(tensor.dtype == torch.int32 for tensor in tensors)
    assert int(handle.total_recv_token_num) == layer.routing.received(rank)
    with pytest.raises(ValueError):
        op.dispatch(*arguments, routing=handle, return_routing=True)
    fewer = tuple(None if each is None else each[:-1] for each in arguments)
    with pytest.raises(ValueError, match=str(len(layer.rows[rank]))):
        op.dispatch(*fewer, routing=handle)
    assert mori.shmem.shmem_npes() == context.world_size
    check_received(layer, rank, op.dispatch(*arguments, routing=handle))


def test_six_values_and_what_a_handle_refuses():
    on_ranks(six_values)


def other_kernel_types(context: RankContext, kernel: str) -> None:
    layer, rank = BALANCED[0], context.rank
    op = new_op(layer, context, kernel_type=kernel_type(kernel), gpu_per_node=2)
    with pytest.raises(NotImplementedError, match="routing"):
        op.dispatch(layer.rows[rank], layer.weights[rank], None, layer.ids[rank], return_routing=True)


@pytest.mark.parametrize("kernel", ["InterNode", "AsyncLL"])
def test_handles_are_refused_where_no_client_uses_them(kernel: str):
    on_ranks(other_kernel_types, kernel)


def received_ids(context: RankContext) -> str:
    """The older revision passes what dispatch returned."""
    layer, rank = BALANCED[0], context.rank
    op = new_op(layer, context)
    rows, _, _, row_ids, count = op.dispatch(layer.rows[rank], layer.weights[rank], None, layer.ids[rank])
    received = int(count)
    with pytest.raises(ValueError) as caught:
        op.combine(rows[:received], None, row_ids[:received])
    return str(caught.value)


def test_received_ids_of_the_older_revision_are_refused():
    for text in on_ranks(received_ids):
        assert "MORI_EP_LENIENT_INDICES=1" in text
