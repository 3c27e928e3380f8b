"""Dispatch and combine as functions that torch.autograd differentiates, along routing handles of a v1 op.

Each is the other's transpose. The gradient of a token is the sum of the gradients of its rows: a combine. The gradient
of a row is that of its token: a dispatch the same way again.

Every step backward is a collective call as well. While gradients are recorded, each call here has one on every rank,
whatever requires a gradient there, and also where the experts of a rank had no rows and their result depends on none.
torch takes the steps in the reverse order of the calls, so all ranks must call in the same order, run backward through
the same calls, and run several backward passes in the same order.

n, T, R, h, K: as in `dispatch_combine`. Rows and results are float32 or bfloat16 and own their memory: later calls on
the op do not touch them. An op in use here stays alive as long as a graph refers to it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from mori.errors import UnsupportedDtype

from .dispatch_combine import EpDispatchCombineOp, EpDispatchCombineQuantType
from .routing import EpDispatchRoutingHandle, check_handle

__all__ = ["LinkedRoutingHandle", "combine", "dispatch"]

_DIFFERENTIABLE = (torch.float32, torch.bfloat16)


class LinkedRoutingHandle(EpDispatchRoutingHandle):
    """A routing handle that ties the combines along it to its dispatch in the graph of autograd.

    Their steps backward so lead to that of the dispatch, even if no gradient flows through the experts. `tensors()` and
    `from_tensors` give a handle without the tie.
    """

    link: torch.Tensor


def dispatch(
    op: EpDispatchCombineOp,
    input: torch.Tensor,
    weights: torch.Tensor | None,
    indices: torch.Tensor,
    *,
    handle: EpDispatchRoutingHandle | None = None,
    trim: bool = True,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, LinkedRoutingHandle]:
    """`op.dispatch`, differentiable in `input` and `weights`. Collective, and so is its backward, a combine.

    input: (n, h) float32 or bfloat16. weights: (n, K) float32 or None. indices: (n, K) int32, not to be changed in
    place before backward.
    handle: of an earlier dispatch, to send the rows the same way, as when activations are computed again.
    trim: True: T rows, for which GPUs are waited for. False: R rows, without waiting; those beyond the count are
        zeros with ids -1, and their gradients are ignored.

    Returns rows (T or R, h), weights (T or R, K) float32, global expert ids (T or R, K) int32, the count T as (1,)
    int32 (the handle's own tensor), and the handle to combine along.

    Raises as `op.dispatch`; UnsupportedDtype (a TypeError) for another dtype of rows; NotImplementedError for a kernel
    type without routing handles; ValueError for an op with a quant_type, which would round gradients as well.
    """
    _check("dispatch: input", input, op)
    rows, row_weights, ids, link, made = _Dispatch.apply(_new_link(input), input, weights, op, indices, handle, trim)
    linked = LinkedRoutingHandle(*made.tensors(), made.cur_rank_num_token)  # type: ignore[call-arg]
    linked.link = link
    return rows, row_weights, ids, linked.total_recv_token_num, linked


def combine(
    op: EpDispatchCombineOp,
    rows: torch.Tensor,
    weights: torch.Tensor | None,
    indices: torch.Tensor,
    handle: EpDispatchRoutingHandle,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`op.combine` along a handle, differentiable in `rows` and `weights`. Collective, as its backward, a dispatch.

    rows: (>= T, h) float32 or bfloat16, already multiplied by router weights. weights: None, or float32 with K columns;
    each rank decides. Rows beyond the count are not looked at and get a gradient of zeros.
    indices: the (n, K) ids of the dispatch, not to be changed in place before backward.
    handle: what the dispatch returned whose rows these are. One without a tie, of `op.dispatch` or `from_tensors`, will
        do where the rows themselves depend on the dispatch on every rank.

    Returns the sums (n, h) of the dtype of rows, and of weights (n, K) float32, or None when none were passed.

    Raises as `op.combine`, otherwise as `dispatch`.
    """
    _check("combine: rows", rows, op)
    check_handle(handle, op._limits, op._device)
    link = handle.link if isinstance(handle, LinkedRoutingHandle) else None
    if link is None or not link.requires_grad:
        link = _new_link(rows)
    most = op.max_num_tokens_to_recv()
    weights = None if weights is None else weights[:most]
    out, out_weights = _Combine.apply(link, rows[:most], weights, op, indices, handle)
    return out, out_weights


def _new_link(rows: torch.Tensor) -> torch.Tensor:
    """What gives a call its step backward, whatever else requires a gradient."""
    return torch.zeros(0, device=rows.device, requires_grad=True)


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        link: torch.Tensor,
        input: torch.Tensor,
        weights: torch.Tensor | None,
        op: EpDispatchCombineOp,
        indices: torch.Tensor,
        handle: EpDispatchRoutingHandle | None,
        trim: bool,
    ) -> tuple[Any, ...]:
        if handle is None:
            *views, handle = op.dispatch(input, weights, None, indices, return_routing=True)
        else:
            views = list(op.dispatch(input, weights, None, indices, routing=handle))
        rows, row_weights, _, ids, count = views
        _save(ctx, op, indices, handle)
        ctx.weighted = weights is not None
        if trim:
            received = int(count)
            rows, row_weights, ids = (view[:received].clone() for view in (rows, row_weights, ids))
        else:
            rows, row_weights = (_valid(view, len(view), count) for view in (rows, row_weights))
            ids = _valid(ids, len(ids), count, beyond=-1)
        ctx.mark_non_differentiable(ids)
        return rows, row_weights, ids, link.new_empty(0), handle

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_rows: torch.Tensor, grad_weights: torch.Tensor, *_: Any) -> tuple[Any, ...]:
        indices, handle = _saved(ctx)
        # Weights go back even from a rank that sent none: what it received are those of other ranks.
        grad, grad_sent = _sums(ctx.op, grad_rows.contiguous(), grad_weights.contiguous(), indices, handle)
        return None, grad, grad_sent if ctx.weighted else None, None, None, None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        link: torch.Tensor,
        rows: torch.Tensor,
        weights: torch.Tensor | None,
        op: EpDispatchCombineOp,
        indices: torch.Tensor,
        handle: EpDispatchRoutingHandle,
    ) -> tuple[torch.Tensor | None, ...]:
        _save(ctx, op, indices, handle)
        ctx.rows, ctx.weight_rows = len(rows), None if weights is None else len(weights)
        return tuple(_sums(op, rows, weights, indices, handle))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor, grad_weights: torch.Tensor | None) -> tuple[Any, ...]:
        indices, handle = _saved(ctx)
        sent = None if grad_weights is None else grad_weights.contiguous()
        rows, weights, _, _, count = ctx.op.dispatch(grad.contiguous(), sent, None, indices, routing=handle)
        grad_received = None if ctx.weight_rows is None else _valid(weights, ctx.weight_rows, count)
        return None, _valid(rows, ctx.rows, count), grad_received, None, None, None


