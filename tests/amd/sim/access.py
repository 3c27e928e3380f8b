"""Where the lanes of a memory instruction reach: global memory, their block's LDS, their own scratch memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from tests.amd.sim.caches import Port
from tests.amd.sim.errors import Refused
from tests.amd.sim.in_flight import Space
from tests.amd.sim.memory import Bytes, Index, check_known, spread, updated
from tests.amd.sim.operands import PRIVATE_APERTURE, SHARED_APERTURE
from tests.amd.sim.wave import Wave

NONE_UNDEFINED = np.zeros((0, 0), bool)


class Loaded(NamedTuple):
    data: Bytes
    """[lanes, size]"""
    undefined: NDArray[np.bool_]
    """The same shape, or empty if every byte has a value."""


class Access(Protocol):
    space: Space

    @property
    def extent(self) -> tuple[int, int]:
        """Without the size of what is accessed there."""

    def load(self, size: int) -> Loaded: ...

    def store(self, data: Bytes, undefined: NDArray[np.bool_]) -> None: ...

    def atomic(self, lane: int, size: int, update: Callable[[int], int]) -> int: ...


def _check_aligned(address: int, size: int) -> None:
    if address % size != 0:
        raise Refused(f"an atomic of {size} bytes at {address:#x} is not aligned")


@dataclass
class GlobalAccess:
    port: Port
    addresses: NDArray[np.uint64]
    scope: str
    space = Space.GLOBAL

    @property
    def extent(self) -> tuple[int, int]:
        return int(self.addresses.min()), int(self.addresses.max())

    def load(self, size: int) -> Loaded:
        return Loaded(self.port.load(self.addresses, size, self.scope), NONE_UNDEFINED)

    def store(self, data: Bytes, undefined: NDArray[np.bool_]) -> None:
        self.port.store(self.addresses, data, self.scope)

    def atomic(self, lane: int, size: int, update: Callable[[int], int]) -> int:
        _check_aligned(int(self.addresses[lane]), size)
        return self.port.atomic(int(self.addresses[lane]), size, self.scope, update)


@dataclass
class LdsAccess:
    """A wave's LDS operations keep their order, whatever they touch."""

    wave: Wave
    offsets: NDArray[np.int64]
    space = Space.LDS
    extent = (0, 1 << 32)

    def _index(self, size: int) -> Index:
        have = len(self.wave.block.lds.bytes)
        outside = (self.offsets < 0) | (self.offsets + size > have)
        if outside.any():
            raise Refused(f"{size} bytes at {self.offsets[outside][0]} of LDS are out of bounds, the block has {have}")
        return spread(self.offsets, size)

    def load(self, size: int) -> Loaded:
        index, lds = self._index(size), self.wave.block.lds
        data, known = lds.fetch(index)
        check_known(lds, index, known)
        return Loaded(data, NONE_UNDEFINED)

    def store(self, data: Bytes, undefined: NDArray[np.bool_]) -> None:
        self.wave.block.lds.put(self._index(data.shape[1]), data)

    def atomic(self, lane: int, size: int, update: Callable[[int], int]) -> int:
        one = LdsAccess(self.wave, self.offsets[lane : lane + 1])
        _check_aligned(int(one.offsets[0]), size)
        old, new = updated(one.load(size).data, update)
        one.store(new[None, :], NONE_UNDEFINED)
        return old


@dataclass
class ScratchAccess:
    """Scratch memory keeps registers for later, undefined ones too."""

    wave: Wave
    lanes: NDArray[np.intp]
    offsets: NDArray[np.int64]
    space = Space.SCRATCH

    @property
    def extent(self) -> tuple[int, int]:
        return int(self.offsets.min()), int(self.offsets.max())

    def _index(self, size: int) -> tuple[NDArray[np.intp], NDArray[np.int64]]:
        have = self.wave.scratch.shape[1]
        if self.offsets.min() < 0 or self.offsets.max() + size > have:
            raise Refused(f"{size} bytes at {self.offsets.max()} of scratch are out of bounds, a lane has {have}")
        return self.lanes[:, None], self.offsets[:, None] + np.arange(size)

    def load(self, size: int) -> Loaded:
        index = self._index(size)
        return Loaded(self.wave.scratch[index], ~self.wave.scratch_defined[index])

    def store(self, data: Bytes, undefined: NDArray[np.bool_]) -> None:
        index = self._index(data.shape[1])
        self.wave.scratch[index] = data
        self.wave.scratch_defined[index] = ~undefined if undefined.size else True

    def atomic(self, lane: int, size: int, update: Callable[[int], int]) -> int:
        raise Refused("an atomic on scratch memory")


class Reach(NamedTuple):
    """The lanes of an instruction that are switched on, as positions in its arrays, that reach one space."""

    positions: NDArray[np.intp]
    access: Access


def flat_reaches(wave: Wave, lanes: NDArray[np.intp], addresses: NDArray[np.uint64], scope: str) -> list[Reach]:
    """By the aperture that each address lies in; above that it may have the number of its lane."""
    high = addresses >> np.uint64(32) & np.uint64(0xFFFFF)
    shared, private = (high == np.uint64(aperture >> 32) for aperture in (SHARED_APERTURE, PRIVATE_APERTURE))
    if not shared.any() and not private.any():
        return [Reach(np.arange(len(addresses)), GlobalAccess(wave.block.port, addresses, scope))]
    low = (addresses & np.uint64(0xFFFFFFFF)).astype(np.int64)
    reaches = []
    if shared.any():
        reaches.append(Reach(np.flatnonzero(shared), LdsAccess(wave, low[shared])))
    if private.any():
        reaches.append(Reach(np.flatnonzero(private), ScratchAccess(wave, lanes[private], low[private])))
    rest = ~(shared | private)
    if rest.any():
        reaches.append(Reach(np.flatnonzero(rest), GlobalAccess(wave.block.port, addresses[rest], scope)))
    return reaches
