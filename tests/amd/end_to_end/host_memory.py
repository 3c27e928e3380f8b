"""Memory of this process as simulated devices see it, shared with the simulators of other processes."""

from __future__ import annotations

import ctypes
import fcntl
import os
from pathlib import Path
from types import TracebackType

import numpy as np

from tests.amd.sim.memory import Arena, Bytes, Index, Known

PAGE_BYTES = 1 << 16
_WRITTEN = np.ones(PAGE_BYTES, bool)


class ProcessLock:
    """Held by one process at a time, by one thread of each. A process that ends lets go of it."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        self._depth = 0

    def __enter__(self) -> None:
        if self._depth == 0:
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX)
        self._depth += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._depth -= 1
        if self._depth == 0:
            fcntl.lockf(self._descriptor, fcntl.LOCK_UN)


class HostMemory(Arena):
    """At most a page at its true address. Everything in it counts as written: the host may have done so.

    numpy moves bytes one by one. The lock makes of them the undivided words that kernels rely on, and exchanges.
    """

    def __init__(self, name: str, base: int, size: int, lock: ProcessLock) -> None:
        self.name = name
        self.base = base
        self.bytes = np.frombuffer((ctypes.c_uint8 * size).from_address(base), np.uint8)
        self.defined = _WRITTEN[:size]
        self.lock = lock

    def fetch(self, index: Index) -> tuple[Bytes, Known]:
        with self.lock:
            return super().fetch(index)

    def put(self, index: Index, data: Bytes) -> None:
        with self.lock:
            self.bytes[index] = data


def pages(name: str, base: int, size: int, lock: ProcessLock) -> list[HostMemory]:
    """A range as arenas: what simulated caches keep of one has its size."""
    return [
        HostMemory(f"{name}, from byte {at}", base + at, min(PAGE_BYTES, size - at), lock)
        for at in range(0, size, PAGE_BYTES)
    ]
