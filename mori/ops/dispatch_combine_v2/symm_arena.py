"""One window of symmetric memory per op, with named regions in it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from mori.cco import AllocatedMemory, Communicator, RegisteredWindow

REGION_ALIGNMENT = 256


def align_up(value: int, alignment: int) -> int:
    """The smallest multiple of `alignment` that is at least `value`."""
    return -(-value // alignment) * alignment


class SymmArena:
    """Regions at the same offsets on every rank, in one allocation and one window of `comm`. Collective.

    regions: (name, bytes), packed in this order, each at a multiple of 256. A name that comes twice means the last one.
    The arena accounts for two tracked resources of the communicator until `close()`. Views stay valid memory after it.

    HeapExhausted (a RuntimeError) if the communicator has no gap of that size; ConfigMismatch on all ranks if they ask
    for different sizes.
    """

    def __init__(self, comm: Communicator, regions: Iterable[tuple[str, int]]) -> None:
        self._places: dict[str, tuple[int, int]] = {}
        end = 0
        for name, size in regions:
            self._places[name] = end, size
            end = align_up(end + size, REGION_ALIGNMENT)
        self.total_bytes = max(end, REGION_ALIGNMENT)
        self._device = comm.device
        # Collective, so that memory which one rank lacks is an error of all.
        self._memory = comm.allocate_symmetric(self.total_bytes, "SymmArena")
        try:
            self._window: RegisteredWindow = comm.register_window(self._memory.ptr, self.total_bytes)
        except BaseException:
            self._memory.close()
            raise

    @property
    def memory(self) -> AllocatedMemory:
        """The allocation that the regions lie in."""
        return self._memory

    @property
    def handle(self) -> int:
        """Address of the window's descriptor, as kernels take it."""
        return self._window.handle

    @property
    def regions(self) -> tuple[str, ...]:
        """Names, in order."""
        return tuple(self._places)

    def has(self, name: str) -> bool:
        return name in self._places

    def offset(self, name: str) -> int:
        """Bytes from the start of the window; KeyError for an unknown name, here and below."""
        return self._places[name][0]

    def size(self, name: str) -> int:
        return self._places[name][1]

    def local_ptr(self, name: str) -> int:
        """Address in this process of this rank's bytes."""
        return self._window.local_ptr + self.offset(name)

    def view(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A contiguous tensor over the first bytes of this rank's region; it keeps the memory alive.

        A shape without elements aliases nothing. ValueError if the region is smaller.
        """
        if 0 in shape:
            return torch.empty(shape, dtype=dtype, device=self._device)
        needed = dtype.itemsize
        for extent in shape:
            needed *= extent
        if needed > self.size(name):
            raise ValueError(f"a view of {shape} {dtype} needs {needed} bytes, region {name} has {self.size(name)}")
        return self._memory.view(self.offset(name), shape, dtype)

    def zero(self, name: str | None = None) -> None:
        """Fill this rank's region, or all of the window, with zeros, in the order of the current stream."""
        offset, size = (0, self.total_bytes) if name is None else self._places[name]
        if size:
            self._memory.view(offset, (size,), torch.uint8).zero_()

    def close(self) -> None:
        """Give window and memory back. Idempotent; not collective."""
        self._window.close()
        self._memory.close()
