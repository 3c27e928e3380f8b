"""The measured calls and the rounds of the GPU tests, on CPUs: right results pass, wrong ones are found."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from benchmarks.expected import Routing, require_equal
from benchmarks.workload import SCALED, Case, Workload, build_op
from tests import reference
from tests.gpu.bridge import exercise_on_device
from tests.gpu.rounds import Ledger, Pattern, Shape, check_dispatch, new_op, play, varied_counts
from tests.rank_worker import RankContext
from tests.ranks import pool
from tests.v1 import cases
from tests.v1.cases import Step, routing
from tests.v1.exercise import require

WORLDS = [1, 2, 3]


@pytest.mark.parametrize("world_size", WORLDS)
def test_routing_and_sums_equal_the_reference(world_size: int):
    generator = np.random.default_rng(world_size)
    ids = [
        torch.from_numpy(generator.integers(-2, world_size * 3 + 1, (20, 5)).astype(np.int32))
        for _ in range(world_size)
    ]
    rows = [torch.randn(20, 8).bfloat16() for _ in range(world_size)]
    expected = reference.route(ids, 3)
    found = Routing(ids, 3)
    received = reference.dispatch(expected, rows, ids, [None] * world_size, None, 20)
    returned = [torch.randn(expected.received(rank), 8).bfloat16() for rank in range(world_size)]
    combined = reference.combine(expected, returned)
    for rank in range(world_size):
        assert int(found.counts[:, rank].sum()) == expected.received(rank)
        require_equal("rows", received[rank].rows, found.gather(rank, rows).view(torch.bfloat16))
        require_equal("sums", combined[rank], found.combine(rank, returned))


def pairs(context: RankContext, dtype: torch.dtype) -> tuple[int, int]:
    case = Case(context.world_size, 7, dtype, hidden=256, topk=4, experts=6)
    op = build_op(context.rank, case, 9)
    workload = Workload(context.rank, case, op, torch.device("cpu"), 6)
    for call in range(6):
        workload.dispatch(call)
        workload.combine(call, external=call % 2 == 1)
        workload.verify_dispatch(call)
        workload.verify_combine(call)
    with pytest.raises(RuntimeError, match=r"received|rows differ"):
        workload.verify_dispatch(3)
    workload.results[0][3, 5] += 1
    with pytest.raises(RuntimeError, match="1 of 7 rows differ, the first is row 3"):
        workload.verify_combine(5)
    return workload.data.busiest("dispatch", 6, case.small_bytes("dispatch"))


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, SCALED], ids=["bf16", "fp8"])
def test_a_workload_verifies_itself(world_size: int, dtype: torch.dtype):
    [first, *others] = pool(world_size).run(pairs, dtype)
    assert all(other == first for other in others), "ranks disagree about the bytes that they move"
    logical, wire = first
    row_bytes = 256 * dtype.itemsize
    assert 7 * row_bytes <= logical <= 7 * row_bytes * world_size
    assert wire == 0 if world_size == 1 else 0 < wire <= 7 * (row_bytes + 4 * 8 + 2 * 4 + 4)


def rounds(context: RankContext, dtype: torch.dtype) -> int:
    shape = Shape(max_tokens=10, hidden=12, topk=3, experts_per_rank=2, dtype=dtype)
    op, ledger = new_op(context, shape), Ledger(context)
    patterns = [Pattern(context, shape, each, varied_counts(each, context.world_size, 10)) for each in range(6)]
    for tag in range(40):
        play(op, patterns[tag * 5 % 6], tag, ledger, external=tag % 3 != 0)
    return ledger.settle()


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
def test_rounds_settle(world_size: int, dtype: torch.dtype):
    assert pool(world_size, MORI_TARGET="host").run(rounds, dtype) == [240] * world_size


def stale_round(context: RankContext) -> str:
    """What the round before left behind is not taken for the result of this one."""
    shape = Shape(max_tokens=10, hidden=12)
    op, ledger = new_op(context, shape), Ledger(context)
    pattern = Pattern(context, shape, 1, [10] * context.world_size)
    play(op, pattern, 4, ledger)
    require(ledger.settle() == 6, "a round has six checks")
    views = op.dispatch(pattern.tagged(pattern.values, 5), pattern.weights + 5, None, pattern.ids)
    check_dispatch(ledger, pattern, 6, views)
    try:
        ledger.settle()
    except AssertionError as error:
        return str(error)
    return ""


def test_a_stale_round_is_found():
    for text in pool(2, MORI_TARGET="host").run(stale_round):
        assert "of rows, first in round 6" in text and "of weights, first in round 6" in text


def test_the_bridge_runs_cases():
    indices = routing("any", [9, 4], 4, 3)
    steps = (Step("dispatch", indices), Step("combine"), Step("dispatch", indices), Step("combine", external=False))
    case = cases.Case(2, 24, 4, 3, 9, steps, dtype=torch.float4_e2m1fn_x2, scale_dim=3, values="bits")
    pool(2, MORI_TARGET="host").run(exercise_on_device, case)
