"""Addresses of the symmetric heap: which allocation an address belongs to, and where peers see it.

The communicator owns the memory. This table only remembers what `shmem_malloc` handed out as plain integers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from mori.cco.communicator import Communicator
    from mori.cco.resources import AllocatedMemory


class Place(NamedTuple):
    """A byte of symmetric memory: whose slice, and where in it."""

    rank: int
    offset: int


class Heap:
    """Allocations between one init and the next finalize, by the address given to the caller."""

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self._allocations: dict[int, AllocatedMemory] = {}
        self._slices: list[int] = []  # where each rank's slice begins in this process; known from the first block on

    def allocate(self, size_bytes: int, alignment_bytes: int, what: str) -> int:
        """Collective. Address of `size_bytes` bytes at an aligned offset; HeapExhausted when they do not fit."""
        memory = self._communicator.allocate_symmetric(
            size_bytes, what=what, agree={"alignment": alignment_bytes}, alignment=alignment_bytes
        )
        if not self._slices:
            views = (memory.view(0, (1,), torch.uint8, peer) for peer in range(self._communicator.nranks))
            self._slices = [view.data_ptr() - memory.offset for view in views]
        self._allocations[memory.ptr] = memory
        return memory.ptr

    def free(self, address: int) -> None:
        """Mark an allocation free. ValueError when the address is not the start of a live one."""
        memory = self._allocations.pop(address, None)
        if memory is None:
            raise ValueError(
                f"{address:#x} is not the address of a live allocation of the symmetric heap: it was never returned by "
                "shmem_malloc, or it was freed before"
            )
        memory.close()

    def place(self, address: int) -> Place | None:
        """The place of an address inside a live allocation, in whichever rank's slice; None for any other address."""
        for rank, begin in enumerate(self._slices):
            for memory in self._allocations.values():
                if memory.offset <= address - begin < memory.offset + memory.size:
                    return Place(rank, address - begin)
        return None

    def peer_address(self, address: int, peer: int) -> int:
        """Where this process reaches the peer's copy of a byte of its own; 0 outside the own allocations."""
        place = self.place(address)
        if place is None or place.rank != self._communicator.rank or not 0 <= peer < len(self._slices):
            return 0
        return self._slices[peer] + place.offset

    def tensor(self, address: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Tensor over memory of any rank's slice. It keeps the mapping alive. ValueError outside the allocations."""
        place = self.place(address)
        if place is None:
            raise ValueError(f"{address:#x} lies in no live allocation of the symmetric heap")
        return self._communicator.view(place.offset, tuple(shape), dtype, peer=place.rank)
