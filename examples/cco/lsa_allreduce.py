"""All-reduce in one kernel: each block adds up its share of the elements for all ranks, in ascending order of rank.

python examples/cco/lsa_allreduce.py [--ranks 4]
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch
from launcher import main

from mori.cco import CCODevCommRequirements, Communicator, device

BLOCKS, THREADS, COUNT = 4, 256, 100_003


class Arguments(ctypes.Structure):
    _fields_ = (("comm", ctypes.c_uint64), ("values", ctypes.c_uint64), ("count", ctypes.c_uint64))


def values_of(rank: int) -> torch.Tensor:
    return torch.randn(COUNT, generator=torch.Generator().manual_seed(rank))


def example(comm: Communicator) -> str:
    memory = comm.alloc_mem(4 * COUNT)
    window = comm.register_window(memory.ptr, memory.size)
    dev_comm = comm.create_dev_comm(CCODevCommRequirements(lsa_barrier_count=BLOCKS))
    kernel = device.compile(Path(__file__).with_suffix(".cpp"), "all_reduce", comm)

    values = memory.view(0, (COUNT,), torch.float32)
    values.copy_(values_of(comm.rank))
    kernel.launch(Arguments(dev_comm.ptr, window.handle, COUNT), blocks=BLOCKS, threads=THREADS)

    expected = torch.zeros(COUNT)
    for rank in range(comm.nranks):
        expected += values_of(rank)
    if not torch.equal(values.cpu(), expected):
        raise RuntimeError("sums differ from those of the same additions in torch")
    return f"{COUNT} sums over {comm.nranks} ranks, equal bit for bit to torch's"


if __name__ == "__main__":
    main(example)
