"""What a communicator hands out, and what it must take back: memory and windows."""

from __future__ import annotations

import ctypes
import weakref
from typing import TYPE_CHECKING

import torch
import torch.utils.dlpack

from mori import _core
from mori.cco.allocator import Block

if TYPE_CHECKING:
    from mori.cco.communicator import Communicator


class CCOResource:
    """Something that lives on a communicator until `close()`, which is idempotent."""

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self._open = True
        communicator._resources.append(self)

    @property
    def is_valid(self) -> bool:
        return self._open

    def close(self) -> None:
        """Give the resource back. Further use raises RuntimeError."""
        if self._open:
            self._open = False
            self._release()
            self._communicator._resources.remove(self)

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

    def __init__(self, communicator: Communicator, block: Block | None, size: int) -> None:
        self.size = size
        self._block = block
        self._native = None
        if block is not None:
            self._native = _core.MemoryBlock(communicator._memory, block.offset, block.size)
        super().__init__(communicator)

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
    def native(self) -> _core.MemoryBlock:
        """The block that native code keeps alive."""
        self._check()
        if self._native is None:
            raise RuntimeError("an allocation of no bytes has no memory to use")
        return self._native

    def view(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype, peer: int | None = None) -> torch.Tensor:
        """A tensor of `shape` and `dtype` over the block from byte `offset` on, in the slice of `peer` (default: own).

        It aliases symmetric memory and keeps the mapping alive, also after `close()` and the communicator's end.
        ValueError if it would reach beyond the block.
        """
        count = 1
        for extent in shape:
            count *= extent
        size = count * dtype.itemsize
        if offset < 0 or offset + size > self.size:
            raise ValueError(f"a view of {size} bytes at {offset} reaches beyond the {self.size} bytes of the block")
        owner = self._communicator.rank if peer is None else peer
        if not 0 <= owner < self._communicator.nranks:
            raise ValueError(f"peer {owner} is not a rank of this communicator of {self._communicator.nranks}")
        raw = torch.utils.dlpack.from_dlpack(self.native.view(offset, size, owner))
        return raw.view(dtype).view(shape)

    def _release(self) -> None:
        self._communicator._released.append((self._block, self._native))
        self._native = None


class _WindowDescriptor(ctypes.Structure):
    """What a kernel gets: rank p's bytes of the window begin at base + p * stride."""

    _fields_ = (
        ("base", ctypes.c_uint64),
        ("stride", ctypes.c_uint64),
        ("rank", ctypes.c_uint32),
        ("nranks", ctypes.c_uint32),
    )


class RegisteredWindow(CCOResource):
    """A block that every rank has registered: peers may address it through `handle`."""

    def __init__(self, communicator: Communicator, memory: AllocatedMemory, size: int) -> None:
        self._memory = memory
        self._address = memory.ptr
        self.size = size
        # An empty view: while the window is open, the block is not used again, even if its memory is closed.
        self._hold = memory.native.view(0, 0, communicator.rank)
        self._descriptor = _WindowDescriptor(
            communicator._memory.base + memory.offset,
            communicator._memory.bytes_per_rank,
            communicator.rank,
            communicator.nranks,
        )
        super().__init__(communicator)
        _owners[self.handle] = communicator

    @property
    def handle(self) -> int:
        """Address of the window's descriptor, as kernels take it."""
        self._check()
        return ctypes.addressof(self._descriptor)

    @property
    def local_ptr(self) -> int:
        """Address in this process of this rank's bytes."""
        self._check()
        return self._address

    def _release(self) -> None:
        _owners.pop(ctypes.addressof(self._descriptor), None)
        self._hold = None


_owners: weakref.WeakValueDictionary[int, Communicator] = weakref.WeakValueDictionary()


def communicator_of_window(handle: int) -> Communicator | None:
    """The communicator that owns the window of this handle, or None if there is none (any more)."""
    return _owners.get(handle)
