"""Clocks for calls that all ranks make together. Control goes over gloo, so that no collective runs on the GPUs."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable, Mapping

import torch
import torch.distributed as dist

ALIGN_CYCLES = 1_000_000
"""About half a millisecond: longer than ranks need to leave a barrier and to queue what is timed."""


def barrier() -> None:
    dist.all_reduce(torch.zeros(1))


def slowest(times: Iterable[float]) -> list[float]:
    """Place by place the longest time of any rank."""
    all_times = torch.tensor(list(times), dtype=torch.float64)
    dist.all_reduce(all_times, op=dist.ReduceOp.MAX)
    return all_times.tolist()


def capture(calls: Iterable[Callable[[], None]]) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for call in calls:
            call()
    return graph


def wall_times_us(
    work: Mapping[str, Callable[[], None]], align: Callable[[], None], repetitions: int
) -> dict[str, list[float]]:
    """As `own_wall_times_us`, of the slowest rank in each repetition."""
    own = own_wall_times_us(work, align, repetitions)
    return {name: slowest(times) for name, times in own.items()}


def own_wall_times_us(
    work: Mapping[str, Callable[[], None]], align: Callable[[], None], repetitions: int, warm_up: int = 3
) -> dict[str, list[float]]:
    """Microseconds of this rank for each kind of work and repetition; the kinds take turns.

    Before each one the GPU is kept busy until all is queued, and `align`, a call that all ranks take part in, lets
    their GPUs start together.
    """
    own: dict[str, list[float]] = {name: [] for name in work}
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for repetition in range(-warm_up, repetitions):
        for name, enqueue in work.items():
            barrier()
            torch.cuda._sleep(ALIGN_CYCLES)
            align()
            start.record()
            enqueue()
            end.record()
            end.synchronize()
            if repetition >= 0:
                own[name].append(start.elapsed_time(end) * 1e3)
    return own


def host_times_us(
    calls: Mapping[str, Callable[[int], None]], total: int = 10_000, batch: int = 100
) -> dict[str, list[float]]:
    """Host time of each single call of this rank, `total` per kind; the device catches up between batches."""
    own: dict[str, list[float]] = {name: [] for name in calls}
    gc.disable()
    try:
        for first in range(-batch, total, batch):
            torch.cuda.synchronize()
            barrier()
            for number in range(first, first + batch):
                for name, call in calls.items():
                    started = time.perf_counter_ns()
                    call(number % batch)
                    elapsed = time.perf_counter_ns() - started
                    if first >= 0:
                        own[name].append(elapsed / 1e3)
    finally:
        gc.enable()
    torch.cuda.synchronize()
    return own
