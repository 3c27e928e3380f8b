"""Ranks for the programs of this folder: those of torchrun, else processes of their own; on GPUs or on CPUs, over gloo.

torchrun --nproc_per_node=2 tests/python/ops/dispatch_combine_v2/test_graph_capture.py
python3 tests/python/ops/dispatch_combine_v2/test_graph_capture.py
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mori import target

RANKS_ON_CPUS = 2


@dataclass
class Rank:
    """One process of a program, and what it prints on rank 0."""

    rank: int
    world_size: int
    communicator: Any
    lines: list[str] = field(default_factory=list)

    @property
    def device(self) -> torch.device:
        return self.communicator.device

    def say(self, line: str) -> None:
        self.lines.append(line)
        if self.rank == 0:
            print(line, flush=True)

    def agree(self, passes: bool) -> bool:
        """Whether it holds on all ranks."""
        return self.mean(float(passes)) == 1.0

    def mean(self, value: float) -> float:
        total = torch.tensor([value], dtype=torch.float64)
        dist.all_reduce(total)
        return float(total) / self.world_size

    def finish_kernels(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def number(name: str, default: int) -> int:
    return int(os.environ.get(name, default))


def numbers(name: str, default: str) -> list[int]:
    return [int(each) for each in os.environ.get(name, default).split(",")]


def run(program: Callable[[Rank], bool], vmm_bytes: int = 4 << 30) -> int:
    """The exit code: 0 if `program` returns True on every rank. It is a function of a module, to be found there."""
    if "RANK" in os.environ:
        passed = _join(program, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), "env://", vmm_bytes)
        return 0 if passed else 1
    world_size = max(RANKS_ON_CPUS, torch.cuda.device_count() if target.current().is_device else 0)
    with tempfile.TemporaryDirectory() as folder:
        meeting = Path(folder, "store").as_uri()
        context: Any = torch.multiprocessing.spawn(
            _spawned, (program, world_size, meeting, vmm_bytes, folder), world_size, join=False
        )
        while not context.join():
            pass
        return 0 if len(list(Path(folder).glob("passed-*"))) == world_size else 1


def _spawned(
    rank: int, program: Callable[[Rank], bool], world_size: int, meeting: str, vmm_bytes: int, folder: str
) -> None:
    if _join(program, rank, world_size, meeting, vmm_bytes):
        Path(folder, f"passed-{rank}").touch()


def _join(program: Callable[[Rank], bool], rank: int, world_size: int, meeting: str, vmm_bytes: int) -> bool:
    from mori.cco import Communicator, UniqueId, get_unique_id

    if target.current().is_device:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", rank)) % torch.cuda.device_count())
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=world_size)
    courier = [bytes(get_unique_id()) if rank == 0 else b""]
    dist.broadcast_object_list(courier, src=0)
    with Communicator.init(world_size, rank, UniqueId.from_bytes(courier[0]), vmm_bytes) as communicator:
        this = Rank(rank, world_size, communicator)
        passed = this.agree(program(this))
    dist.destroy_process_group()
    return passed
