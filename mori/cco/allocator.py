"""Where blocks lie in a rank's slice of symmetric memory.

Every rank runs its own copy of this allocator. It is deterministic, so as long as ranks make the same requests the
offsets agree; collective calls compare `fingerprint()` to be sure. A block returns to the allocator only in a
collective call, once every rank has let go of it (see `Communicator`).
"""

from __future__ import annotations

import zlib
from typing import NamedTuple


class Block(NamedTuple):
    offset: int
    size: int


class SliceAllocator:
    """First fit over bytes [first, first + capacity) of a slice."""

    def __init__(self, first: int, capacity: int) -> None:
        self.capacity = capacity
        self._first = first
        self._blocks: list[Block] = []  # in use, ascending

    @property
    def used(self) -> int:
        """Bytes in blocks, released ones that await a collective call included."""
        return sum(block.size for block in self._blocks)

    def allocate(self, size: int, alignment: int) -> Block | None:
        """A block of `size` bytes (> 0) at a multiple of `alignment`, or None if no gap is large enough."""
        at = self._first
        for index, block in enumerate([*self._blocks, Block(self._first + self.capacity, 0)]):
            offset = -(-at // alignment) * alignment
            if offset + size <= block.offset:
                found = Block(offset, size)
                self._blocks.insert(index, found)
                return found
            at = block.offset + block.size
        return None

    def release(self, block: Block) -> None:
        self._blocks.remove(block)

    def fingerprint(self) -> int:
        """A number that is equal on two ranks exactly when (but for chance) their blocks are."""
        return zlib.crc32(repr(self._blocks).encode())
