"""The process behind one rank of a test: enters a world when told, then calls the functions it is sent.

Runs in a fork of a server that has imported torch already, so a rank starts in milliseconds. It dies with its parent.
"""

from __future__ import annotations

import faulthandler
import fcntl
import gc
import os
import pickle
import signal
import traceback
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing import parent_process
from multiprocessing.connection import Connection, wait
from typing import Any


@dataclass(frozen=True)
class World:
    """The ranks that take part in a call and how they are set up."""

    size: int
    bare: bool = False
    """True: neither a process group nor shmem is initialised."""
    environment: tuple[tuple[str, str], ...] = ()


@dataclass
class RankContext:
    """What a test function gets to know about the rank it runs on."""

    rank: int
    world: World
    cache: dict[Any, Any] = field(default_factory=dict)
    """Kept between the calls of one world, emptied before another one is entered."""

    @property
    def world_size(self) -> int:
        return self.world.size

    def barrier(self) -> None:
        """Waits for all ranks of the world, by means other than those under test."""
        import torch.distributed as dist

        dist.barrier()


def _enter(world: World | None, rank: int, store_path: str) -> RankContext | None:
    if world is None:
        return None
    os.environ.update(world.environment)
    if not world.bare:
        import torch.distributed as dist

        import mori

        store = dist.FileStore(store_path, world.size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world.size, timeout=timedelta(seconds=60))
        mori.shmem.shmem_torch_process_group_init("default")
    return RankContext(rank, world)


def _leave(context: RankContext) -> None:
    context.cache.clear()
    gc.collect()
    import torch.distributed as dist

    if not context.world.bare:
        import mori

        mori.shmem.shmem_finalize()
    if dist.is_initialized():
        dist.destroy_process_group()
    for name, _ in context.world.environment:
        os.environ.pop(name, None)


def die_with_parent() -> None:
    """Asks the kernel to kill this process when the parent ends, whatever it is doing then."""
    parent = parent_process()
    assert parent is not None
    # A pipe whose other end only the parent holds and into which nothing is written: its one event is its end.
    pipe = parent.sentinel
    fcntl.fcntl(pipe, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(pipe, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(pipe, fcntl.F_SETFL, fcntl.fcntl(pipe, fcntl.F_GETFL) | os.O_ASYNC)
    if wait([pipe], timeout=0):
        os.kill(os.getpid(), signal.SIGKILL)


def serve(connection: Connection, log_path: str) -> None:
    """Answers requests until the parent closes its end."""
    die_with_parent()
    log = open(log_path, "w")
    faulthandler.enable(log)
    faulthandler.register(signal.SIGUSR1, log, all_threads=True)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides what an interrupt ends

    import torch

    torch.set_num_threads(1)
    gc.freeze()  # what the server imported stays; collections look at the tests' own objects only
    context: RankContext | None = None
    while True:
        try:
            request = connection.recv_bytes()
        except (EOFError, ConnectionResetError):
            return
        try:
            action, *arguments = pickle.loads(request)
            value = None
            if action == "enter":
                if context is not None:
                    leaving, context = context, None
                    _leave(leaving)
                context = _enter(*arguments)
            else:
                function, positional = arguments
                value = function(context, *positional)
            answer = pickle.dumps((True, value))
        except BaseException:
            # Frames of a failed test hold its tensors; they go away before the answer is sent.
            answer = pickle.dumps((False, traceback.format_exc()))
        gc.collect(0)
        connection.send_bytes(answer)
