"""Calls that are captured once and replayed: a graph on GPUs, on CPUs a list of launches with the arguments they had.

A recorded launch gets the very addresses and counts of its first call, as a captured one does, so whatever the op
decides in Python is left out of a replay.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch

CAPTURED = -2
"""What the engine answers to a call that was captured: csrc/ops/ep_plan.hpp."""

Step = Callable[[], Any]


class Recorder:
    """Takes the place of the native plan: lists dispatches and combines, and passes on everything else."""

    def __init__(self, native: Any) -> None:
        self.native = native
        self.launches: list[Step] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.native, name)

    def dispatch(self, *arguments: Any) -> int:
        return self._list(self.native.dispatch, arguments)

    def combine(self, *arguments: Any) -> int:
        return self._list(self.native.combine, arguments)

    def _list(self, launch: Callable[..., int], arguments: tuple) -> int:
        self.launches.append(functools.partial(_launched, launch, arguments))
        return CAPTURED


def _launched(launch: Callable[..., int], arguments: tuple) -> None:
    outcome = launch(*arguments)
    if outcome != 0:
        raise AssertionError(f"a recorded launch ends with {outcome}")


@contextlib.contextmanager
def recording(op: Any) -> Iterator[list[Step]]:
    """Inside, launches of the op are listed instead of made."""
    recorder = Recorder(op._plan._native)
    with mock.patch.object(op._plan, "_native", recorder):
        yield recorder.launches


def captured(op: Any, *steps: Step) -> Step:
    """A function that repeats the steps. Each is calls of the op, or work in torch that none of its results leave."""
    if op.dev.type == "cuda":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for step in steps:
                step()
        return graph.replay
    repeated: list[Step] = []
    for step in steps:
        with recording(op) as launches:
            step()
        repeated += launches or [step]

    def replay() -> None:
        for each in repeated:
            each()

    return replay
