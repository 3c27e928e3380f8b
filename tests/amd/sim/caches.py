"""The way from a block to memory: caches that are not kept coherent by themselves.

A block sees memory through a cache of its own and one of its device, both of which write back late, and may hold what
has become stale, until a fence or chance says otherwise. A real GPU's caches are coherent more often than these; code
that obeys its memory model cannot tell the difference. An access of a scope goes past the caches that the scope's
members do not share.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from tests.amd.sim.memory import Arena, Bytes, Index, Known, Memory, Update, check_known, spread, updated

LINE_BYTES, PREFETCHED_LINES = 128, 64
SCOPES = ("wave", "workgroup", "agent", "system")


class Level(Protocol):
    def fetch(self, arena: Arena, index: Index) -> tuple[Bytes, Known]: ...

    def put(self, arena: Arena, index: Index, data: Bytes) -> None: ...


class Arenas:
    """The lowest level: memory itself."""

    def fetch(self, arena: Arena, index: Index) -> tuple[Bytes, Known]:
        return arena.fetch(index)

    def put(self, arena: Arena, index: Index, data: Bytes) -> None:
        arena.put(index, data)


ABSENT, CLEAN, DIRTY = 0, 1, 2


class Shadow(NamedTuple):
    """What a cache holds of an arena."""

    bytes: Bytes
    known: Known
    state: NDArray[np.uint8]


class Cache:
    """`shared_by` is the widest scope whose members all look through this cache."""

    def __init__(self, below: Level, shared_by: str) -> None:
        self._below = below
        self.shared_by = SCOPES.index(shared_by)
        self._shadows: dict[Arena, Shadow] = {}

    def fetch(self, arena: Arena, index: Index) -> tuple[Bytes, Known]:
        shadow = self._shadow(arena)
        if (absent := shadow.state[index] == ABSENT).any():
            lines = np.unique(index[absent] // LINE_BYTES)
            whole = spread(lines * LINE_BYTES, LINE_BYTES).reshape(-1)
            whole = whole[whole < len(arena.bytes)]
            missing = whole[shadow.state[whole] == ABSENT]
            shadow.bytes[missing], shadow.known[missing] = self._below.fetch(arena, missing)
            shadow.state[missing] = CLEAN
        return shadow.bytes[index], shadow.known[index]

    def put(self, arena: Arena, index: Index, data: Bytes) -> None:
        shadow = self._shadow(arena)
        shadow.bytes[index] = data
        shadow.known[index] = True
        shadow.state[index] = DIRTY

    def step_aside(self, arena: Arena, index: Index) -> None:
        """Before an access that goes past this cache: what was written here goes first."""
        if arena in self._shadows:
            shadow = self._shadows[arena]
            dirty = np.unique(index[shadow.state[index] == DIRTY])
            if len(dirty):
                self._below.put(arena, dirty, shadow.bytes[dirty])
            shadow.state[index] = ABSENT

    def write_back(self) -> None:
        for arena, shadow in self._shadows.items():
            dirty = np.flatnonzero(shadow.state == DIRTY)
            if len(dirty):
                self._below.put(arena, dirty, shadow.bytes[dirty])
                shadow.state[dirty] = CLEAN

    def invalidate(self) -> None:
        for shadow in self._shadows.values():
            shadow.state[shadow.state == CLEAN] = ABSENT

    def prefetch(self, rng: random.Random) -> None:
        """Brings some lines of all that was ever looked at."""
        for arena, shadow in self._shadows.items():
            first = rng.randrange(len(shadow.state)) // LINE_BYTES * LINE_BYTES
            self.fetch(arena, np.arange(first, min(len(shadow.state), first + PREFETCHED_LINES * LINE_BYTES)))

    def _shadow(self, arena: Arena) -> Shadow:
        if arena not in self._shadows:
            size = len(arena.bytes)
            self._shadows[arena] = Shadow(np.zeros(size, np.uint8), np.zeros(size, bool), np.zeros(size, np.uint8))
        return self._shadows[arena]


class Port:
    """A block's view of memory."""

    def __init__(self, memory: Memory, device_cache: Cache) -> None:
        self._memory = memory
        self._lowest = Arenas()
        self._caches = [Cache(device_cache, "workgroup"), device_cache]

    def load(self, addresses: NDArray[np.uint64], size: int, scope: str) -> Bytes:
        data, known = self.load_unchecked(addresses, size, scope)
        if not known.all():
            for share in self._memory.shares(addresses, size):
                check_known(share.arena, share.offsets, known[share.rows])
        return data

    def load_unchecked(self, addresses: NDArray[np.uint64], size: int, scope: str) -> tuple[Bytes, Known]:
        data, known = np.empty((len(addresses), size), np.uint8), np.empty((len(addresses), size), bool)
        for arena, rows, index in self._memory.shares(addresses, size):
            data[rows], known[rows] = self._level(arena, index, scope).fetch(arena, index)
        return data, known

    def store(self, addresses: NDArray[np.uint64], data: Bytes, scope: str) -> None:
        for arena, rows, index in self._memory.shares(addresses, data.shape[1]):
            self._level(arena, index, scope).put(arena, index, data[rows])

    def atomic(self, address: int, size: int, scope: str, update: Update) -> int:
        """Where its scope is coherent. Nothing comes between the old value and the new one."""
        (share,) = self._memory.shares(np.array([address], np.uint64), size)
        level = self._level(share.arena, share.offsets, scope)
        with share.arena.lock:
            old, known = level.fetch(share.arena, share.offsets)
            check_known(share.arena, share.offsets, known)
            value, new = updated(old, update)
            level.put(share.arena, share.offsets, new[None, :])
        return value

    def write_back(self, scope: str) -> None:
        """A release: what was stored reaches the members of the scope."""
        for cache in self._caches:
            if cache.shared_by < SCOPES.index(scope):
                cache.write_back()

    def invalidate(self, scope: str) -> None:
        """An acquire: what the members of the scope stored is seen from now on."""
        for cache in self._caches:
            if cache.shared_by < SCOPES.index(scope):
                cache.invalidate()

    def disturb(self, rng: random.Random) -> None:
        """Caches write back, lose and bring what they like."""
        cache = rng.choice(self._caches)
        happenings: list[Callable[[], None]] = [cache.write_back, cache.invalidate, lambda: cache.prefetch(rng)]
        rng.choice(happenings)()

    def _level(self, arena: Arena, index: Index, scope: str) -> Level:
        wanted = SCOPES.index(scope)
        for cache in self._caches:
            if cache.shared_by >= wanted:
                return cache
            cache.step_aside(arena, index)
        return self._lowest
