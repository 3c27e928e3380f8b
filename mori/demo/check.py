"""What the demo holds the example's results against: every received row and every combined row, bit for bit.

`check` is the one line that the CPU text has more than the published one; each rank calls it.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

from mori.demo.adapt import EXPERTS_PER_RANK
from mori.demo.measure import measure

REPORT_VARIABLE = "EP_DEMO_REPORT"  # file for the measurements of rank 0; not set: nothing is measured
FLIP_VARIABLE = "EP_DEMO_FLIP_BIT"  # set: one bit of what rank 3 received is flipped, so that the check must fail


class Mismatch(Exception):
    """A result is not what the inputs of all ranks say it must be."""


def check(
    rank: int,
    world_size: int,
    input_data: torch.Tensor,
    indices: torch.Tensor,
    dispatch_out: torch.Tensor,
    recv_count: torch.Tensor,
    combine_out: torch.Tensor,
) -> None:
    """Raises Mismatch, the same on every rank, unless rows, their order and every bit are right on all of them.

    Measures afterwards if the demo asked for it.
    """
    if rank == 3 and os.environ.get(FLIP_VARIABLE):
        dispatch_out.view(torch.int16)[5, 70] ^= 1
    problem = ""
    try:
        verify(rank, world_size, input_data, indices, dispatch_out, recv_count, combine_out)
    except Mismatch as mismatch:
        problem = str(mismatch)
    # Without this word the others would wait for the rank that found something and report only that it is gone.
    problems = [""] * world_size
    dist.all_gather_object(problems, problem)
    if any(problems):
        raise Mismatch(next(filter(None, problems)))
    if os.environ.get(REPORT_VARIABLE):
        measure(rank, world_size, input_data, indices, os.environ[REPORT_VARIABLE])


def verify(
    rank: int,
    world_size: int,
    input_data: torch.Tensor,
    indices: torch.Tensor,
    dispatch_out: torch.Tensor,
    recv_count: torch.Tensor,
    combine_out: torch.Tensor,
    experts_per_rank: int = EXPERTS_PER_RANK,
) -> None:
    """Collective. Holds the results of identity experts against the inputs of all ranks; Mismatch says where not."""
    destinations = indices // experts_per_rank
    inputs = all_gather(input_data, world_size)
    comes_here = (all_gather(destinations, world_size) == rank).any(dim=2)
    expected = inputs[comes_here]  # ordered by (source rank, token), once per token whatever the number of its experts
    received = int(recv_count[0])
    if received != len(expected):
        raise Mismatch(f"rank {rank}: received {received} rows, expected {len(expected)}")
    compare(f"rank {rank}: received", dispatch_out[:received], expected)

    # Every rank that got a token returned it unchanged. Adding up to 8 equal bf16 values is exact in f32, so this
    # product, rounded once, is what the sum must be; + 0.0 because a sum that starts at +0.0 never ends at -0.0.
    ranks = torch.arange(world_size)
    copies = (destinations[:, :, None] == ranks).any(dim=1).sum(dim=1)
    summed = (input_data.float() * copies[:, None] + 0.0).to(input_data.dtype)
    compare(f"rank {rank}: combined", combine_out[: len(summed)], summed)


def compare(what: str, got: torch.Tensor, expected: torch.Tensor) -> None:
    """Mismatch names the first row that differs and both values. Tensors [rows, columns] of bf16."""
    wrong = (got.view(torch.int16) != expected.view(torch.int16)).nonzero()
    if len(wrong):
        row, column = wrong[0].tolist()
        raise Mismatch(
            f"{what} row {row}, column {column}: got {_show(got[row, column])}, "
            f"expected {_show(expected[row, column])} ({len(wrong)} values differ)"
        )


def _show(value: torch.Tensor) -> str:
    return f"{value.item()!r} (0x{int(value.view(torch.int16).item()) & 0xFFFF:04x})"


def all_gather(tensor: torch.Tensor, world_size: int) -> torch.Tensor:
    """[world_size, *tensor.shape], as bytes over the process group."""
    mine = tensor.contiguous().view(torch.uint8)
    everyone = [torch.empty_like(mine) for _ in range(world_size)]
    dist.all_gather(everyone, mine)
    return torch.stack(everyone).view(tensor.dtype)
