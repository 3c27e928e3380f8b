"""Lets tests that are written with CPU tensors drive an op on a GPU: arguments go there, results are read from there.

Tensors that are on the device already, the registered buffer among them, are passed on as they are.
"""

from __future__ import annotations

from typing import Any

import torch

from tests.gpu.ranks import device_of
from tests.rank_worker import RankContext
from tests.v1.cases import Case
from tests.v1.exercise import Exercise, new_op


def moved(tensor: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """A copy on `device`. Rows of one-byte types travel as bytes: not every such type can be copied as what it is."""
    if tensor.dtype.itemsize == 1:
        return tensor.view(torch.uint8).to(device).view(tensor.dtype)
    return tensor.to(device)


class DeviceView:
    """A result on the device. Reading a part of it waits for the device and gives what is there at that moment."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.dtype = tensor.dtype
        self.shape = tensor.shape

    def __getitem__(self, part: slice) -> torch.Tensor:
        return moved(self.tensor[part], "cpu")

    def __int__(self) -> int:
        return int(self.tensor)


def viewed(result: torch.Tensor | None) -> DeviceView | None:
    return None if result is None else DeviceView(result)


class BridgedOp:
    """An `EpDispatchCombineOp` seen from the host."""

    def __init__(self, op: Any, device: torch.device) -> None:
        self.op = op
        self.device = device

    def __getattr__(self, name: str) -> Any:
        return getattr(self.op, name)

    def _there(self, tensor: torch.Tensor | None) -> torch.Tensor | None:
        return None if tensor is None else moved(tensor, self.device)

    def _call(self, name: str, *tensors: torch.Tensor | None, **options: Any) -> tuple:
        results = getattr(self.op, name)(*map(self._there, tensors), **options)
        return tuple(viewed(result) for result in results)

    def dispatch(self, input: Any, weights: Any, scales: Any, indices: Any, **options: Any) -> tuple:
        return self._call("dispatch", input, weights, scales, indices, **options)

    def dispatch_send(self, input: Any, weights: Any, scales: Any, indices: Any, **options: Any) -> tuple:
        return self._call("dispatch_send", input, weights, scales, indices, **options)

    def combine(self, input: Any, weights: Any, indices: Any, **options: Any) -> tuple:
        return self._call("combine", input, weights, indices, **options)

    def combine_send(self, input: Any, weights: Any, indices: Any, **options: Any) -> tuple:
        return self._call("combine_send", input, weights, indices, **options)

    def get_dispatch_src_token_pos(self) -> torch.Tensor:
        return self.op.get_dispatch_src_token_pos().cpu()


def new_exercise(context: RankContext, case: Case) -> Exercise:
    """The case on a new op of this rank's device."""
    return Exercise(context, case, op=BridgedOp(new_op(context, case), device_of(context)))


def exercise_on_device(context: RankContext, case: Case) -> None:
    """Takes the steps of the case and holds every result against the reference, bit for bit."""
    exercise = new_exercise(context, case)
    exercise.run()
    exercise.op.check()  # type: ignore[attr-defined]
