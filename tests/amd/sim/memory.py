"""Memory: arenas at made-up addresses, and what is known of every byte.

Accesses name the lanes' addresses, one each; every one must lie inside one arena. A byte that nobody wrote is
undefined, and reading it is refused.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tests.amd.sim.errors import Refused

Bytes = NDArray[np.uint8]
Known = NDArray[np.bool_]
Index = NDArray[np.int64]


class Arena:
    """`size` bytes of memory that belong together; what lies beyond is out of bounds."""

    lock: AbstractContextManager[Any] = nullcontext()
    """Held by whoever must not be disturbed between reading and writing."""

    def __init__(self, name: str, base: int, size: int, defined: bool = False) -> None:
        self.name = name
        self.base = base
        self.bytes = np.zeros(size, np.uint8)
        self.defined = np.full(size, defined)

    @property
    def end(self) -> int:
        return self.base + len(self.bytes)

    def write(self, offset: int, data: bytes | NDArray[Any]) -> None:
        """By the host."""
        raw = np.frombuffer(data, np.uint8) if isinstance(data, bytes) else data.reshape(-1).view(np.uint8)
        self._inside(offset, len(raw))
        self.bytes[offset : offset + len(raw)] = raw
        self.defined[offset : offset + len(raw)] = True

    def read(self, offset: int, count: int) -> Bytes:
        """By the host; a copy. Bytes that nobody wrote are refused here too."""
        self._inside(offset, count)
        span = np.arange(offset, offset + count)
        check_known(self, span, self.defined[span])
        return self.bytes[span]

    def _inside(self, offset: int, count: int) -> None:
        if not 0 <= offset <= len(self.bytes) - count:
            raise IndexError(f"{count} bytes at {offset} of {self.name}, which has {len(self.bytes)}")

    def fetch(self, index: Index) -> tuple[Bytes, Known]:
        return self.bytes[index], self.defined[index]

    def put(self, index: Index, data: Bytes) -> None:
        """Where accesses overlap, the last lane wins."""
        self.bytes[index] = data
        self.defined[index] = True


def check_known(arena: Arena, index: Index, known: Known) -> None:
    if not known.all():
        raise Refused(f"byte {int(index[~known].flat[0])} of {arena.name} is read, but was never written")


def spread(offsets: Index, size: int) -> Index:
    """[accesses, size] offsets of all bytes."""
    return offsets[:, None] + np.arange(size)


class Share(NamedTuple):
    """Those of several accesses that lie in one arena."""

    arena: Arena
    rows: Any
    """Their positions among all, or a slice if that is all of them."""
    offsets: Index
    """[accesses, size], of every byte."""


class Memory:
    """All memory that the devices reach, by address."""

    def __init__(self) -> None:
        self._arenas: list[Arena] = []

    def add(self, arena: Arena) -> Arena:
        index = bisect.bisect_right(self._arenas, arena.base, key=lambda one: one.base)
        for other in self._arenas[max(0, index - 1) : index + 1]:
            if arena.base < other.end and other.base < arena.end:
                raise ValueError(f"{arena.name} at {arena.base:#x} overlaps {other.name}")
        self._arenas.insert(index, arena)
        return arena

    def find(self, address: int, size: int) -> Arena:
        index = bisect.bisect_right(self._arenas, address, key=lambda arena: arena.base) - 1
        if index >= 0 and address + size <= self._arenas[index].end:
            return self._arenas[index]
        near = f"the nearest memory below is {self._arenas[index].name}" if index >= 0 else "no memory lies below"
        raise Refused(f"{size} bytes at {address:#x} are out of bounds; {near}")

    def shares(self, addresses: NDArray[np.uint64], size: int) -> Iterator[Share]:
        arena = self.find(int(addresses[0]), size)
        offsets = (addresses - np.uint64(arena.base)).view(np.int64)
        if offsets.min() >= 0 and offsets.max() <= len(arena.bytes) - size:
            yield Share(arena, slice(None), spread(offsets, size))
            return
        arenas = [self.find(address, size) for address in addresses.tolist()]
        for arena in dict.fromkeys(arenas):
            rows = np.flatnonzero([other is arena for other in arenas])
            yield Share(arena, rows, spread((addresses[rows] - np.uint64(arena.base)).view(np.int64), size))


Update = Callable[[int], int]


def updated(old: Bytes, update: Update) -> tuple[int, Bytes]:
    """An atomic's old value, and the bytes of the new one."""
    value = int.from_bytes(old.tobytes(), "little")
    new = update(value) & ((1 << 8 * old.size) - 1)
    return value, np.frombuffer(new.to_bytes(old.size, "little"), np.uint8)
