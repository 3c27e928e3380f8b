"""Starts the ranks of an example: one process per GPU, or two processes on CPUs, or as many as `--ranks` says."""

from __future__ import annotations

import argparse
import multiprocessing
from collections.abc import Callable

import torch

from mori import target
from mori.cco import Communicator, UniqueId, get_unique_id

Example = Callable[[Communicator], str]
PER_RANK_BYTES = 256 << 20


def run_rank(example: Example, rank: int, nranks: int, unique_id: UniqueId) -> None:
    if target.current().is_device:
        torch.cuda.set_device(rank % torch.cuda.device_count())
    with Communicator.init(nranks, rank, unique_id, PER_RANK_BYTES) as comm:
        said = example(comm)
        print(f"rank {rank} of {nranks} on {comm.target.arch}: {said}", flush=True)


def main(example: Example) -> None:
    """Ends the program with status 1 if a rank fails."""
    on_gpus = target.current().is_device
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=torch.cuda.device_count() if on_gpus else 2)
    nranks = parser.parse_args().ranks
    unique_id = get_unique_id()  # this process need not be a rank, but must live until all have joined
    context = multiprocessing.get_context("spawn")
    ranks = [context.Process(target=run_rank, args=(example, rank, nranks, unique_id)) for rank in range(nranks)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    raise SystemExit(1 if any(process.exitcode for process in ranks) else 0)
