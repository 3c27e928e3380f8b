"""Thousands of calls without any synchronisation, delays inside the kernels, and call numbers about to wrap."""

from __future__ import annotations

import pytest
import torch

from tests.gpu.ranks import GpuPool, gpu_pool
from tests.gpu.rounds import Ledger, Pattern, Shape, new_op, play, varied_counts
from tests.rank_worker import RankContext

pytestmark = pytest.mark.gpu

PATTERNS = 24
NEAR_WRAP = {"2^31": 2**31 - 3, "2^32": 2**32 - 3, "2^40": 2**40 - 3}


def patterns_of(context: RankContext, shape: Shape, seed: int, number: int = PATTERNS) -> list[Pattern]:
    return [
        Pattern(context, shape, seed + each, varied_counts(seed + each, context.world_size, shape.max_tokens))
        for each in range(number)
    ]


def storm(context: RankContext, shape: Shape, seed: int, rounds: int, longest_us: int) -> int:
    """All ranks play the same rounds; none ever waits for its device."""
    op, ledger = new_op(context, shape), Ledger(context)
    patterns = patterns_of(context, shape, seed)
    if longest_us:
        op._plan.set_test_delays(context.rank + 1, longest_us)
    for tag in range(rounds):
        # 7 and 24 have no common divisor: neighbours are unlike, and every pattern follows every remainder of 3.
        play(op, patterns[tag * 7 % PATTERNS], tag, ledger, external=tag % 3 != 0)
    op.check()
    return ledger.settle()


@pytest.mark.parametrize("longest_us", [0, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
def test_two_thousand_pairs(seed: int, dtype: torch.dtype, longest_us: int):
    gpus = gpu_pool(ENABLE_PROFILER="1") if longest_us else gpu_pool()
    shape = Shape(max_tokens=48, hidden=96, topk=4, dtype=dtype)
    assert min(gpus.run(storm, shape, seed, 2000, longest_us, timeout_s=120)) == 6 * 2000


def test_pairs_of_large_batches(gpus: GpuPool, seed: int):
    shape = Shape(max_tokens=1500, hidden=720, topk=8, dtype=torch.bfloat16)
    assert min(gpus.run(storm, shape, seed, 200, 0, timeout_s=120)) == 6 * 200


def storm_from(context: RankContext, shape: Shape, seed: int, call_numbers: list[int], rounds: int) -> int:
    op, ledger = new_op(context, shape), Ledger(context)
    patterns = patterns_of(context, shape, seed, 4)
    tag = 0
    for call_number in call_numbers:
        op.check()  # nothing of the last numbers is in flight
        context.barrier()
        op._plan.set_call_number(call_number)
        context.barrier()
        for _ in range(rounds):
            play(op, patterns[tag % 4], tag, ledger, external=tag % 2 == 0)
            tag += 1
    op.check()
    return ledger.settle()


@pytest.mark.parametrize("start", NEAR_WRAP.values(), ids=NEAR_WRAP.keys())
def test_call_numbers_pass_the_limits_of_integers(gpus: GpuPool, seed: int, start: int):
    assert min(gpus.run(storm_from, Shape(), seed, [start], 8)) == 6 * 8


def test_call_number_jumps_far_ahead_on_a_large_grid(gpus: GpuPool, seed: int):
    jump = 2**31 + 5
    shape = Shape(max_tokens=4000, hidden=16)
    numbers = [100, 100 + jump, 100 + 2 * jump]
    assert min(gpus.run(storm_from, shape, seed, numbers, 5)) == 6 * 15
