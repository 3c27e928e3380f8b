"""Memory of others: where it comes from, so that it can be mapped once more, here and in the peers' processes."""

from __future__ import annotations

import fcntl
import mmap
import os
from typing import TYPE_CHECKING, NamedTuple

from mori import _core
from mori.cco import growth
from mori.cco.windows import ImportedMemory

if TYPE_CHECKING:
    from mori.cco.communicator import Communicator

_REMEDY = {
    "host": "pass an address in memory of Communicator.alloc_mem, in a memfd or in another shared mapping whose "
    "descriptor is open, such as that of a torch tensor after share_memory_()",
    "cuda": "pass the base address of memory of cuMemCreate, with CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR",
    "hip": "pass the base address of memory of hipMemCreate, with hipMemHandleTypePosixFileDescriptor",
}


def import_memory(communicator: Communicator, address: int, size: int, what: str, tracked: bool) -> ImportedMemory:
    """An alias of `size` bytes at `address`. RuntimeError, with the remedy, for memory that cannot be shared."""
    here, rank, ranks = communicator.target, communicator.rank, communicator.nranks
    if size <= 0:
        raise RuntimeError(f"{what}: size must be positive, got {size}")
    begin = 0
    try:
        if here.is_device:
            symmetric = _core.SymmetricMemory.import_gpu(
                here.name, rank, ranks, size, communicator.device.index, _core.HANDLE_POSIX_DESCRIPTOR, address
            )
        else:
            found = _locate(address, size)
            begin = found.begin
            symmetric = _core.SymmetricMemory.import_host(rank, ranks, size, found.descriptor, begin)
    except (ValueError, RuntimeError) as problem:
        raise RuntimeError(f"{what}: {problem}; {_REMEDY[here.name]}") from problem
    return ImportedMemory(communicator, symmetric, begin, address, size, tracked)


def map_peers(communicator: Communicator, memory: ImportedMemory, timeout_s: float) -> None:
    """Collective, all ranks having agreed on the size: map every peer's part, once."""
    if memory.is_mapped_by_peers:
        return
    begins = communicator.allgather(memory.begin, "imported memory")
    for link in growth.swap_chunk(communicator._rendezvous, memory.symmetric, 0, timeout_s, begins).values():
        link.close()
    memory.is_mapped_by_peers = True


class _Place(NamedTuple):
    descriptor: int  # an open one of this process, not ours to close
    begin: int


def _locate(address: int, size: int) -> _Place:
    """The file that a mapping of this process shows at `address`, and from which byte on. ValueError: none that can be
    shared."""
    if address % mmap.PAGESIZE:
        raise ValueError(f"address {address:#x} is not a multiple of the page size, {mmap.PAGESIZE}")
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        for line in maps:
            span, access, begin, device, inode = line.split(maxsplit=5)[:5]
            low, high = (int(end, 16) for end in span.split("-"))
            if low <= address < high:
                break
        else:
            raise ValueError(f"there is no memory at {address:#x}")
    if access[:2] != "rw" or access[3] != "s" or inode == "0":
        raise ValueError(f"the memory at {address:#x} belongs to this process alone")
    if address + size > high:
        raise ValueError(f"the mapping has {high - address} bytes from {address:#x} on, {size} were asked for")
    major, minor = (int(part, 16) for part in device.split(":"))
    for name in os.listdir("/proc/self/fd"):
        descriptor = int(name)
        try:
            about = os.fstat(descriptor)
            mode = fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE
        except OSError:  # that of the listing itself, or one that another thread has closed
            continue
        same = (about.st_ino, os.major(about.st_dev), os.minor(about.st_dev)) == (int(inode), major, minor)
        if same and mode == os.O_RDWR:
            return _Place(descriptor, int(begin, 16) + address - low)
    raise ValueError(f"no descriptor of the memory at {address:#x} is open for reading and writing in this process")
