"""The programs that the guides name, started as a user starts them, and the example with every wire of combine."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.package.commands import ROOT
from tests.rank_worker import RankContext
from tests.ranks import pool

BENCHMARK = "tests/python/ops/bench_dispatch_combine.py"
EXAMPLE = "examples/ops/dispatch_combine/test_dispatch_combine.py"
SMALL = ("--max-tokens=7", "--hidden-dim=96", "--iters=2", "--graph-replay-iters=3")
RUNS = {"benchmark": (BENCHMARK, *SMALL), "example": (EXAMPLE, "--dtype=fp4")}
SAYS = {"benchmark": "verified: ", "example": "all results as expected"}


@pytest.mark.parametrize("name", RUNS)
def test_it_runs_from_anywhere(name: str, tmp_path: Path):
    program, *arguments = RUNS[name]
    result = subprocess.run(
        [sys.executable, ROOT / program, *arguments],
        cwd=tmp_path,
        env=os.environ | {"MORI_TARGET": "host", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert SAYS[name] in result.stdout


def example_on_rank(context: RankContext, dtype: str, quant_type: str, rendezvous: str) -> None:
    spec = importlib.util.spec_from_file_location("example", ROOT / EXAMPLE)
    assert spec is not None and spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    rows = example.FP4 if dtype == "fp4" else torch.bfloat16
    example.run(context.rank, context.world_size, rows, quant_type, rendezvous)


@pytest.mark.parametrize("dtype", ["bf16", "fp4"])
@pytest.mark.parametrize("quant_type", ["none", "fp8_direct_cast", "fp8_blockwise"])
def test_the_example(dtype: str, quant_type: str, tmp_path: Path):
    pool(2, bare=True).run(example_on_rank, dtype, quant_type, str(tmp_path / "rendezvous"))
