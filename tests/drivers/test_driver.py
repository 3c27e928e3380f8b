"""The way to GPUs through drivers that have none; and HIP's ABI where there is a header to compare with."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mori import _core, jit
from mori.jit import hip_clang
from mori.jit.job import resolve
from tests.drivers.build import LIBRARIES, build
from tests.package.commands import ROOT, compile_cxx

HERE = Path(__file__).parent
LANES = {"cuda": 32, "hip": 64}
MEMORY = {"cuda": "cached", "hip": "uncached"}
EMPTY = 'extern "C" __attribute__((global)) void empty() {}\n'


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With both fake drivers."""
    folder = tmp_path_factory.mktemp("drivers")
    build(folder)
    return folder


def run(folder: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "LD_LIBRARY_PATH": str(folder), **variables}
    command = [sys.executable, *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=120)


def ask(folder: Path, api: str, **variables: str) -> str:
    """What the extension says when it is asked for the first GPU."""
    return run(folder, "-c", f"from mori import _core; _core.gpu_device({api!r}, 0)", **variables).stderr


@pytest.mark.skipif(os.path.exists("/proc/driver/nvidia/version"), reason="this machine has the driver")
@pytest.mark.parametrize("api", LIBRARIES)
def test_two_ranks_dispatch_and_combine(api: str, folder: Path, tmp_path: Path) -> None:
    # The driver wants a code object and executes none.
    code = hip_clang.find_ziglang("gfx942").compile(resolve(jit.Spec("empty", EMPTY, target="hip", arch="gfx942")))
    (tmp_path / "code").write_bytes(code)
    log = tmp_path / "log"
    done = run(folder, "-m", "tests.drivers.two_ranks", api, *[str(tmp_path / "code")] * 2, FAKE_LOG=str(log))
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    # Both ranks' 5 tokens go to rank 0, every other one to rank 1 too.
    assert [state[0] for state in said["states"]] == [10, 4, 10, 4]
    assert [state[1] for state in said["states"]] == [1, 1, 2, 2]
    assert all(state[2][0] == 0 for state in said["states"])
    assert said["sums"] == [True, True]
    assert said["runs_on"] == "fake GPU" and said["facts"]["multiprocessors"] == 4
    notes = log.read_text().splitlines()
    created = {note for note in notes if note.startswith("create")}
    assert created == {f"create {MEMORY[api]} on {rank} by {rank}" for rank in (0, 1)}
    assert {note for note in notes if note.startswith("access")} == {"access for 0", "access for 1"}
    assert (f"attribute 8 = {65536}" in notes) == (api == "cuda")
    launches = [note.split() for note in notes if note.startswith("launch")]
    assert sorted((name, device) for _, name, _, _, device in launches) == [
        ("mori_combine_bf16", "0"),
        ("mori_combine_bf16", "1"),
        ("mori_dispatch", "0"),
        ("mori_dispatch", "1"),
    ]
    widths = {int(grid.partition("x")[2]) for _, _, grid, _, _ in launches}
    assert all(width % LANES[api] == 0 and width // LANES[api] <= 16 for width in widths)


IMPORT = """
import ctypes, sys
from mori import _core
api = sys.argv[1]
create, share = _core.SymmetricMemory.create_gpu, _core.SymmetricMemory.import_gpu
owners = [create(api, rank, 2, 1 << 20, rank, 1) for rank in (0, 1)]
for rank, owner in enumerate(owners):
    owner.extend(1 << 17)
begins = [owner.address(rank, 0) for rank, owner in enumerate(owners)]
aliases = [share(api, rank, 2, 5000, rank, 1, begin) for rank, begin in enumerate(begins)]
for rank, alias in enumerate(aliases):
    alias.map_peer(1 - rank, 0, aliases[1 - rank].export_chunk(0))
    owners[rank].write(0, bytes([65 + rank]) * 5000)
print([ctypes.string_at(alias.address(rank, 0), 5000).decode()[::1000] for alias in aliases for rank in (0, 1)])
for address, size in ((begins[0] + 4096, 100), (begins[0], 1 << 20), (4096, 100)):
    try:
        share(api, 0, 2, size, 0, 1, address)
    except ValueError as error:
        print(error)
"""


@pytest.mark.skipif(os.path.exists("/proc/driver/nvidia/version"), reason="this machine has the driver")
@pytest.mark.parametrize("api", LIBRARIES)
def test_memory_of_others_is_mapped_once_more(api: str, folder: Path) -> None:
    done = run(folder, "-c", IMPORT, api)
    assert done.returncode == 0, done.stderr
    contents, inside, beyond, nothing = done.stdout.splitlines()
    assert contents == "['AAAAA', 'BBBBB', 'AAAAA', 'BBBBB']"
    assert "belongs to an allocation that begins at" in inside
    assert "has 65536 bytes, 1048576 were asked for" in beyond
    assert "is no device memory of this process" in nothing


@pytest.mark.parametrize(
    "variables, what",
    [
        ({"FAKE_VERSION": "60240000"}, "version 60240000, the hip target needs 70100000: ROCm 7.1 or later"),
        ({"FAKE_CLOCK_KHZ": "25000"}, "the clock of fake GPU runs at 25000 kHz; the hip target knows 100000 only"),
        ({"FAKE_VMM": "0"}, "GPU 0 (fake GPU) cannot share memory between processes"),
    ],
)
def test_what_does_not_fit_is_named(folder: Path, variables: dict[str, str], what: str) -> None:
    assert what in ask(folder, "hip", **variables)


def test_a_runtime_that_is_not_there_is_named(tmp_path: Path) -> None:
    said = ask(tmp_path, "hip")
    assert "the hip target needs the HIP runtime, but libamdhip64.so.7 cannot be loaded" in said
    assert "MORI_TARGET=host" in said


def test_a_library_without_the_calls_is_too_old(tmp_path: Path) -> None:
    assert compile_cxx("", "-shared", "-o", str(tmp_path / "libamdhip64.so.7")).returncode == 0
    said = ask(tmp_path, "hip")
    assert "the HIP runtime of this machine is too old for the hip target: it has no hipInit. ROCm 7.1 or later" in said


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
