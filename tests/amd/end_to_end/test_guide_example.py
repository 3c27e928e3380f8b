"""The guide's example with MORI_TARGET=hip, down to the last instruction: the package finds a GPU, compiles for it,
maps memory and launches through its HIP driver; two ranks simulate their devices at the same time."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from mori.demo.__main__ import free_port
from tests.amd.end_to_end.guide import TOKENS, WORLD, example
from tests.amd.end_to_end.rank import run_program
from tests.amd.sim.toolchain import ARCHS


@pytest.mark.parametrize("arch", ARCHS)
def test_every_bit_is_right(arch: str, variables_of: Callable[[str], dict[str, str]], tmp_path: Path) -> None:
    script = tmp_path / "guide_example.py"
    begin = "from tests.amd.end_to_end.guide import begin, check\n\nbegin()\n"
    script.write_text(begin + example(free_port()), encoding="utf-8")
    done = run_program([str(script)], **variables_of(arch))
    assert done.returncode == 0, done.stdout + done.stderr
    sent = re.findall(rf"^Rank \d: sent {TOKENS} tokens, received \d+$", done.stdout, flags=re.MULTILINE)
    executed = re.findall(r"^rank \d: every bit as expected, (\d+) instructions$", done.stdout, flags=re.MULTILINE)
    assert len(sent) == len(executed) == WORLD
    assert min(map(int, executed)) > 1000
