"""Ranks as threads of one process, and the kernels that the tests launch on them."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from mori.cco import Communicator, DevCommHandle, device, get_unique_id

SOURCE = Path(__file__).with_name("kernels.cpp")
SLICE_BYTES = 16 << 20


def outcome(function: Callable[..., Any], *args: Any) -> Any:
    """What the function returns, or the exception it raises."""
    try:
        return function(*args)
    except Exception as error:
        return error


def each(members: list[Any], function: Callable[[Any], Any]) -> list[Any]:
    """`function(member)` on a thread per member; outcomes in order."""
    with ThreadPoolExecutor(len(members)) as threads:
        return [future.result() for future in [threads.submit(outcome, function, member) for member in members]]


def all_well(outcomes: list[Any]) -> list[Any]:
    """Raises the first exception among outcomes."""
    for found in outcomes:
        if isinstance(found, Exception):
            raise found
    return outcomes


def join(nranks: int, per_rank_bytes: int = SLICE_BYTES) -> list[Communicator]:
    unique_id = get_unique_id()
    return all_well(each(list(range(nranks)), lambda rank: Communicator.init(nranks, rank, unique_id, per_rank_bytes)))


def leave(members: list[Communicator]) -> None:
    all_well(each(members, lambda comm: comm.destroy()))


@contextmanager
def joined(nranks: int, per_rank_bytes: int = SLICE_BYTES) -> Iterator[list[Communicator]]:
    members = join(nranks, per_rank_bytes)
    try:
        yield members
    finally:
        leave(members)


class BarrierArguments(ctypes.Structure):
    _fields_ = (
        ("comm", ctypes.c_uint64),
        ("data", ctypes.c_uint64),
        ("marks", ctypes.c_uint64),
        ("cycles", ctypes.c_uint64),
        ("rounds", ctypes.c_uint32),
        ("split", ctypes.c_uint32),
        ("hybrid", ctypes.c_uint32),
    )


class BarrierRank:
    """What one rank needs to go through barriers: memory, windows and the kernel. Collective to make."""

    def __init__(self, comm: Communicator, dev_comm: DevCommHandle, groups: int, coop: str = "ccoCoopBlock") -> None:
        self.comm = comm
        self.dev_comm = dev_comm
        self.groups = groups
        self.data = comm.alloc_mem(2 * groups * comm.nranks * 4)
        self.marks = comm.alloc_mem(groups * 2 * 4)
        self.windows = [comm.register_window(memory.ptr, memory.size) for memory in (self.data, self.marks)]
        self.kernel = device.compile(SOURCE, "barriers", comm, constants={"COOP": coop})

    def run(
        self,
        rounds: int,
        *,
        cycles: int = 0,
        split: bool = False,
        hybrid: bool = False,
        blocks: int | None = None,
        threads: int = 64,
    ) -> torch.Tensor:
        """(groups, 2): whether a group read a wrong word, and what its last wait returned. Waits for the kernel."""
        data, marks = self.windows
        arguments = BarrierArguments(self.dev_comm.ptr, data.handle, marks.handle, cycles, rounds, split, hybrid)
        self.kernel.launch(arguments, blocks=blocks or self.groups, threads=threads)
        return self.marks.view(0, (self.groups, 2), torch.int32).cpu().clone()


class Question(ctypes.Structure):
    _fields_ = (("comm", ctypes.c_uint64), ("address", ctypes.c_uint64), ("answers", ctypes.c_uint64))


def look_up(comm: Communicator, dev_comm: DevCommHandle, address: int) -> list[int]:
    """What a kernel of this rank finds in the descriptors: see kernels.cpp."""
    answers = comm.alloc_mem(13 * 8)
    device.compile(SOURCE, "look_up", comm).launch(Question(dev_comm.ptr, address, answers.ptr), threads=1)
    found = answers.view(0, (13,), torch.int64).tolist()
    answers.close()
    return found
