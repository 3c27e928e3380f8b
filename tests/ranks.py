"""Persistent rank processes for tests.

`pool(world_size).run(function, *args)` calls a module-level function on every rank and returns the results by rank.
The processes are made once and serve every test; a world of W ranks uses the first W of them. Changing the world
finalises shmem and initialises it anew. A rank that dies or does not answer in time is replaced before the next call.
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import pickle
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from tests.rank_worker import World, serve

GRACE_SECONDS = 5.0
"""How long the other ranks may take once one rank has failed: they wait for it in vain and must notice."""

ENTER_SECONDS = 60.0

PRELOADED = ["numpy", "torch", "torch.distributed", "pytest", "hypothesis"]

SERVER_ENVIRONMENT = {
    # Two cores serve up to eight ranks: libraries must not start threads of their own, nor before the fork.
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
}

RANK_ENVIRONMENT = {
    # A rank that waits in vain ends as an error with a name, well before the test is given up.
    "MORI_TIMEOUT_S": "30",
    "MORI_BOOTSTRAP_TIMEOUT": "30",
    "MORI_SHMEM_HEAP_SIZE": "1G",
}


class RankFailure(AssertionError):
    """At least one rank raised, died or did not answer; the text holds what is known of each."""


@dataclass(frozen=True)
class Outcome:
    """How a call ended on one rank. At most one of error, exit_code and timed_out tells why there is no value."""

    value: Any = None
    error: str | None = None
    exit_code: int | None = None
    timed_out: bool = False
    log: str = ""

    @property
    def answered(self) -> bool:
        return self.exit_code is None and not self.timed_out

    @property
    def failure(self) -> str | None:
        if self.error is not None:
            return self.error
        if self.exit_code is not None:
            return f"the process ended with exit code {self.exit_code}\n{self.log}"
        if self.timed_out:
            return f"no answer in time; the process was killed here:\n{self.log}"
        return None


class _Process:
    """One rank process and the connection to it."""

    def __init__(self, directory: Path, number: int) -> None:
        context = _fork_server()
        self.log_path = directory / f"{number}.log"
        self.connection, theirs = context.Pipe()
        self.process: BaseProcess = context.Process(
            target=serve, args=(theirs, str(self.log_path)), daemon=True, name=f"rank-process-{number}"
        )
        self.process.start()
        theirs.close()

    def send(self, *request: Any) -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the answer tells that it has died
            self.connection.send_bytes(pickle.dumps(request))

    def kill(self) -> None:
        self.process.kill()
        self.process.join()
        self.connection.close()

    def log(self) -> str:
        return self.log_path.read_text() if self.log_path.exists() else ""


@functools.cache
def _fork_server() -> ForkServerContext:
    """Starts the process that imports torch once and of which all ranks are forks."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    before = dict(os.environ)
    os.environ.update(SERVER_ENVIRONMENT)
    try:
        forkserver.ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(before)
    return context


