"""One rank that runs every kernel at small shapes and checks the results: python -m tests.gpu.small_shapes W STORE RANK

For tools that watch a process (sanitize.py): no pools, no forks, and an orderly end. Prints a line per case.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace

import torch

from tests.gpu.bridge import exercise_on_device
from tests.gpu.ranks import Membership
from tests.gpu.test_kernel_types import EXPERTS, TOKENS, TOPK, by_expert, handles, steps_of
from tests.rank_worker import RankContext, World
from tests.v1.cases import KERNEL_TYPES, QUANT_TYPES, Case, Step, routing


def cases(world: int) -> dict[str, Case]:
    """Both paths, calls cut in two, every dtype and wire, rows that vectors fit and do not fit, chunks of tokens."""
    base = Case(world, 96, TOPK, EXPERTS, TOKENS, steps_of(world), values="special")
    found = {kernel: replace(base, kernel_type=kernel) for kernel in KERNEL_TYPES}
    found |= {quant: replace(base, hidden=240, quant_type=quant) for quant in QUANT_TYPES[1:]}
    for dtype in (torch.float32, torch.float8_e4m3fn, torch.float4_e2m1fn_x2):
        found[str(dtype)] = replace(base, dtype=dtype, combine_dtype=dtype, hidden=14, scale_dim=7, scale_bytes=4)
    found["zero copy"] = replace(base, hidden=7, steps=steps_of(world, external=False))
    indices = routing("any", [700, 3, *[0] * (world - 2)], 3, 2)
    steps = (Step("dispatch", indices), Step("combine"), Step("combine"))
    found["chunks of tokens"] = Case(world, 8, 3, 2, 700, steps, values="bits", grid=(3, 2))
    return found


def programs(world: int) -> dict[str, tuple[Callable[..., None], tuple[object, ...]]]:
    found: dict[str, tuple[Callable[..., None], tuple[object, ...]]] = {
        name: (exercise_on_device, (case,)) for name, case in cases(world).items()
    }
    return found | {"handles": (handles, (1,)), "rows by expert": (by_expert, (2, torch.bfloat16))}


def main(world: int, store: str, rank: int) -> None:
    context = RankContext(rank, World(world, bare=True))
    membership = Membership(context, store)
    for name, (function, arguments) in programs(world).items():
        function(context, *arguments)
        torch.cuda.synchronize()
        print(name, flush=True)
    context.barrier()
    del membership


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
