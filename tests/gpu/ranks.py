"""Rank processes with a GPU each: the pools of tests/ranks.py, whose processes take a device and join shmem first.

With MORI_TARGET=host the same tests run on CPUs as far as they need neither streams nor graphs, to try the tests out.
"""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from tests import ranks
from tests.rank_worker import RankContext
from tests.ranks import Outcome, RankFailure, RankPool

MAX_GPUS = 8
ENVIRONMENT = {"MORI_SHMEM_HEAP_SIZE": "4G"}
_MEMBERSHIP = "membership"
_stores = tempfile.TemporaryDirectory(prefix="mori-gpu-ranks-")


def on_host() -> bool:
    return os.environ.get("MORI_TARGET") == "host"


def world_size() -> int:
    """One rank per GPU. RuntimeError with fewer than two: these tests are about what happens between GPUs.

    With MORI_SHARE_GPU two ranks take turns on one GPU: everything runs but for the link between GPUs.
    """
    found = min(torch.cuda.device_count(), MAX_GPUS)
    if on_host() or (found == 1 and shares_gpu()):
        return 2
    if found < 2:
        raise RuntimeError(f"{found} GPUs are visible, the GPU tests need 2 that can reach each other")
    return found


def shares_gpu() -> bool:
    return os.environ.get("MORI_SHARE_GPU") == "1"


def device_of(context: RankContext) -> torch.device:
    return torch.device("cpu") if on_host() else torch.device("cuda", context.rank % torch.cuda.device_count())


def synchronize() -> None:
    if not on_host():
        torch.cuda.synchronize()


class Membership:
    """A process's place in a world, given up when the cache that holds it is emptied."""

    def __init__(self, context: RankContext, store_path: str) -> None:
        import torch.distributed as dist

        import mori

        if not on_host():
            torch.cuda.set_device(device_of(context))
        store = dist.FileStore(store_path, context.world_size)
        dist.init_process_group(
            "gloo", store=store, rank=context.rank, world_size=context.world_size, timeout=timedelta(seconds=60)
        )
        mori.shmem.shmem_torch_process_group_init("default")

    def __del__(self) -> None:
        import mori

        mori.shmem.shmem_finalize()


def on_device(context: RankContext, store_path: str, function: Callable[..., Any], arguments: tuple) -> Any:
    """Runs in the rank process. A fault of a kernel belongs to the test that launched it, hence the synchronisation."""
    if _MEMBERSHIP not in context.cache:
        context.cache[_MEMBERSHIP] = Membership(context, store_path)
    value = function(context, *arguments)
    synchronize()
    return value


@dataclass(frozen=True)
class GpuPool:
    """The ranks of one world. Functions are called as `function(context, *args)`."""

    ranks: RankPool

    @property
    def world_size(self) -> int:
        return self.ranks.world.size

    def run(self, function: Callable[..., Any], *args: Any, timeout_s: float = 60.0) -> list[Any]:
        """Results by rank; RankFailure if any rank failed."""
        outcomes = self.outcomes(function, *args, timeout_s=timeout_s)
        failures = [f"--- rank {rank}:\n{each.failure}" for rank, each in enumerate(outcomes) if each.failure]
        if failures:
            raise RankFailure("\n".join([getattr(function, "__name__", repr(function)), *failures]))
        return [outcome.value for outcome in outcomes]

    def outcomes(self, function: Callable[..., Any], *args: Any, timeout_s: float = 60.0) -> list[Outcome]:
        """Like `run`, but failures are for the caller to judge."""
        store_path = str(Path(_stores.name) / uuid.uuid4().hex)
        outcomes = self.ranks.outcomes(on_device, store_path, function, args, timeout_s=timeout_s)
        if any(outcome.failure for outcome in outcomes):
            # After a failed kernel a process can use its GPU no more: the next call gets new ones.
            for rank, outcome in enumerate(outcomes):
                if outcome.answered:
                    os.kill(self.ranks.pid(rank), signal.SIGKILL)
        return outcomes

    def renew(self) -> None:
        """The next call finds shmem newly initialised."""
        self.ranks.renew()


def _environment(changes: dict[str, str]) -> dict[str, str]:
    return {"MORI_TARGET": os.environ.get("MORI_TARGET", "cuda")} | ENVIRONMENT | changes


def gpu_pool(**environment: str) -> GpuPool:
    """The ranks that all tests share; `environment` is set before shmem is initialised."""
    return GpuPool(ranks.pool(world_size(), bare=True, **_environment(environment)))


@contextlib.contextmanager
def private_gpu_pool(**environment: str) -> Iterator[GpuPool]:
    """Ranks of the caller's own, for tests that kill or confuse them."""
    with ranks.private_pool(world_size(), bare=True, **_environment(environment)) as own:
        yield GpuPool(own)
