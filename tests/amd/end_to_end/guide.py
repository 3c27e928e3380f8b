"""The guide's complete example at a shape that a simulator gets through, and what is put into it."""

from __future__ import annotations

import io
import sys

import torch

from mori.demo import adapt
from mori.demo.check import verify
from tests.amd.end_to_end.rank import simulate

WORLD, TOKENS, EXPERTS_PER_RANK = 2, 6, 4


def example(port: int) -> str:
    """The published text at a shape that a simulator gets through; gloo alone, as torch has no NCCL."""
    return adapt.adapted(
        adapt.Replacement("world_size = 8", f"world_size = {WORLD}"),
        adapt.Replacement('os.environ["MASTER_PORT"] = "12355"', f'os.environ["MASTER_PORT"] = "{port}"'),
        adapt.Replacement('backend="cpu:gloo,cuda:nccl"', 'backend="gloo"'),
        adapt.Replacement("        device_id=device,\n", ""),
        adapt.Replacement("hidden_dim=7168", "hidden_dim=96"),
        adapt.Replacement("max_num_inp_token_per_rank=4096", "max_num_inp_token_per_rank=8"),
        adapt.Replacement("num_experts_per_rank=32", f"num_experts_per_rank={EXPERTS_PER_RANK}"),
        adapt.Replacement("num_experts_per_token=8", "num_experts_per_token=2"),
        adapt.Replacement("num_tokens = 128", f"num_tokens = {TOKENS}"),
        adapt.Replacement("block_num=80, warp_per_block=16", "block_num=2, warp_per_block=2"),
        adapt.Replacement("block_num=80, warp_per_block=8", "block_num=2, warp_per_block=2"),
        adapt.Replacement(
            "    # Cleanup\n",
            "    check(rank, world_size, input_data, indices, dispatch_out, recv_count, combine_out)\n    # Cleanup\n",
        ),
    )


def begin() -> None:
    """In every process that runs the text, before it."""
    simulate()
    # Two processes write to one place: each line as a whole.
    assert isinstance(sys.stdout, io.TextIOWrapper)
    sys.stdout.reconfigure(line_buffering=True, write_through=False)


def check(rank: int, world_size: int, *tensors: torch.Tensor) -> None:
    """`mori.demo.check.verify`, for which the tensors are what they are: in host memory."""
    with torch._C.DisableTorchFunction():
        verify(rank, world_size, *tensors, experts_per_rank=EXPERTS_PER_RANK)
    print(f"rank {rank}: every bit as expected, {simulate().executed} instructions")
