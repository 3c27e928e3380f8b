"""Batches that take minutes or gigabytes: the oldest kernel type round after round, and 65536 tokens per rank."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mori import target
from tests.python.ops.check import half, rounds_of
from tests.python.ops.data import new_op, random_counts
from tests.python.ops.harness import device_of, ranks_of
from tests.python.ops.points import DTYPES, Point, matrix
from tests.rank_worker import RankContext
from tests.v1.exercise import require

MANY_TOKENS = matrix(kernel=("InterNode",), dtype=tuple(DTYPES), scale_dim=(56,), max_tokens=(4096,))
ROUNDS = 4
LARGE_BYTES = 14 << 30
"""What 65536 tokens of two ranks take on CPUs."""


def many_rounds(context: RankContext, point: Point) -> None:
    rounds_of(context, point, [random_counts(point, context.world_size, number) for number in range(ROUNDS)])


@pytest.mark.full
@pytest.mark.parametrize("point", MANY_TOKENS, ids=lambda point: point.id)
def test_rounds_of_the_oldest_kernel_type(point: Point):
    ranks_of().run(many_rounds, point, timeout_s=170)


def large(context: RankContext, kernel: str) -> None:
    """The count and the last rows; every row would take longer to check than all other tests."""
    point = Point(kernel=kernel, max_tokens=65536)
    op, world = new_op(context, point), context.world_size
    device = device_of(context)
    ids = torch.arange(point.max_tokens * point.topk, dtype=torch.int32) * 7 % (world * point.experts_per_rank)
    ids = ids.view(-1, point.topk).to(device)
    numbers = torch.arange(point.max_tokens, device=device)
    rows = torch.zeros(point.max_tokens, point.hidden, dtype=torch.bfloat16, device=device)
    for column, values in ((0, numbers % 256), (1, numbers // 256), (2, context.rank), (-1, numbers % 7)):
        rows[:, column] = values
    received, *_, count = op.dispatch(rows, None, None, ids)
    half(op, "dispatch_recv")
    mine = (ids // point.experts_per_rank == context.rank).any(dim=1).nonzero()[:, 0]
    require(int(count[0]) == world * len(mine), f"received {int(count[0])} rows, expected {world * len(mine)}")
    token = int(mine[-1])
    last = received[int(count[0]) - 1, [0, 1, 2, -1]].tolist()
    require(last == [token % 256, token // 256, world - 1, token % 7], f"the last row is {last}")
    out, _ = op.combine(received, None, ids)
    half(op, "combine_recv")
    copies = len((ids[-1] // point.experts_per_rank).unique())
    require(torch.equal(out[-1], rows[-1] * copies), "the last token came back as something else")


@pytest.mark.full
@pytest.mark.parametrize("kernel", ["IntraNode", "InterNodeV1"])
def test_65536_tokens_per_rank(kernel: str):
    memory = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    if not target.current().is_device and int(memory["MemAvailable"].split()[0]) * 1024 < LARGE_BYTES:
        pytest.skip(f"needs {LARGE_BYTES >> 30} GiB of free memory")
    ranks = ranks_of(MORI_SHMEM_HEAP_SIZE="16G", MORI_TIMEOUT_S="100")
    try:
        ranks.run(large, kernel, timeout_s=170)
    finally:
        ranks_of().run(nothing)  # another world: the memory of this one is given back


def nothing(context: RankContext) -> None:
    context.barrier()
