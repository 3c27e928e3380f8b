"""Faults in the data that v2's API adds to the engine. Each is planted in a rank process, and undone."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import torch

from mori.ops.dispatch_combine_v2 import hip_backend, routing
from mori.ops.dispatch_combine_v2.dispatch_combine_op import EpDispatchCombineOp
from mori.ops.dispatch_combine_v2.hip_backend import EpDispatchCombineOpHip

Op = Any


@contextlib.contextmanager
def shape_with(change: Callable[[Any], dict[str, int]]) -> Iterator[None]:
    original = hip_backend.shape_of

    def changed(cfg: Any) -> Any:
        shape = original(cfg)
        return replace(shape, **change(shape))

    with mock.patch.object(hip_backend, "shape_of", changed):
        yield


@contextlib.contextmanager
def after_views(change: Callable[[Op], None]) -> Iterator[None]:
    """`change` is applied to an op once its views are made."""
    original = EpDispatchCombineOp._make_views

    def changed(op: Op) -> None:
        original(op)
        change(op)

    with mock.patch.object(EpDispatchCombineOp, "_make_views", changed):
        yield


def around_combine(change: Callable[[dict[str, Any]], None]) -> contextlib.AbstractContextManager[Any]:
    """`change` is applied to what a combine is enqueued with."""
    original = EpDispatchCombineOpHip._enqueue_combine
    names = ("kernel", "call", "address", "input", "routing", "wants_weights")

    def changed(op: Op, *given: Any) -> None:
        arguments = dict(zip(names, given, strict=True)) | {"op": op}
        change(arguments)
        original(op, *(arguments[name] for name in names))

    return mock.patch.object(EpDispatchCombineOpHip, "_enqueue_combine", changed)


def _shift_rows(op: Op) -> None:
    op._recv_tokens = torch.roll(op._recv_tokens.view(torch.uint8), 1, 0).view(op._recv_tokens.dtype)


def _swap_small_views(op: Op) -> None:
    op._recv_weights, op._recv_indices = (
        op._recv_indices.view(torch.float32),
        op._recv_weights.view(torch.int32),
    )


@contextlib.contextmanager
def _count_elsewhere() -> Iterator[None]:
    """The caller gets to see another tensor than the one that the kernel fills."""
    original = EpDispatchCombineOpHip._build_kernels

    def changed(op: Op, *arguments: Any) -> Any:
        kernels = original(op, *arguments)
        op.total_recv = op.total_recv.clone()
        return kernels

    with mock.patch.object(EpDispatchCombineOpHip, "_build_kernels", changed):
        yield


def _result_of_other_tokens(op: Op) -> None:
    op.combine_out = op.combine_out.flip(0)


def _read_in_place(arguments: dict[str, Any]) -> None:
    arguments["address"] = arguments["op"]._in_begin


def _one_token_less(arguments: dict[str, Any]) -> None:
    launch = arguments["kernel"]
    arguments["kernel"] = lambda *given, **options: launch.func(
        *given, **(launch.keywords | options | {"tokens": max(0, launch.keywords["tokens"] - 1)})
    )


def _no_weights(arguments: dict[str, Any]) -> None:
    arguments["wants_weights"] = False


def _scales_left_behind() -> contextlib.AbstractContextManager[Any]:
    return mock.patch.object(hip_backend, "scale_row_bytes", return_value=0)


def _map_of_no_handle() -> contextlib.AbstractContextManager[Any]:
    """Every dispatch notes its ways where one without a handle does."""
    original = EpDispatchCombineOpHip._enqueue_dispatch

    def changed(op: Op, call: Any, addresses: Any, tensors: Any, dest_map: Any) -> None:
        original(op, call, addresses, tensors, op.token_dest_map)

    return mock.patch.object(EpDispatchCombineOpHip, "_enqueue_dispatch", changed)


def _weights_of_nobody(arguments: dict[str, Any]) -> None:
    op = arguments["op"]
    op.ones = torch.ones_like(op._recv_weights)
    op._weights_address = op.ones.data_ptr()


def _stale_handle() -> contextlib.AbstractContextManager[Any]:
    """A handle of the first dispatch, whatever came later."""
    original = EpDispatchCombineOp.dispatch

    def changed(op: Op, *arguments: Any, **options: Any) -> Any:
        *views, handle = original(op, *arguments, **(options | {"snapshot": True}))
        op.__dict__.setdefault("first_handle", handle)
        return (*views, op.first_handle)

    return mock.patch.object(EpDispatchCombineOp, "dispatch", changed)


def _source_without_copy() -> contextlib.AbstractContextManager[Any]:
    """Positions that are read from the wrong half of the region."""
    read = property(lambda handle: handle._source_view.flip(0))
    return mock.patch.object(routing.EpDispatchRoutingHandle, "disp_tok_id_to_src_tok_id_local", read)


FAULTS: dict[str, Callable[[], contextlib.AbstractContextManager[Any]]] = {
    "stride of sources": lambda: shape_with(lambda shape: {"source_stride": shape.max_tokens + 1}),
    "stride of slots": lambda: shape_with(lambda shape: {"slot_stride": shape.max_recv_tokens + 1}),
    "null code": lambda: shape_with(lambda shape: {"slot_stride": shape.max_recv_tokens - 1}),
    "row view": lambda: after_views(_shift_rows),
    "views of weights and ids": lambda: after_views(_swap_small_views),
    "count": _count_elsewhere,
    "result view": lambda: after_views(_result_of_other_tokens),
    "in place for all": lambda: around_combine(_read_in_place),
    "tokens of the result": lambda: around_combine(_one_token_less),
    "weights not asked for": lambda: around_combine(_no_weights),
    "weights of nobody": lambda: around_combine(_weights_of_nobody),
    "scales left behind": _scales_left_behind,
    "map of no handle": _map_of_no_handle,
    "stale handle": _stale_handle,
    "source positions": _source_without_copy,
}


def planted(name: str | None) -> contextlib.AbstractContextManager[Any]:
    """None: no fault."""
    return contextlib.nullcontext() if name is None else FAULTS[name]()
