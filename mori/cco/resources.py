"""What a communicator hands out and must take back, and the first of such things: memory."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import torch.utils.dlpack

from mori import _core
from mori.cco.allocator import Block
from mori.cco.whole import whole

if TYPE_CHECKING:
    from mori.cco.communicator import Communicator


class CCOResource:
    """Something that lives on a communicator until `close()`, which is idempotent.

    One that is `tracked` is closed with the communicator at the latest.
    """

    def __init__(self, communicator: Communicator, tracked: bool = True) -> None:
        self._communicator = communicator
        self._open = True
        if tracked:
            communicator._resources.append(self)

    @property
    def is_valid(self) -> bool:
        return self._open

    def close(self) -> None:
        """Give the resource back. Further use raises RuntimeError."""
        if self._open:
            self._open = False
            try:
                self._release()
            finally:
                self._communicator._untrack(self)

    def _release(self) -> None:
        raise NotImplementedError

    def _check(self) -> None:
        if not self._open:
            raise RuntimeError(f"this {type(self).__name__} has already been closed")


class AllocatedMemory(CCOResource):
    """`size` bytes of symmetric memory, at the same `offset` of every rank's slice.

    `close()` only marks the block free. It is used again after a later collective call in which every rank has
    closed it and holds no view of it; a view stays valid memory until it dies.
    """

    def __init__(self, communicator: Communicator, block: Block | None, size: int, tracked: bool = True) -> None:
        self.size = size
        self._block = block
        self._native = None
        if block is not None:
            self._native = _core.MemoryBlock(communicator._memory, block.offset, block.size)
        super().__init__(communicator, tracked)

    @property
    def offset(self) -> int:
        """Bytes from the start of the slice; 0 for an allocation of no bytes."""
        self._check()
        return self._block.offset if self._block else 0

    @property
    def ptr(self) -> int:
        """Address in this process of this rank's bytes; 0 for an allocation of no bytes."""
        self._check()
        if self._block is None:
            return 0
        return int(self._communicator._memory.address(self._communicator.rank, self._block.offset))

    @property
    def symmetric(self) -> _core.SymmetricMemory:
        """What the block lies in."""
        return self._communicator._memory

    @property
    def native(self) -> _core.MemoryBlock:
        """The block that native code keeps alive."""
        self._check()
        if self._native is None:
            raise RuntimeError("an allocation of no bytes has no memory to use")
        return self._native

    def view(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype, peer: int | None = None) -> torch.Tensor:
        """A tensor of `shape` and `dtype` over the block from byte `offset` on, in the slice of `peer` (default: own).

        It aliases symmetric memory and keeps the mapping alive, also after `close()` and the communicator's end.
        TypeError for numbers that are no ints, ValueError if it would reach beyond the block.
        """
        offset, shape = whole(offset, "offset"), tuple(whole(extent, "an extent of shape") for extent in shape)
        if any(extent < 0 for extent in shape):
            raise ValueError(f"a view has no extent below 0, got {shape}")
        if not isinstance(dtype, torch.dtype):
            raise TypeError(f"dtype must be a torch.dtype, got {dtype!r}")
        size = math.prod(shape) * dtype.itemsize
        if offset < 0 or offset + size > self.size:
            raise ValueError(f"a view of {size} bytes at {offset} reaches beyond the {self.size} bytes of the block")
        owner = self._communicator.rank if peer is None else whole(peer, "peer")
        if not 0 <= owner < self._communicator.nranks:
            raise ValueError(f"peer {owner} is not a rank of this communicator of {self._communicator.nranks}")
        raw = torch.utils.dlpack.from_dlpack(self.native.view(offset, size, owner))
        return raw.view(dtype).view(shape)

    def _release(self) -> None:
        self._communicator._released.append((self._block, self._native))
        self._native = None
