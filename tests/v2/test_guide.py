"""The package guide's program and the migration example run as they are."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys

import pytest

from tests.package.commands import ROOT, without_mori_variables

GUIDE = ROOT / "mori" / "ops" / "dispatch_combine_v2" / "README.md"
EXAMPLE = ROOT / "examples" / "ops" / "migrating_v1_to_v2.py"
WORLD = 2


def run_ranks(command: list[str]) -> list[str]:
    """What the ranks of a program print, started with the variables that torchrun sets."""
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        port = str(listener.getsockname()[1])
    common = {"MORI_TARGET": "host", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "WORLD_SIZE": str(WORLD)}
    common |= {"MASTER_ADDR": "localhost", "MASTER_PORT": port}
    processes = [
        subprocess.Popen(
            [sys.executable, *command],
            env=without_mori_variables() | common | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=os.sep,
        )
        for rank in range(WORLD)
    ]
    ended = [process.communicate(timeout=60) for process in processes]
    assert [process.returncode for process in processes] == [0] * WORLD, ended
    return [output for output, _ in ended]


def test_the_program_of_the_guide(tmp_path):
    (program,) = re.findall(
        r"^<!-- tests/v2/test_guide.py runs it -->\n```python\n(.*?)^```", GUIDE.read_text(), re.MULTILINE | re.DOTALL
    )
    (tmp_path / "layer.py").write_text(program)
    for rank, output in enumerate(run_ranks([str(tmp_path / "layer.py")])):
        assert re.fullmatch(rf"rank {rank} received \d+ rows, and every sum is right\n", output)


def test_the_migration_example():
    for output in run_ranks([str(EXAMPLE)]):
        assert len(re.findall(r"^rank \d: \d+ tokens, \d+ rows received, 6 results are equal$", output, re.M)) == 3


@pytest.mark.parametrize("document", [GUIDE, ROOT / "docs" / "migrating-v1-to-v2.md"])
def test_links_and_names_lead_somewhere(document):
    text = document.read_text()
    for target in re.findall(r"\]\(([^)#:]+)", text):
        assert (document.parent / target).exists(), target
    for path in re.findall(r"`((?:tests|examples)/[\w/.]+)`", text):
        assert (ROOT / path).exists(), path


def test_every_field_of_both_configs_is_in_the_table():
    import dataclasses

    import mori
    from mori.ops.dispatch_combine_v2 import EpDispatchCombineConfig

    text = (ROOT / "docs" / "migrating-v1-to-v2.md").read_text()
    table = text[text.index("## Config") : text.index("## Calls")]
    named = set(re.findall(r"`(\w+)`", table))
    later = {"internode_auto_ll_max_tokens"}  # belongs to internode_kernel
    for config in (mori.ops.EpDispatchCombineConfig, EpDispatchCombineConfig):
        fields = {field.name for field in dataclasses.fields(config)}
        assert fields - named - later == set()
