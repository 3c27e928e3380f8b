"""The call forms of Primus-Turbo: autograd functions, and combine with the ids that dispatch returned."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.clients.callers import check_received, known_fields, on_ranks
from tests.clients.layer import Layer, Wire
from tests.rank_worker import RankContext

F32 = torch.float32
LAYERS = [Layer(n, wire=Wire(F32), returned=F32, hidden=64, seed=n[0]) for n in ([9, 16], [16, 2], [4, 4])]
QUEUE_PAIRS = "PRIMUS_TURBO_MORI_NUM_QP"


def make_op(layer: Layer, context: RankContext) -> Any:
    import os

    import mori

    try:
        from mori.jit.hip_driver import _hip  # noqa: F401
    except ImportError:  # which the client takes for "not on an AMD GPU"
        pass
    wanted = layer.config_fields(
        context.rank,
        scale_dim=0,
        scale_type_size=0,
        gpu_per_node=context.world_size,
        num_qp_per_pe=int(os.environ.get(QUEUE_PAIRS, "2")),
        field_of_another_release="",
    )
    return mori.ops.EpDispatchCombineOp(mori.ops.EpDispatchCombineConfig(**known_fields(wanted)))


class Dispatch(torch.autograd.Function):
    """Backward of dispatch is combine: it adds up the gradients of a token's copies, and those of its weights."""

    @staticmethod
    def forward(ctx: Any, op: Any, passes_received_ids: bool, x: torch.Tensor, weights: torch.Tensor, ids: Any) -> Any:
        rows, row_weights, _, row_ids, count = op.dispatch(x, weights, None, ids)
        received = int(count)
        ctx.op, ctx.tokens = op, len(x)
        ctx.save_for_backward(row_ids[:received].clone() if passes_received_ids else ids)
        return rows[:received].clone(), row_weights[:received].clone(), row_ids[:received].clone()

    @staticmethod
    def backward(ctx: Any, grad_rows: torch.Tensor, grad_weights: torch.Tensor, _: Any) -> Any:
        [ids] = ctx.saved_tensors
        grad_x, grad_w = ctx.op.combine(grad_rows.contiguous(), grad_weights.contiguous(), ids)
        return None, None, grad_x[: ctx.tokens].clone(), grad_w[: ctx.tokens].clone(), None


class Combine(torch.autograd.Function):
    """Backward of combine is dispatch: rows of the gradient arrive in the order of the rows that were returned."""

    @staticmethod
    def forward(ctx: Any, op: Any, passes_received_ids: bool, rows: torch.Tensor, ids: Any, row_ids: Any) -> Any:
        ctx.op, ctx.received = op, len(rows)
        ctx.save_for_backward(ids)
        return op.combine(rows, None, row_ids if passes_received_ids else ids)[0][: len(ids)].clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        [ids] = ctx.saved_tensors
        rows, *_, count = ctx.op.dispatch(grad.contiguous(), None, None, ids)
        assert int(count) == ctx.received
        return None, None, rows[: ctx.received].clone(), None, None


def step(op: Any, layer: Layer, rank: int, passes_received_ids: bool) -> tuple[torch.Tensor, ...]:
    """Result and gradients of one layer, for a loss whose gradient is the layer's own input."""
    x, weights, ids = layer.rows[rank].clone(), layer.weights[rank].clone(), layer.ids[rank]
    x.requires_grad_()
    weights.requires_grad_()
    rows, row_weights, row_ids = Dispatch.apply(op, passes_received_ids, x, weights, ids)
    answers = rows * layer.factors(rank, row_weights, row_ids)[:, None]
    out = Combine.apply(op, passes_received_ids, answers, ids, row_ids)
    out.backward(layer.rows[rank])
    return out.detach(), x.grad, weights.grad


def expected(layer: Layer, rank: int) -> tuple[torch.Tensor, ...]:
    """The same without communication: expert e multiplies by 1 + its local number. All values are exact."""
    x, weights, ids = layer.rows[rank], layer.weights[rank], layer.ids[rank]
    numbers = 1.0 + ids % layer.experts_per_rank
    factor = (weights * numbers).sum(dim=1)
    return x * factor[:, None], x * factor[:, None], (x * x).sum(dim=1)[:, None] * numbers


def train(context: RankContext, passes_received_ids: bool) -> None:
    op = make_op(LAYERS[0], context)
    for _ in range(2):
        for layer in LAYERS:
            got = step(op, layer, context.rank, passes_received_ids)
            wanted = expected(layer, context.rank)
            for what, actual, right in zip(("result", "grad of x", "grad of weights"), got, wanted, strict=True):
                assert torch.equal(actual, right), f"{what} of rank {context.rank} is wrong"


def test_autograd_with_the_ids_of_the_sender():
    on_ranks(train, False)


def test_received_ids_in_lenient_mode():
    on_ranks(train, True, MORI_EP_LENIENT_INDICES="1")


def received_ids(context: RankContext) -> str:
    op, layer, rank = make_op(LAYERS[0], context), LAYERS[0], context.rank
    views = op.dispatch(layer.rows[rank], layer.weights[rank], None, layer.ids[rank])
    check_received(layer, rank, views)
    with pytest.raises(ValueError) as caught:
        op.combine(views[0], None, views[3])
    op.combine(views[0], None, layer.ids[rank])  # the same op, the right ids
    return f"{layer.max_tokens * layer.world_size} {len(layer.rows[rank])} {caught.value}"


def test_received_ids_are_refused_by_default():
    for line in on_ranks(received_ids):
        received, dispatched, text = line.split(" ", 2)
        assert f"{received} rows" in text and f"dispatched {dispatched} tokens" in text
        assert "MORI_EP_LENIENT_INDICES=1" in text


def test_queue_pairs_from_its_environment():
    on_ranks(train, False, **{QUEUE_PAIRS: "4"})
