"""Which GPU a rank has, and whether all pairs of ranks can work together over theirs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from mori import _core, env
from mori.errors import BootstrapError

if TYPE_CHECKING:
    from mori.cco.bootstrap import Rendezvous
    from mori.target import Target

_CONNECTIONS = {
    "cuda": "NVLink or whose PCIe peer access is on (nvidia-smi topo -p2p r)",
    "hip": "XGMI or whose PCIe peer access is on (rocm-smi --showtopoaccess)",
}


def bind(target: Target) -> torch.device:
    """The device that a communicator of this thread works on: on GPU targets the thread's current one."""
    if not target.is_device:
        return torch.device("cpu")
    torch.cuda.init()
    return torch.device(target.device_type, torch.cuda.current_device())


def hello(target: Target, device: torch.device) -> dict[str, Any]:
    """What the other ranks get to know of the device. Starts the driver."""
    return {"gpu": _core.gpu_device(target.name, device.index)} if target.is_device else {}


def check_pairs(rendezvous: Rendezvous, target: Target, device: torch.device, timeout_s: float) -> None:
    """Collective. BootstrapError, on all ranks, for two ranks on one GPU and for GPUs that cannot reach each other.

    With MORI_SHARE_GPU two ranks may be on one: the driver then gives their kernels turns of some milliseconds, which
    is enough for results, not for times.
    """
    if not target.is_device:
        return
    gpus = [peer["gpu"] for peer in rendezvous.peers]
    if not env.get("MORI_SHARE_GPU"):
        _refuse_shared(rendezvous.peers, gpus)
    unreachable = [
        peer
        for peer, gpu in enumerate(gpus)
        # A GPU that this process does not see cannot be asked about; mapping its memory will show.
        if gpu["uuid"] != gpus[rendezvous.rank]["uuid"]
        and _core.gpu_can_access(target.name, device.index, gpu["uuid"]) is False
    ]
    answers = rendezvous.allgather(unreachable, "peer access of GPUs", timeout_s)
    pairs = [(rank, peer) for rank, peers in enumerate(answers) for peer in peers]
    if pairs:
        shown = "; ".join(f"{_spell(gpus, rank)} cannot reach {_spell(gpus, peer)}" for rank, peer in pairs[:4])
        more = f"; and {len(pairs) - 4} more pairs" if len(pairs) > 4 else ""
        raise BootstrapError(
            f"the GPUs of these ranks have no direct access to each other's memory: {shown}{more}. Kernels need it: "
            f"use GPUs that are connected by {_CONNECTIONS[target.name]}"
        )


def _refuse_shared(peers: list[dict[str, Any]], gpus: list[dict[str, Any]]) -> None:
    owners: dict[str, int] = {}
    for rank, gpu in enumerate(gpus):
        first = owners.setdefault(gpu["uuid"], rank)
        if first != rank:
            raise BootstrapError(
                f"ranks {first} (pid {peers[first]['pid']}) and {rank} (pid {peers[rank]['pid']}) are both on GPU "
                f"{gpu['uuid']} ({gpu['name']}): kernels wait for each other, so each rank needs a GPU of its own. "
                "Call torch.cuda.set_device(local_rank) before mori.shmem or Communicator.init (MORI_SHARE_GPU=1 lets "
                "them take turns, slowly)"
            )


def _spell(gpus: list[dict[str, Any]], rank: int) -> str:
    return f"rank {rank} (GPU {gpus[rank]['ordinal']}, {gpus[rank]['name']})"
