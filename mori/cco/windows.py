"""Windows: memory that all ranks have registered, so that kernels of each may address that of the others."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Protocol

from mori import _core
from mori.cco.resources import CCOResource

if TYPE_CHECKING:
    from mori.cco.communicator import Communicator


class WindowMemory(Protocol):
    """What can be registered: at `offset` of each rank's part of `symmetric`."""

    @property
    def symmetric(self) -> _core.SymmetricMemory: ...
    @property
    def native(self) -> _core.MemoryBlock: ...
    @property
    def offset(self) -> int: ...
    @property
    def ptr(self) -> int: ...


class RegisteredWindow(CCOResource):
    """A block that every rank has registered: kernels address their own and their peers' bytes through `handle`."""

    def __init__(self, communicator: Communicator, memory: WindowMemory, size: int) -> None:
        self.size = size
        self._address = memory.ptr
        # An empty view: while the window is open, the block is not used again, even if its memory is closed.
        self._hold = memory.native.view(0, 0, communicator.rank)
        descriptor = _core.cco_window(
            memory.symmetric.base + memory.offset,
            memory.symmetric.bytes_per_rank,
            size,
            communicator.rank,
            communicator.nranks,
        )
        self._handle = communicator._area.add_window(descriptor)
        super().__init__(communicator)
        _owners[self._handle] = communicator

    @property
    def handle(self) -> int:
        """Address of the window's descriptor (`ccoWindow_t`), in memory of the communicator's device."""
        self._check()
        return self._handle

    @property
    def local_ptr(self) -> int:
        """Address in this process of this rank's bytes."""
        self._check()
        return self._address

    def _release(self) -> None:
        _owners.pop(self._handle, None)
        self._communicator._area.remove_window(self._handle)
        self._hold = None


class ImportedWindow(RegisteredWindow):
    """A window over memory that this library did not allocate. `local_ptr` is an alias of it.

    The owner must keep the memory as long as the window is open, and may keep using it at `ext_ptr`.
    """

    def __init__(self, communicator: Communicator, memory: ImportedMemory, size: int) -> None:
        self._memory = memory
        super().__init__(communicator, memory, size)

    @property
    def ext_ptr(self) -> int:
        """Where the memory was when it was imported."""
        self._check()
        return self._memory.ext_ptr

    def _release(self) -> None:
        super()._release()
        self._memory.close()


class ImportedMemory(CCOResource):
    """An alias of somebody else's memory, at `ptr`. Peers map it when it is registered."""

    def __init__(
        self,
        communicator: Communicator,
        symmetric: _core.SymmetricMemory,
        begin: int,
        ext_ptr: int,
        size: int,
        tracked: bool,
    ) -> None:
        self.ext_ptr = ext_ptr
        self.size = size
        self.begin = begin
        self.is_mapped_by_peers = False
        self._symmetric = symmetric
        super().__init__(communicator, tracked)

    @property
    def symmetric(self) -> _core.SymmetricMemory:
        self._check()
        return self._symmetric

    @property
    def native(self) -> _core.MemoryBlock:
        return _core.MemoryBlock(self.symmetric, 0, self.size)

    @property
    def offset(self) -> int:
        """0: the alias is a range of its own."""
        self._check()
        return 0

    @property
    def ptr(self) -> int:
        """Address of the alias."""
        return int(self.symmetric.address(self._communicator.rank, 0))

    def _release(self) -> None:
        del self._symmetric  # unmapped with the last view


_owners: weakref.WeakValueDictionary[int, Communicator] = weakref.WeakValueDictionary()


def communicator_of_window(handle: int) -> Communicator | None:
    """The communicator that owns the window of this handle, or None if there is none (any more)."""
    return _owners.get(handle)
