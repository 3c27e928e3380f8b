"""All to all: a kernel of each rank stores its values straight into the memory of every rank.

python examples/cco/lsa_put.py [--ranks 4]
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch
from launcher import main

from mori.cco import CCODevCommRequirements, Communicator, device

BLOCKS, THREADS, COUNT = 4, 256, 100_000


class Arguments(ctypes.Structure):
    _fields_ = (
        ("comm", ctypes.c_uint64),
        ("source", ctypes.c_uint64),
        ("landing", ctypes.c_uint64),
        ("count", ctypes.c_uint64),
    )


def values_of(rank: int) -> torch.Tensor:
    return rank * 1_000_000 + torch.arange(COUNT, dtype=torch.int32)


def example(comm: Communicator) -> str:
    source, landing = comm.alloc_mem(4 * COUNT), comm.alloc_mem(4 * COUNT * comm.nranks)
    source_window = comm.register_window(source.ptr, source.size)
    landing_window = comm.register_window(landing.ptr, landing.size)
    dev_comm = comm.create_dev_comm(CCODevCommRequirements(lsa_barrier_count=BLOCKS))
    kernel = device.compile(Path(__file__).with_suffix(".cpp"), "put", comm)

    source.view(0, (COUNT,), torch.int32).copy_(values_of(comm.rank))
    arguments = Arguments(dev_comm.ptr, source_window.handle, landing_window.handle, COUNT)
    kernel.launch(arguments, blocks=BLOCKS, threads=THREADS)

    received = landing.view(0, (comm.nranks, COUNT), torch.int32).cpu()
    if not torch.equal(received, torch.stack([values_of(rank) for rank in range(comm.nranks)])):
        raise RuntimeError("values are not those that the other ranks sent")
    return f"{COUNT} values from each of {comm.nranks} ranks, all as sent"


if __name__ == "__main__":
    main(example)
