"""The guide's complete example on GPUs: the published text, with the number of GPUs, a free port and a check put in."""

from __future__ import annotations

import torch

from mori.demo import adapt
from mori.demo.check import verify


def gpu_example(world_size: int, port: int | str) -> str:
    """ValueError if the published text has not each passage exactly once."""
    return adapt.adapted(
        adapt.Replacement("world_size = 8", f"world_size = {world_size}"),
        adapt.Replacement('os.environ["MASTER_PORT"] = "12355"', f'os.environ["MASTER_PORT"] = "{port}"'),
        adapt.Replacement(
            "    # Cleanup\n",
            "    check(rank, world_size, input_data, indices, dispatch_out, recv_count, combine_out)\n    # Cleanup\n",
        ),
    )


def check(rank: int, world_size: int, *tensors: torch.Tensor) -> None:
    """`mori.demo.check.verify` on copies in host memory, which the gloo half of the process group exchanges."""
    verify(rank, world_size, *(tensor.cpu() for tensor in tensors))
    print(f"rank {rank}: every bit as expected", flush=True)
