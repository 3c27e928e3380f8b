"""What makes of a process a rank with a simulated AMD GPU, and starts programs made of such processes."""

from __future__ import annotations

import functools
import gc
import os
import subprocess
import sys
from pathlib import Path

from mori import archs
from tests.amd.end_to_end import torch_with_rocm
from tests.amd.end_to_end.executor import Executor
from tests.package.commands import ROOT, without_mori_variables

ARCH, DRIVER, FOLDER, SEED = "SIMULATED_ARCH", "SIMULATION_DRIVER", "SIMULATION_FOLDER", "SIMULATION_SEED"


def variables(arch: str, driver: Path, folder: Path, seed: int = 1) -> dict[str, str]:
    """What `simulate` goes by. `driver`: the library that stands in for the HIP runtime; code and locks of all ranks
    go to `folder`."""
    return {
        "MORI_TARGET": "hip",
        "MORI_TIMEOUT_S": "120",  # of a clock on the wall: simulated peers are slow
        "MORI_JIT_CACHE_DIR": str(folder / "code"),
        "FAKE_LANES": str(archs.find(arch).lanes),
        ARCH: arch,
        DRIVER: str(driver),
        FOLDER: str(folder),
        SEED: str(seed),
    }


@functools.cache
def simulate() -> Executor:
    """From here on this process has GPUs; before anything else is done with the package."""
    gc.freeze()  # at every launch the tensors are searched for; there are none among what there is so far
    executor = Executor(Path(os.environ[DRIVER]), Path(os.environ[FOLDER]), int(os.environ[SEED]))
    torch_with_rocm.install(os.environ[ARCH], executor.driver)
    return executor


def run_program(arguments: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    """Python with these arguments."""
    usual = {"PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *arguments],
        env=without_mori_variables() | usual | environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
