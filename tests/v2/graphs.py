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

Step = Callable[[], Any]


@contextlib.contextmanager
def recording(op: Any) -> Iterator[list[Step]]:
    """Inside, launches of the op are listed instead of made."""
    launches: list[Step] = []
    plan = op._plan

    def recorder(name: str) -> Callable[..., None]:
        launch = getattr(plan, name)
        return lambda *arguments, **options: launches.append(functools.partial(launch, *arguments, **options))

    with mock.patch.multiple(plan, dispatch=recorder("dispatch"), combine=recorder("combine")):
        yield launches


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
