"""Ranks for the tests of this folder: two processes on CPUs, or one per GPU where there are GPUs."""

from __future__ import annotations

from typing import Any

import torch

from mori import target
from tests.gpu import ranks as gpu_ranks
from tests.rank_worker import RankContext
from tests.ranks import pool

HOST_WORLD_SIZE = 2


def world_size() -> int:
    return gpu_ranks.world_size() if target.current().is_device else HOST_WORLD_SIZE


def ranks_of(**environment: str) -> Any:
    """The shared pool: `run(function, *args)` calls `function(context, *args)` on every rank."""
    if target.current().is_device:
        return gpu_ranks.gpu_pool(**environment)
    return pool(HOST_WORLD_SIZE, **environment)


def device_of(context: RankContext) -> torch.device:
    return gpu_ranks.device_of(context) if target.current().is_device else torch.device("cpu")
