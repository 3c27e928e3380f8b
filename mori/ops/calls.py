"""Calls as the op remembers them: checked once per combination of tensor metadata, then looked up.

Whether a call is legal, and which views it returns, depends on shapes, dtypes, devices and contiguity only.
Looking that up costs about a microsecond; running the rules and making views costs tens of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

import torch

if TYPE_CHECKING:
    from .engine import CombineWork, DispatchWork

# In serving, token counts vary call by call; a few thousand entries of a few hundred bytes cover them.
_CAPACITY = 4096


class DispatchCall(NamedTuple):
    """What a dispatch with this metadata does."""

    results: tuple[torch.Tensor | None, ...]
    work: DispatchWork


class CombineCall(NamedTuple):
    """What a combine with this metadata does, zero copy or not. `weightless`: weights were given, but hold no row.

    `ids`: rows of indices, 0 if they are not looked at.
    """

    out: torch.Tensor
    out_weights: torch.Tensor | None
    input_bytes: int
    ids: int
    weightless: bool
    passed: CombineWork
    in_place: CombineWork


Call = TypeVar("Call")


def _describe_slowly(*tensors: torch.Tensor | None) -> tuple[Any, ...]:
    """As `_core.describer` makes them, by attributes. AttributeError or RuntimeError for what is no dense tensor with
    memory."""
    key = tuple(
        None if tensor is None else (tensor.shape, tensor.stride(), tensor.dtype, tensor.device) for tensor in tensors
    )
    addresses = _addresses(tensors)
    for tensor, address in zip(tensors, addresses, strict=True):
        if tensor is not None and not address and tensor.numel():
            raise RuntimeError("a tensor has elements but no memory")
    return (key, *addresses)


def _addresses(tensors: tuple[torch.Tensor | None, ...]) -> tuple[int, ...]:
    return tuple(0 if tensor is None else tensor.data_ptr() for tensor in tensors)


def _describer() -> Callable[..., tuple[Any, ...] | None]:
    from mori import _core

    exchange = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)  # torch 2.10 and later
    try:
        return _describe_slowly if exchange is None else _core.describer(torch.Tensor, exchange)
    except ValueError:
        return _describe_slowly


class CallMemo(Generic[Call]):
    """Descriptions of calls by the metadata of their tensors. Errors are not kept."""

    def __init__(self, enabled: bool) -> None:
        self._enabled = enabled
        self._known: dict[Any, Call] = {}
        self._describe = _describer()

    def find(self, prepare: Callable[..., Call], *tensors: torch.Tensor | None) -> tuple[Call, tuple[int, ...]]:
        """The description of a call with these tensors, and their addresses (0 for None).

        `prepare(*tensors)` makes the description, or raises, the first time.
        """
        try:
            found = self._describe(*tensors)
        except (AttributeError, RuntimeError):
            found = None
        if found is None:  # not a dense tensor: let the rules say what is wrong
            return prepare(*tensors), _addresses(tensors)
        key, addresses = found[0], found[1:]
        call = self._known.get(key)
        if call is None:
            call = prepare(*tensors)
            if self._enabled:
                if len(self._known) >= _CAPACITY:
                    self._known.clear()
                self._known[key] = call
        return call, addresses
