"""The guide's example, run as a user would run it: as a script, one process per GPU, process group of gloo and NCCL."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from mori.demo.__main__ import free_port
from tests.gpu.guide import gpu_example

ROOT = Path(__file__).parents[2]


@pytest.mark.gpu
def test_the_example_runs_and_every_bit_is_right(world: int, tmp_path: Path):
    script = tmp_path / "guide_example.py"
    script.write_text("from tests.gpu.guide import check\n\n" + gpu_example(world, free_port()))
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MORI_")}
    path = os.pathsep.join(filter(None, (str(ROOT), environment.get("PYTHONPATH"))))
    result = subprocess.run(
        [sys.executable, str(script)],
        env=environment | {"PYTHONPATH": path, "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    # Two processes write: their lines may run into one another.
    assert len(re.findall(r"Rank \d: sent 128 tokens, received \d+", result.stdout)) == world
    assert result.stdout.count("every bit as expected") == world
