"""Calls as the op remembers them: checked once per combination of tensor metadata, then looked up.

Whether a call is legal, and which views it returns, depends on shapes, dtypes, devices and contiguity only.
Looking that up costs about a microsecond; running the rules and making views costs tens of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeVar

import torch

# In serving, token counts vary call by call; a few thousand entries of a few hundred bytes cover them.
_CAPACITY = 4096


class DispatchCall(NamedTuple):
    """What a dispatch with this metadata does. `sizes` are the bytes of input, weights, scales, indices."""

    results: tuple[torch.Tensor | None, ...]
    sizes: tuple[int, ...]
    sends_scales: bool
    ids_are_int32: bool


class CombineCall(NamedTuple):
    """What a combine with this metadata does. `weightless`: weights were given, but hold no row."""

    out: torch.Tensor
    out_weights: torch.Tensor | None
    input_rows: int
    input_bytes: int
    weightless: bool


Call = TypeVar("Call", DispatchCall, CombineCall)


def _metadata(tensor: torch.Tensor | None) -> tuple[Any, ...] | None:
    if tensor is None:
        return None
    return tensor.shape, tensor.dtype, tensor.device, tensor.is_contiguous()


class CallMemo(Generic[Call]):
    """Descriptions of calls by the metadata of their tensors. Errors are not kept."""

    def __init__(self, enabled: bool) -> None:
        self._enabled = enabled
        self._known: dict[tuple[Any, ...], Call] = {}

    def find(self, prepare: Callable[..., Call], *tensors: torch.Tensor | None) -> Call:
        """The description of a call with these tensors; `prepare(*tensors)` makes it, or raises, the first time."""
        try:
            key = tuple(map(_metadata, tensors))
        except (AttributeError, RuntimeError):
            return prepare(*tensors)  # not a dense tensor: let the rules say what is wrong
        call = self._known.get(key)
        if call is None:
            call = prepare(*tensors)
            if self._enabled:
                if len(self._known) >= _CAPACITY:
                    self._known.clear()
                self._known[key] = call
        return call


def storage_bytes(tensor: torch.Tensor | None) -> int:
    """Bytes of a contiguous tensor's elements; 0 for none."""
    return 0 if tensor is None else tensor.numel() * tensor.dtype.itemsize
