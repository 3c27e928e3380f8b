"""The driver's ABI is declared by hand; where a CUDA toolkit is installed it is held against the real header."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.package.commands import compile_cxx

CHECK = Path(__file__).with_name("abi_check.cpp")


def include_folders() -> list[Path]:
    home = os.environ.get("CUDA_HOME")
    toolkits = [Path(home)] if home else []
    toolkits += sorted(Path("/usr/local").glob("cuda*"))
    return list(
        dict.fromkeys((kit / "include").resolve() for kit in toolkits if (kit / "include" / "cuda.h").is_file())
    )


def test_the_abi_is_that_of_the_header() -> None:
    folders = include_folders()
    if not folders:
        pytest.skip("no CUDA toolkit with cuda.h in CUDA_HOME or /usr/local/cuda*")
    for folder in folders:
        result = compile_cxx(CHECK.read_text(), "-fsyntax-only", f"-I{folder}")
        assert result.returncode == 0, f"{folder}: {result.stderr}"


@pytest.mark.skipif(os.path.exists("/proc/driver/nvidia/version"), reason="this machine has the driver")
def test_a_driver_that_is_not_there_is_named_when_it_is_asked_for() -> None:
    from mori import _core

    with pytest.raises(RuntimeError, match=r"needs the NVIDIA driver.*libcuda\.so\.1.*MORI_TARGET=host"):
        _core.gpu_device("cuda", 0)
