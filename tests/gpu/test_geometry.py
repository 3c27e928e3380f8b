"""Results do not depend on how many blocks and warps a launch has, nor on how tokens are split among them."""

from __future__ import annotations

import pytest
import torch

from tests.gpu.ranks import GpuPool
from tests.gpu.rounds import Ledger, Pattern, Shape, new_op, play
from tests.rank_worker import RankContext

pytestmark = pytest.mark.gpu

BLOCKS = (*range(1, 18), 80, 128, 256)
WARPS = tuple(range(1, 17))


def every_geometry(context: RankContext, shape: Shape, counts: list[int], seed: int) -> int:
    op = new_op(context, shape)
    pattern, ledger = Pattern(context, shape, seed, counts), Ledger(context)
    tag = 0
    for blocks in BLOCKS:
        for warps in WARPS:
            play(op, pattern, tag, ledger, external=tag % 2 == 0, block_num=blocks, warp_per_block=warps)
            tag += 1
        op.check()
    return ledger.settle()


@pytest.mark.parametrize("dtype,hidden", [(torch.float32, 7), (torch.bfloat16, 672)], ids=["f32x7", "bf16x672"])
@pytest.mark.parametrize("tokens", [1, 3, 300])
def test_every_number_of_blocks_and_warps_gives_the_same_bits(
    gpus: GpuPool, seed: int, tokens: int, dtype: torch.dtype, hidden: int
):
    shape = Shape(max_tokens=300, hidden=hidden, topk=5, dtype=dtype)
    counts = [tokens] + [min(2 * tokens, 300)] * (gpus.world_size - 1)
    assert min(gpus.run(every_geometry, shape, counts, seed)) == 6 * len(BLOCKS) * len(WARPS)


def geometries_differ_by_rank(context: RankContext, shape: Shape, counts: list[int], seed: int) -> int:
    op = new_op(context, shape)
    pattern, ledger = Pattern(context, shape, seed, counts), Ledger(context)
    for tag in range(60):
        blocks = BLOCKS[(tag * 7 + context.rank * 5) % len(BLOCKS)]
        warps = WARPS[(tag * 3 + context.rank * 11) % len(WARPS)]
        play(op, pattern, tag, ledger, block_num=blocks, warp_per_block=warps)
    op.check()
    return ledger.settle()


def test_ranks_may_launch_different_geometries(gpus: GpuPool, seed: int):
    shape = Shape(max_tokens=200, hidden=96, topk=8)
    assert min(gpus.run(geometries_differ_by_rank, shape, [200] * gpus.world_size, seed)) == 6 * 60
