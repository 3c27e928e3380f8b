"""Arguments of the benchmarks, refused before anything is started, and the guide's example for GPUs."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
import torch
import typer
from typer.testing import CliRunner

from benchmarks import bench_ep, nccl_baseline
from mori.demo import adapt
from tests.gpu.guide import gpu_example


def invoke(module: ModuleType, *arguments: str):
    app = typer.Typer()
    app.command()(module.main)
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": "300", "NO_COLOR": "1", "TERM": "dumb"})


@pytest.mark.parametrize(
    "arguments,says",
    [
        (["--blocks", "8"], "come together"),
        (["--blocks", "8", "--warps", "8", "--sweep"], "leave out"),
        (["--dtypes", "bf16,int4"], "int4"),
        (["--tokens", "1,x"], "invalid literal"),
        (["--tokens", "0"], "at least 1"),
        (["--replays", "3"], "at least 20"),
        (["--experts", "255", "--gpus", "2"], "evenly"),
        (["--topk", "300"], "top-300"),
    ],
)
def test_impossible_measurements_are_refused(tmp_path: Path, arguments: list[str], says: str):
    result = invoke(bench_ep, "--output", str(tmp_path / "out.json"), *arguments)
    assert result.exit_code == 2 and says in result.output, result.output
    assert not (tmp_path / "out.json").exists()


@pytest.mark.parametrize("module", [bench_ep, nccl_baseline])
def test_options_reach_the_ranks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, module: ModuleType):
    seen = []

    def spawn(function, options, gpus):
        seen.append((function, options, gpus))
        return {"schema": "none"}

    monkeypatch.setattr(module, "spawn", spawn)
    for name in (
        "MORI_TARGET",
        "MORI_SHMEM_HEAP_SIZE",
        "MORI_TIMEOUT_S",
        "MORI_EP_LAUNCH_CONFIG_MODE",
        "NCCL_NVLS_ENABLE",
    ):
        monkeypatch.setenv(name, "")
    output = tmp_path / "folder" / "out.json"
    result = invoke(module, "--output", str(output), "--gpus", "2", "--tokens", "1,64", "--dtypes", "fp8")
    assert result.exit_code == 1 and "schema" in result.output, "a file without records is no result"
    [(function, options, gpus)] = seen
    assert function is module.run_rank and gpus == 2
    assert (options.tokens, options.dtypes, options.replays) == ((1, 64), ("fp8",), 20)
    assert options.case(64, "fp8").scales == 56 and options.case(64, "bf16").scales == 0
    assert options.case(64, "fp8").dtype == torch.float8_e4m3fn
    assert output.exists()


def test_the_source_of_the_geometry_is_told():
    assert bench_ep.Options(gpus=2).geometry_source == "auto"
    assert bench_ep.Options(gpus=2, grid=(64, 8)).geometry_source == "given"
    assert bench_ep.Options(gpus=2, sweep=True).geometry_source == "swept"


def test_the_example_for_gpus_differs_from_the_published_one_by_three_passages():
    text, published = gpu_example(2, 4711), adapt.published()
    added = [line.strip() for line in text.splitlines() if line not in published.splitlines()]
    assert added == [
        "check(rank, world_size, input_data, indices, dispatch_out, recv_count, combine_out)",
        'os.environ["MASTER_PORT"] = "4711"',
        "world_size = 2",
    ]
    assert len(text.splitlines()) == len(published.splitlines()) + 1
