"""Own times of a rank's calls: eager calls on CPUs, replays of graphs on GPUs."""

from __future__ import annotations

import time
from typing import Protocol

import torch

from benchmarks.intra_node.options import Options
from benchmarks.intra_node.session import Inputs, Session
from benchmarks.timing import barrier, capture, own_wall_times_us


class Clock(Protocol):
    has_graphs: bool

    def times_us(
        self,
        session: Session,
        inputs: Inputs,
        options: Options,
        grids: dict[str, dict[str, int]] | None = None,
    ) -> dict[str, list[float]]:
        """Microseconds of a dispatch and of a combine of this rank, one per repetition.

        The session has done a round of `inputs`. `grids`: launch sizes by phase, instead of those of the options.
        """
        ...


class HostClock:
    has_graphs = False

    def times_us(
        self, session: Session, inputs: Inputs, options: Options, grids: dict[str, dict[str, int]] | None = None
    ) -> dict[str, list[float]]:
        grids = grids or {}
        found: dict[str, list[float]] = {"dispatch": [], "combine": []}
        for repetition in range(-options.warmup, options.graph_replay_iters):
            spent = dict.fromkeys(found, 0.0)
            for _ in range(options.iters):
                for phase, call in (("dispatch", session.dispatch), ("combine", session.combine)):
                    barrier()
                    started = time.perf_counter()
                    call(inputs, grids.get(phase))
                    spent[phase] += time.perf_counter() - started
            if repetition >= 0:
                for phase, seconds in spent.items():
                    found[phase].append(seconds * 1e6 / options.iters)
        return found


class GpuClock:
    """A graph of dispatches, and one of pairs: a combine takes what a pair takes longer than a dispatch."""

    has_graphs = True

    def times_us(
        self, session: Session, inputs: Inputs, options: Options, grids: dict[str, dict[str, int]] | None = None
    ) -> dict[str, list[float]]:
        grids = grids or {}

        def dispatch() -> None:
            session.dispatch(inputs, grids.get("dispatch"))

        def combine() -> None:
            session.combine(inputs, grids.get("combine"))

        graphs = {
            "dispatch": capture([dispatch] * options.iters),
            "pair": capture([dispatch, combine] * options.iters),
        }
        work = {name: graph.replay for name, graph in graphs.items()}
        own = own_wall_times_us(work, dispatch, options.graph_replay_iters, options.warmup)
        dispatches = [us / options.iters for us in own["dispatch"]]
        pairs = [us / options.iters for us in own["pair"]]
        return {
            "dispatch": dispatches,
            "combine": [max(pair - alone, 1e-3) for pair, alone in zip(pairs, dispatches, strict=True)],
        }


def clock_for(device: torch.device) -> Clock:
    return GpuClock() if device.type == "cuda" else HostClock()
