"""The programs of tests/python/ops/dispatch_combine_v2, as a user starts them and with a fault planted."""

from __future__ import annotations

import re

import pytest

from tests.package.commands import ROOT, python
from tests.parity.faults import planted
from tests.python.ops.dispatch_combine_v2 import bench_ep
from tests.python.ops.dispatch_combine_v2.ranks import Rank
from tests.rank_worker import RankContext
from tests.ranks import pool
from tests.v1.exercise import environment
from tests.v2.ranks import communicator

FOLDER = ROOT / "tests" / "python" / "ops" / "dispatch_combine_v2"
SMALL = {"HIDDEN": "64", "TOPK": "3", "EPR": "2", "SWEEP": "4,9", "CT": "7", "ITERS": "2", "WARMUP": "1"}
POINT = r"ct=\d+ \[hip/(eager|graph)\] dispatch [\d.]+ us \([\d.]+ GB/s\) combine [\d.]+ us .* pair [\d.]+ us recv~\d+"


@pytest.mark.parametrize(
    ("program", "says"),
    [
        ("test_graph_capture.py", ["# GRAPH-CAPTURE: PASS ct=7 replays=5 ranks=2 backend=hip on cpu"]),
        (
            "test_ep_backend_parity.py",
            [
                "# PARITY ct=4 v1/hip against v2/hip: PASS",
                "# PARITY ct=9 v1/hip against v2/hip: PASS",
                "# PARITY: backend flydsl does not load here, v1 took its place",
            ],
        ),
    ],
)
def test_a_program_without_torchrun(program: str, says: list[str]):
    result = python(str(FOLDER / program), MORI_TARGET="host", **SMALL)
    assert result.returncode == 0, result.stderr
    assert [line for line in result.stdout.splitlines() if line.startswith("#")] == says


def bench(context: RankContext, variables: dict[str, str], fault: str | None) -> tuple[bool, list[str]]:
    this = Rank(context.rank, context.world_size, communicator(context))
    with environment(*(SMALL | variables).items()), planted(fault):
        return bench_ep.program(this), this.lines


@pytest.mark.parametrize(
    ("variables", "verified"),
    [
        ({}, "4/4 points verified"),
        ({"DISP": "fp8", "COMBINE_IN": "staged", "ROUTE": "ring"}, "4/4 points verified"),
        ({"DISP": "fp4", "ROUTE": "noself"}, "0/4 points verified (fp4 is not compared)"),
        ({"CHECK": "0", "DBN": "3", "DWPB": "2", "CBN": "5", "CWPB": "4"}, "0/4 points verified (CHECK=0)"),
        ({"MODES": "graph", "LATE_US": "100"}, "2/2 points verified"),
    ],
)
def test_the_benchmark(variables: dict[str, str], verified: str):
    for passed, lines in pool(2).run(bench, variables, None):
        assert passed, lines
        assert lines[0].startswith("# EP2 hidden=64 backends=hip modes=")
        assert lines[-1] == f"# PASS: 0 failed, {verified}"
        assert all(re.fullmatch(POINT, line) for line in lines[1:-1]), lines


def test_the_benchmark_times_nothing_that_is_wrong():
    for passed, lines in pool(2).run(bench, {"MODES": "eager", "SWEEP": "9"}, "result view"):
        assert not passed
        assert lines[1:] == ["ct=9 [hip/eager] CHECK FAIL", "# FAIL: 1 failed, 0/1 points verified"]


def test_the_benchmark_knows_its_words():
    outcomes = pool(2).outcomes(bench, {"ROUTE": "star"}, None)
    assert all("use rand, ring or noself" in (outcome.failure or "") for outcome in outcomes)