class RankSet:
    """A growing set of rank processes, all in one world at a time."""

    def __init__(self) -> None:
        self._directory = Path(tempfile.mkdtemp(prefix="mori-ranks-"))
        self._processes: dict[int, _Process] = {}
        self._world: World | None = None
        self._suspect = False
        self._entered = 0
        self._made = 0

    def pid(self, rank: int) -> int:
        pid = self._processes[rank].process.pid
        assert pid is not None
        return pid

    def enter(self, world: World) -> None:
        """Makes `world` current, with live processes only."""
        if not all(process.process.is_alive() for process in self._processes.values()):
            self._world = None
        if world == self._world:
            return
        self._world = None
        outcomes = self._try_to_enter(world)
        if self._suspect and any(outcome.failure is not None for outcome in outcomes.values()):
            # Left broken by the call that failed before; that call has been reported.
            self._kill_all()
            outcomes = self._try_to_enter(world)
        _raise_failures(outcomes, f"entering {world}")
        self._suspect = False
        self._world = world

    def _try_to_enter(self, world: World) -> dict[int, Outcome]:
        for rank, process in list(self._processes.items()):
            if not process.process.is_alive():
                process.kill()
                del self._processes[rank]
        for rank in range(world.size):
            if rank not in self._processes:
                self._processes[rank] = _Process(self._directory, self._made)
                self._made += 1
        self._entered += 1
        store_path = str(self._directory / f"store-{self._entered}")
        for rank, process in self._processes.items():
            # A process outside the world waits without any set-up.
            process.send("enter", world if rank < world.size else None, rank, store_path)
        return self.collect(list(self._processes), ENTER_SECONDS)

    def start(self, world: World, function: Callable[..., Any], *args: Any) -> None:
        """Begins a call on every rank of `world`; `collect` ends it."""
        self.enter(world)
        for rank in range(world.size):
            self._processes[rank].send("call", function, args)

    def collect(self, ranks: list[int], timeout_s: float) -> dict[int, Outcome]:
        """Waits for the answers of `ranks`. Whoever does not answer in time is killed."""
        outcomes: dict[int, Outcome] = {}
        deadline = time.monotonic() + timeout_s
        while missing := [rank for rank in ranks if rank not in outcomes]:
            connections = {self._processes[rank].connection: rank for rank in missing}
            ready = wait(list(connections), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                outcomes.update({rank: self._kill_silent(rank) for rank in missing})
                break
            for connection in ready:
                assert isinstance(connection, Connection)
                rank = connections[connection]
                outcomes[rank] = self._answer(rank, connection)
                if outcomes[rank].failure is not None:
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        if any(outcome.failure is not None for outcome in outcomes.values()):
            self._world = None  # ranks may have stopped at different places: start afresh
            self._suspect = True
        return {rank: outcomes[rank] for rank in ranks}

    def _answer(self, rank: int, connection: Connection) -> Outcome:
        try:
            succeeded, value = pickle.loads(connection.recv_bytes())
        except (EOFError, ConnectionResetError):
            process = self._processes[rank]
            process.process.join()
            return Outcome(exit_code=process.process.exitcode, log=process.log())
        return Outcome(value=value) if succeeded else Outcome(error=value)

    def _kill_silent(self, rank: int) -> Outcome:
        process = self._processes[rank]
        before = len(process.log())
        os.kill(self.pid(rank), signal.SIGUSR1)  # faulthandler writes where every thread is
        patience = time.monotonic() + 2.0
        while len(process.log()) == before and time.monotonic() < patience:
            process.process.join(0.02)
        process.process.kill()
        process.process.join()
        return Outcome(timed_out=True, log=process.log())

    def _kill_all(self) -> None:
        for process in self._processes.values():
            process.kill()
        self._processes.clear()
        self._world = None

    def renew(self) -> None:
        """The next call enters its world anew."""
        self._world = None

    def stop(self) -> None:
        self._kill_all()
        shutil.rmtree(self._directory, ignore_errors=True)


def _raise_failures(outcomes: dict[int, Outcome], what: str) -> None:
    failures = {rank: outcome.failure for rank, outcome in outcomes.items() if outcome.failure is not None}
    if failures:
        details = "\n".join(f"--- rank {rank}:\n{failure}" for rank, failure in failures.items())
        raise RankFailure(f"{what}: failed on ranks {sorted(failures)} of {sorted(outcomes)}\n{details}")


@dataclass(frozen=True)
class RankPool:
    """The ranks of one world."""

    _set: RankSet
    world: World

    def run(self, function: Callable[..., Any], *args: Any, timeout_s: float = 60.0) -> list[Any]:
        """Calls `function(context, *args)` on every rank; results by rank, RankFailure if any rank failed."""
        outcomes = self.outcomes(function, *args, timeout_s=timeout_s)
        _raise_failures(dict(enumerate(outcomes)), getattr(function, "__name__", repr(function)))
        return [outcome.value for outcome in outcomes]

    def outcomes(self, function: Callable[..., Any], *args: Any, timeout_s: float = 60.0) -> list[Outcome]:
        """Like `run`, but failures are for the caller to judge."""
        self.start(function, *args)
        return self.collect(timeout_s)

    def start(self, function: Callable[..., Any], *args: Any) -> None:
        self._set.start(self.world, function, *args)

    def collect(self, timeout_s: float = 60.0) -> list[Outcome]:
        return list(self._set.collect(list(range(self.world.size)), timeout_s).values())

    def pid(self, rank: int) -> int:
        return self._set.pid(rank)

    def renew(self) -> None:
        """The next call finds shmem newly initialised, whatever this call's functions did to it."""
        self._set.renew()


_shared: RankSet | None = None


def _world(world_size: int, bare: bool, environment: dict[str, str]) -> World:
    return World(world_size, bare, tuple(sorted((RANK_ENVIRONMENT | environment).items())))


def pool(world_size: int, *, bare: bool = False, **environment: str) -> RankPool:
    """The ranks that all tests share. `environment` is set before shmem is initialised; `bare` leaves it out."""
    global _shared
    if _shared is None:
        _shared = RankSet()
    return RankPool(_shared, _world(world_size, bare, environment))


@contextlib.contextmanager
def private_pool(world_size: int, *, bare: bool = False, **environment: str) -> Iterator[RankPool]:
    """Ranks of the caller's own, for tests that kill or confuse them; all are gone at the end."""
    own = RankSet()
    try:
        yield RankPool(own, _world(world_size, bare, environment))
    finally:
        own.stop()


def stop_shared() -> None:
    """Ends the processes behind `pool`."""
    global _shared
    if _shared is not None:
        _shared.stop()
        _shared = None
