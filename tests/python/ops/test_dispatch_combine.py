"""Dispatch and combine over the parameter matrices of the tests that releases come with.

    pytest tests/python/ops/test_dispatch_combine.py                          the representative points
    pytest tests/python/ops/test_dispatch_combine.py -m "full or not full"    all of them

On a machine with GPUs every GPU is a rank; else two processes on CPUs are.

Scaling. Top-k, hidden size, tokens per rank, experts per rank, scales and dtypes are those of the releases' tests. What
is scaled is W, 8 there, here what the machine has (2 on CPUs), and with it only what is defined by W: `spread` routing
(one expert of every rank, so top-k = W), receive caps (multiples of W), ranks per node (W: one node). Of the oldest
kernel type 4 rounds are run instead of 128. Without `full` a matrix is reduced to points that hold every pair of values
of two of its axes between them.

Points: 661, of which 96 are representative.

Beyond the releases' tests: sentinels really are in the ids, caps really are below W x M, rows of a replay are checked,
fp4 combines are checked, and all unquantised results are compared bit for bit.
"""

from __future__ import annotations

import re
import subprocess
import sys
from typing import Any

import pytest

from tests.package.commands import ROOT
from tests.python.ops.check import combine, dispatch, own_tensors, rounds_of
from tests.python.ops.data import Data, new_op, random_counts
from tests.python.ops.harness import ranks_of
from tests.python.ops.points import MATRICES, Point, representative
from tests.rank_worker import RankContext
from tests.v1.exercise import require


def parameters() -> list[Any]:
    found = []
    for name, points in MATRICES.items():
        kept = representative(points)
        for point in points:
            marks = [] if point in kept else [pytest.mark.full]
            found.append(pytest.param(point, id=f"{name}-{point.id}", marks=marks))
    return found


def two_rounds(context: RankContext, point: Point) -> None:
    rounds_of(context, point, [random_counts(point, context.world_size, number) for number in range(2)])


@pytest.mark.parametrize("point", parameters())
def test_point(point: Point):
    ranks_of().run(two_rounds, point)


def weightless(context: RankContext, point: Point) -> str | None:
    op = new_op(context, point)
    data = Data(point, context.world_size, 0, [point.max_tokens] * context.world_size)
    combine(op, data, context, dispatch(op, data, context), weights=False)
    return getattr(op, "_last_combine_kernel_name", None)


@pytest.mark.parametrize("topk", [8, 9])
@pytest.mark.parametrize("quant_type", ["fp8_blockwise", "fp4_blockwise"])
def test_blockwise_combine_without_weights(topk: int, quant_type: str):
    ranks_of().run(weightless, Point(topk=topk, quant_type=quant_type))


@pytest.mark.parametrize("quant_type", ["fp8_blockwise", "fp4_blockwise"])
def test_the_kernel_name_that_releases_report(quant_type: str):
    for name in ranks_of().run(weightless, Point(max_tokens=1, quant_type=quant_type)):
        assert name is not None and name.startswith(f"EpCombineIntraNodeKernel_bf16_nop2p_{quant_type}"), name


REFUSED = {
    "blockwise of another dtype": (Point(dtype="fp8_e4m3", quant_type="fp8_blockwise"), "bf16"),
    "blockwise zero copy": (Point(external=False, quant_type="fp8_blockwise"), "zero.copy|use_external_inp_buf"),
    "fp4 zero copy": (Point(external=False, quant_type="fp4_blockwise"), "zero.copy|use_external_inp_buf"),
    "fp8 blocks in V1": (Point(kernel="InterNodeV1", quant_type="fp8_blockwise"), "only supports"),
    "fp8 blocks in V1LL": (Point(kernel="InterNodeV1LL", quant_type="fp8_blockwise"), "only supports"),
    "fp4 blocks in AsyncLL": (Point(kernel="AsyncLL", quant_type="fp4_blockwise"), "only supports"),
}


def refused(context: RankContext, name: str) -> None:
    """At the latest combine says so, and on every rank."""
    point, says = REFUSED[name]
    with pytest.raises(ValueError, match=says):
        op = new_op(context, point)
        data = Data(point, context.world_size, 0, [4] * context.world_size)
        combine(op, data, context, dispatch(op, data, context))


@pytest.mark.parametrize("name", REFUSED)
def test_quantised_combines_that_are_refused(name: str):
    ranks_of().run(refused, name)


def expert_counts(context: RankContext, point: Point) -> None:
    op, asynchronous = new_op(context, point), point.kernel == "AsyncLL"
    for number in range(2):
        data = Data(point, context.world_size, number, random_counts(point, context.world_size, number))
        dispatch(op, data, context, call_local_expert_count=not asynchronous)
        if asynchronous:
            views = op.dispatch_send(*own_tensors(data, context))
            op.dispatch_recv(call_local_expert_count=True)
            combine(op, data, context, views)
        ids = data.received(context.rank).indices
        first = context.rank * point.experts_per_rank
        expected = [int((ids == first + expert).sum()) for expert in range(point.experts_per_rank)]
        require(op.local_expert_count.tolist() == expected, f"{op.local_expert_count.tolist()}, expected {expected}")


@pytest.mark.parametrize("kernel", ["IntraNode", "InterNodeV1", "AsyncLL"])
@pytest.mark.parametrize("max_tokens", [1, 32])
def test_local_expert_count(max_tokens: int, kernel: str):
    ranks_of().run(expert_counts, Point(kernel=kernel, hidden=4096, max_tokens=max_tokens))


NONE_ALL_HALF = ([0, 1], [1, 0], [0, 0], [1, 1], [0, 2], [2, 2])


def idle_ranks(context: RankContext, point: Point) -> None:
    """Patterns of how much of M a rank sends: nothing, all, half. One op serves them all."""
    share = {0: 0, 1: point.max_tokens, 2: point.max_tokens // 2}
    counts = [[share[pattern[rank % 2]] for rank in range(context.world_size)] for pattern in NONE_ALL_HALF]
    rounds_of(context, point, counts)


@pytest.mark.parametrize("kernel", ["AsyncLL", "IntraNode", "InterNodeV1LL"])
def test_ranks_without_tokens(kernel: str):
    ranks_of().run(idle_ranks, Point(kernel=kernel, hidden=4096, scale_dim=32))


def test_the_number_of_points_is_the_published_one():
    assert __doc__ is not None
    published, representatives = map(int, re.findall(r"Points: (\d+), of which (\d+)", __doc__)[0])
    assert sum(not parameter.marks for parameter in parameters()) == representatives
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", "full or not full", "-k", "test_point"]
    listing = subprocess.run([*command, __file__], cwd=ROOT, capture_output=True, text=True, check=True)
    assert listing.stdout.count("::test_point[") == published
