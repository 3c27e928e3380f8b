"""The way to AMD GPUs through a HIP runtime that has none; and the ABI where there is a header to compare with."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mori import _core
from mori.ops import device_code
from mori.ops.engine import EpShape
from tests.amd import hip_ranks
from tests.package.commands import ROOT, compile_cxx

HERE = Path(__file__).parent
CSRC = ROOT / "csrc"


@pytest.fixture(scope="module")
def runtime(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the fake runtime."""
    folder = tmp_path_factory.mktemp("hip")
    sources = [HERE / "fake_hip.cpp", CSRC / "runtime" / "host_support.cpp"]
    command = ["g++", "-std=c++20", "-O1", "-shared", "-fPIC", "-fvisibility=default", f"-I{CSRC}", *sources]
    command += ["-o", folder / "libamdhip64.so.7", "-pthread"]
    subprocess.run(command, check=True, timeout=300)
    return folder


def run(folder: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "LD_LIBRARY_PATH": str(folder), **variables}
    command = [sys.executable, *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=120)


def ask(folder: Path, **variables: str) -> str:
    """What the extension says when it is asked for the first GPU."""
    return run(folder, "-c", "from mori import _core; _core.gpu_device('hip', 0)", **variables).stderr


def test_two_ranks_dispatch_and_combine(runtime: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MORI_JIT_CACHE_DIR", str(tmp_path / "cache"))
    shape = EpShape(
        world_size=hip_ranks.WORLD,
        rank=0,
        max_tokens=hip_ranks.MAX_TOKENS,
        hidden_dim=hip_ranks.HIDDEN,
        max_element_bytes=2,
        scale_dim=0,
        scale_element_bytes=0,
        experts_per_rank=hip_ranks.EXPERTS,
        topk=hip_ranks.TOPK,
        max_recv_tokens=hip_ranks.WORLD * hip_ranks.MAX_TOKENS,
    )
    files = []
    for name in ("dispatch", "combine_bf16"):
        files.append(tmp_path / name)
        files[-1].write_bytes(device_code.kernel(name, shape, "gfx942"))
    log = tmp_path / "log"
    done = run(runtime, "-m", "tests.amd.hip_ranks", *map(str, files), FAKE_HIP_LOG=str(log))
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    # Both ranks' 5 tokens go to rank 0, every other one to rank 1 too.
    assert [state[0] for state in said["states"]] == [10, 4, 10, 4]
    assert [state[1] for state in said["states"]] == [1, 1, 2, 2]
    assert all(state[2][0] == 0 for state in said["states"])
    assert said["sums"] == [True, True]
    assert said["runs_on"] == "fake gfx942" and said["facts"]["multiprocessors"] == 4
    notes = log.read_text().splitlines()
    created = {note for note in notes if note.startswith("create")}
    assert created == {f"create uncached on {rank} by {rank}" for rank in (0, 1)}
    assert {note for note in notes if note.startswith("access")} == {"access for 0", "access for 1"}
    launches = [note.split() for note in notes if note.startswith("launch")]
    assert sorted((name, device) for _, name, _, _, device in launches) == [
        ("mori_combine_bf16", "0"),
        ("mori_combine_bf16", "1"),
        ("mori_dispatch", "0"),
        ("mori_dispatch", "1"),
    ]
    assert all(int(grid.partition("x")[2]) % 64 == 0 for _, _, grid, _, _ in launches)


@pytest.mark.parametrize(
    "variables, what",
    [
        ({"FAKE_HIP_VERSION": "60240000"}, "version 60240000, the hip target needs 70100000: ROCm 7.1 or later"),
        ({"FAKE_HIP_CLOCK_KHZ": "25000"}, "the clock of fake gfx942 runs at 25000 kHz; .* 100000 only"),
        ({"FAKE_HIP_VMM": "0"}, r"GPU 0 \(fake gfx942\) cannot share memory between processes"),
    ],
)
def test_what_does_not_fit_is_named(runtime: Path, variables: dict[str, str], what: str) -> None:
    with pytest.raises(RuntimeError, match=what):
        raise RuntimeError(ask(runtime, **variables))


def test_a_runtime_that_is_not_there_is_named(tmp_path: Path) -> None:
    said = ask(tmp_path)
    assert "the hip target needs the HIP runtime, but libamdhip64.so.7 cannot be loaded" in said
    assert "MORI_TARGET=host" in said


def test_another_api_is_refused() -> None:
    with pytest.raises(ValueError, match="no GPUs are reached by way of 'metal', but of 'cuda' and 'hip'"):
        _core.gpu_device("metal", 0)


def include_folders() -> list[Path]:
    homes = [Path(os.environ[name]) for name in ("ROCM_PATH",) if os.environ.get(name)]
    homes += sorted(Path("/opt").glob("rocm*"))
    return [home / "include" for home in homes if (home / "include" / "hip" / "hip_runtime_api.h").is_file()]


def test_the_abi_is_that_of_the_header() -> None:
    folders = include_folders()
    if not folders:
        pytest.skip("no ROCm with hip/hip_runtime_api.h in ROCM_PATH or /opt/rocm*")
    for folder in folders:
        options = ("-fsyntax-only", f"-I{folder}", "-D__HIP_PLATFORM_AMD__")
        result = compile_cxx((HERE / "hip_abi_check.cpp").read_text(), *options)
        assert result.returncode == 0, f"{folder}: {result.stderr}"