def _sums(
    op: EpDispatchCombineOp, rows: Any, weights: Any, indices: torch.Tensor, handle: EpDispatchRoutingHandle
) -> list[torch.Tensor | None]:
    """Copies of what a combine gives this rank's tokens."""
    views = op.combine(rows, weights, indices, use_external_inp_buf=1, routing=handle)
    return [None if view is None else view[: handle.cur_rank_num_token].clone() for view in views]


def _valid(view: torch.Tensor, size: int, count: torch.Tensor, beyond: int = 0) -> torch.Tensor:
    """A copy of the first `size` rows with `beyond` from row `count` on, where stale ones stand. Waits for no GPU."""
    stale = torch.arange(size, device=view.device) >= count
    return view[:size].masked_fill(stale[:, None], beyond)


def _save(ctx: Any, op: EpDispatchCombineOp, indices: torch.Tensor, handle: EpDispatchRoutingHandle) -> None:
    """As saved tensors, which checkpoints can drop and hooks can move; none of them is memory of the op."""
    ctx.op, ctx.tokens = op, handle.cur_rank_num_token
    ctx.save_for_backward(indices, *handle.tensors())


def _saved(ctx: Any) -> tuple[torch.Tensor, EpDispatchRoutingHandle]:
    indices, *tensors = ctx.saved_tensors
    return indices, EpDispatchRoutingHandle.from_tensors(tensors, ctx.tokens)


def _check(what: str, rows: torch.Tensor, op: EpDispatchCombineOp) -> None:
    if rows.dtype not in _DIFFERENTIABLE:
        raise UnsupportedDtype(f"{what} is {rows.dtype}, which has no gradient here: pass float32 or bfloat16")
    if op._limits.quant_type is not EpDispatchCombineQuantType.None_:
        raise ValueError(f"{what}: the op has quant_type {op._qt_str!r}, which rounds gradients as well: use 'none'")
