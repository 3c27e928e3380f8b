"""Where descriptors for kernels lie: in the rank's own slice of symmetric memory, below all blocks.

So they are in memory of the device without an allocation of their own, at addresses that last as long as the slice.
Only this rank's kernels read them. csrc/include/mori/cco.hpp has the layouts.
"""

from __future__ import annotations

import os
import struct

from mori import _core

AREA_END = 2 << 20  # blocks begin here
_ALIGNMENT = 256
_WINDOWS = int(_core.COMM_CONTROL_BYTES)  # the control block lies before
_COMMUNICATORS = -(-(_WINDOWS + _core.CCO_WINDOW_TABLE_BYTES) // _ALIGNMENT) * _ALIGNMENT
_COMMUNICATOR_STRIDE = -(-_core.CCO_DEVICE_COMMUNICATOR_BYTES // _ALIGNMENT) * _ALIGNMENT
_COMMUNICATOR_COUNT = (AREA_END - _COMMUNICATORS) // _COMMUNICATOR_STRIDE


class _Slots:
    """Places of one size; the lowest free one is taken, and is free again once its content is given up."""

    def __init__(self, first: int, stride: int, count: int, what: str) -> None:
        self.first = first
        self.stride = stride
        self.count = count
        self.what = what
        self.used = 0  # places that were ever taken
        self._free: set[int] = set()

    def take(self) -> int:
        """An offset. RuntimeError when all places are taken."""
        if self._free:
            number = min(self._free)
            self._free.remove(number)
        elif self.used == self.count:
            raise RuntimeError(f"all {self.count} {self.what} of this communicator are open: close some first")
        else:
            number = self.used
            self.used += 1
        return self.first + number * self.stride

    def give_back(self, offset: int) -> None:
        self._free.add((offset - self.first) // self.stride)


class DescriptorArea:
    """The descriptors of one rank. Adding waits for the legacy stream of a GPU, removing for all its kernels.

    A forked child, which shares the slice of a rank on CPUs, removes nothing.
    """

    def __init__(self, memory: _core.SymmetricMemory, rank: int) -> None:
        self._memory = memory
        self._begin = int(memory.address(rank, 0))
        self._owner_pid = os.getpid()
        first = _WINDOWS + _core.CCO_FIRST_WINDOW
        self._windows = _Slots(first, _core.CCO_WINDOW_BYTES, _core.CCO_MAX_WINDOWS, "windows")
        self._communicators = _Slots(_COMMUNICATORS, _COMMUNICATOR_STRIDE, _COMMUNICATOR_COUNT, "device communicators")

    @property
    def windows(self) -> int:
        """Address of the table that `findWindow` searches."""
        return self._begin + _WINDOWS

    def add_window(self, descriptor: bytes) -> int:
        """The address of the descriptor."""
        offset = self._windows.take()
        self._memory.write(offset, descriptor)
        self._memory.write(_WINDOWS, struct.pack("Q", self._windows.used))
        return self._begin + offset

    def remove_window(self, address: int) -> None:
        if os.getpid() != self._owner_pid:
            return
        self._memory.synchronize()
        self._memory.write(address - self._begin, bytes(_core.CCO_WINDOW_BYTES))
        self._windows.give_back(address - self._begin)

    def add_communicator(self, descriptor: bytes) -> int:
        """The address of the descriptor."""
        offset = self._communicators.take()
        self._memory.write(offset, descriptor)
        return self._begin + offset

    def remove_communicator(self, address: int) -> None:
        self._memory.synchronize()
        self._communicators.give_back(address - self._begin)
