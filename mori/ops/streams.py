"""Raw handles of the streams that calls are enqueued on."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch


def getter(device: torch.device) -> Callable[[], int]:
    """A function that gives the handle of the calling thread's current stream on `device`; 0 on CPUs.

    It is called with every dispatch and combine, so it takes the shortest way that torch has.
    """
    if device.type == "cpu":
        return lambda: 0
    shortest = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    if shortest is not None:
        return functools.partial(shortest, device.index)
    return lambda: int(torch.cuda.current_stream(device).cuda_stream)


def synchronize(stream: object, device: torch.device) -> None:
    """Wait for a torch stream, a raw handle, or (None) the current stream of `device`."""
    if stream is None:
        stream = torch.cuda.current_stream(device)
    elif isinstance(stream, int):
        stream = torch.cuda.ExternalStream(stream, device=device)
    stream.synchronize()  # type: ignore[attr-defined]
