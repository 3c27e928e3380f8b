"""Communicators for tests of v2: one for each world, made when it is first asked for."""

from __future__ import annotations

from typing import Any

import torch

from tests.rank_worker import RankContext

VMM_BYTES = 1 << 30
_COMMUNICATOR = "communicator of v2"


def device_of(context: RankContext) -> torch.device:
    """Where the ranks of this world have their memory."""
    return communicator(context).device


def communicator(context: RankContext) -> Any:
    """The one that all tests of this world share."""
    if _COMMUNICATOR not in context.cache:
        context.cache[_COMMUNICATOR] = new_communicator(context)
    return context.cache[_COMMUNICATOR]


def new_communicator(context: RankContext, vmm_bytes: int = VMM_BYTES) -> Any:
    """Collective. The id travels over the process group of the tests."""
    import torch.distributed as dist

    from mori.cco import Communicator, UniqueId, get_unique_id

    courier = [bytes(get_unique_id()) if context.rank == 0 else None]
    dist.broadcast_object_list(courier, src=0)
    assert courier[0] is not None
    return Communicator.init(context.world_size, context.rank, UniqueId.from_bytes(courier[0]), vmm_bytes)
