"""From the name of a torch process group to (rank, size, unique id), agreed over that group."""

from __future__ import annotations

from typing import NamedTuple

import torch.distributed as dist

from mori.errors import BootstrapError

# Callers register WORLD under this name first; doing it for those who forgot is harmless.
WORLD_ALIAS = "default"


class Membership(NamedTuple):
    group: dist.ProcessGroup
    rank: int  # in the group
    size: int
    global_ranks: tuple[int, ...]


def resolve(group_name: str) -> Membership:
    """The group registered under `group_name`, as this process belongs to it.

    RuntimeError: torch.distributed is not there or not initialised. ValueError: nothing is registered under the name.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError(
            "shmem_torch_process_group_init needs torch.distributed: call torch.distributed.init_process_group first, "
            "or use shmem_init_attr with a unique id"
        )
    group = _registered_group(group_name)
    return Membership(group, group.rank(), group.size(), tuple(dist.get_process_group_ranks(group)))


def _registered_group(group_name: str) -> dist.ProcessGroup:
    from torch._C import _distributed_c10d as c10d

    try:
        return c10d._resolve_process_group(group_name)  # type: ignore[arg-type]
    except RuntimeError:
        if group_name == WORLD_ALIAS and dist.group.WORLD is not None:
            return dist.group.WORLD
        raise ValueError(
            f"no process group is registered under the name {group_name!r} on this rank: pass group.group_name, or "
            "register it with torch._C._distributed_c10d._register_process_group(name, group)"
        ) from None


def share_unique_id(membership: Membership) -> bytes:
    """Collective: 128 bytes made by group rank 0. If making them fails there, BootstrapError with its cause on all."""
    from mori.cco.unique_id import get_unique_id

    offer: list[bytes | str | None] = [None]
    if membership.rank == 0:
        try:
            offer[0] = bytes(get_unique_id())
        except Exception as error:
            offer[0] = f"{type(error).__name__}: {error}"
    # The rank inside the group, not the global one: a group need not contain global rank 0.
    dist.broadcast_object_list(offer, group=membership.group, group_src=0)
    if not isinstance(offer[0], bytes):
        raise BootstrapError(f"rank 0 of the process group could not create a unique id: {offer[0]}")
    return offer[0]
