"""The examples on CPUs, by ranks that are processes; one of them as a user starts it."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mori.cco import Communicator, UniqueId, get_unique_id
from tests.package.commands import ROOT, without_mori_variables
from tests.rank_worker import RankContext
from tests.ranks import pool

FOLDER = ROOT / "examples" / "cco"
SAYS = {
    "barrier": "2000 rounds",
    "lsa_put": "100000 values from each of {} ranks, all as sent",
    "lsa_allreduce": "100003 sums over {} ranks, equal bit for bit to torch's",
}


def run(context: RankContext, name: str, unique_id: UniqueId) -> str:
    sys.path.insert(0, str(FOLDER))  # as for a program that is started there
    try:
        module = importlib.import_module(name)
    finally:
        sys.path.remove(str(FOLDER))
    with Communicator.init(context.world_size, context.rank, unique_id, 64 << 20) as comm:
        return module.example(comm)


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("name", SAYS)
def test_an_example(name: str, world_size: int, kernel_folder: Path) -> None:
    ranks = pool(world_size, bare=True, MORI_JIT_CACHE_DIR=str(kernel_folder))
    for said in ranks.run(run, name, get_unique_id()):
        assert said.startswith(SAYS[name].format(world_size))


def test_an_example_as_a_program(kernel_folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(FOLDER / "lsa_put.py"), "--ranks", "1"],
        env={
            **without_mori_variables(),
            "MORI_JIT_CACHE_DIR": str(kernel_folder),
            "PYTHONPATH": os.pathsep.join(sys.path),
        },
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "rank 0 of 1 on host: 100000 values from each of 1 ranks, all as sent\n"
