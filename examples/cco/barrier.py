"""Ranks meet at a barrier some thousand times; what each wrote before it, all others find behind it.

python examples/cco/barrier.py [--ranks 4]
"""

from __future__ import annotations

import ctypes
import time
from pathlib import Path

import torch
from launcher import main

from mori.cco import CCODevCommRequirements, Communicator, device

BLOCKS, THREADS, ROUNDS = 2, 64, 2000


class Arguments(ctypes.Structure):
    _fields_ = (("comm", ctypes.c_uint64), ("window", ctypes.c_uint64), ("rounds", ctypes.c_uint32))


def example(comm: Communicator) -> str:
    counts = 2 * BLOCKS * comm.nranks
    memory = comm.alloc_mem(4 * (counts + BLOCKS))
    window = comm.register_window(memory.ptr, memory.size)
    dev_comm = comm.create_dev_comm(CCODevCommRequirements(lsa_barrier_count=BLOCKS))
    kernel = device.compile(Path(__file__).with_suffix(".cpp"), "count_rounds", comm)
    comm.barrier()  # the first launch of a process may take long, and the others would wait in their kernels

    begin_s = time.perf_counter()
    kernel.launch(Arguments(dev_comm.ptr, window.handle, ROUNDS), blocks=BLOCKS, threads=THREADS)
    wrong = memory.view(4 * counts, (BLOCKS,), torch.int32).tolist()  # waits for the kernel
    if any(wrong):
        raise RuntimeError(f"counts that were not those of the round: {wrong} by block")
    return f"{ROUNDS} rounds, {(time.perf_counter() - begin_s) / ROUNDS * 1e6:.1f} us each"


if __name__ == "__main__":
    main(example)
