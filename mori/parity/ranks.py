"""Rank processes for one target: each joins, plays all configurations its way, and ends."""

from __future__ import annotations

import multiprocessing
from multiprocessing.connection import Connection
from typing import NamedTuple

import torch

from mori import env
from mori.ops.dispatch_combine_v2 import backends

from .compare import Played
from .configuration import Configuration


class Way(NamedTuple):
    """An API, a kernel backend and a target, written v2:hip:host."""

    api: str
    backend: str
    target: str

    @classmethod
    def parse(cls, text: str) -> Way:
        """ValueError for anything but three parts of which the first is an API and the last a target."""
        parts = text.split(":")
        if len(parts) != 3 or parts[0] not in ("v1", "v2") or parts[2] not in ("host", "cuda", "hip"):
            raise ValueError(
                f"{text!r} is not like v2:hip:host: an API (v1, v2), a backend, a target (host, cuda, hip)"
            )
        if parts[0] == "v1" and parts[1] != "hip":
            raise ValueError(f"{text!r}: v1 has one backend, called hip")
        return cls(*parts)

    def require_here(self) -> None:
        """ValueError if this machine or this installation cannot go this way."""
        if self.target != "host" and not torch.cuda.device_count():
            raise ValueError(f"{self}: torch sees no GPU here; use target host")
        if self.api == "v2" and self.backend not in backends.available():
            raise ValueError(f"{self}: use a backend of v2 that loads here: {', '.join(backends.available())}")

    def __str__(self) -> str:
        return ":".join(self)


HEAP_BYTES = 256 << 20


def play_all(way: Way, configurations: list[Configuration]) -> Played:
    """On new processes, one per rank. RuntimeError with the rank's own words if one fails."""
    from mori.cco import get_unique_id

    world_size = configurations[0].world_size
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch"])  # once for all ranks; it touches no GPU
    unique_id = bytes(get_unique_id())
    ends, processes = [], []
    for rank in range(world_size):
        ours, theirs = context.Pipe()
        process = context.Process(target=_rank, args=(theirs, way, configurations, rank, unique_id), daemon=True)
        process.start()
        theirs.close()
        ends.append(ours)
        processes.append(process)
    answers = []
    for rank, end in enumerate(ends):
        try:
            answers.append(end.recv())
        except EOFError:
            answers.append(f"rank {rank} ended without an answer")
    for process in processes:
        process.join()
    failures = [answer for answer in answers if isinstance(answer, str)]
    if failures:
        raise RuntimeError(f"{way}: " + "\n".join(failures))
    return [list(outcomes) for outcomes in zip(*answers, strict=True)]


def _rank(end: Connection, way: Way, configurations: list[Configuration], rank: int, unique_id: bytes) -> None:
    import traceback

    env.put("MORI_TARGET", way.target)
    try:
        end.send(_play(way, configurations, rank, unique_id))
    except BaseException:
        end.send(f"rank {rank}:\n{traceback.format_exc()}")


def _play(way: Way, configurations: list[Configuration], rank: int, unique_id: bytes) -> list[object]:
    from mori.cco import Communicator, UniqueId

    from .play import play

    torch.set_num_threads(1)
    if way.target != "host":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    world_size = configurations[0].world_size
    if way.api == "v1":
        from mori import shmem
        from mori.shmem import state

        env.put("MORI_SHMEM_HEAP_SIZE", str(HEAP_BYTES))
        shmem.shmem_init_attr(1, rank, world_size, unique_id)
        communicator = state.current().communicator
    else:
        communicator = Communicator.init(world_size, rank, UniqueId.from_bytes(unique_id), HEAP_BYTES)

    def barrier() -> None:
        if way.target != "host":
            torch.cuda.synchronize()
        communicator.barrier()

    outcomes = [play(each, rank, way.api, way.backend, communicator, barrier) for each in configurations]
    if way.api == "v1":
        shmem.shmem_finalize()
    else:
        communicator.destroy()
    return list(outcomes)
