"""How whole processes end: with and without finalize, early, by an error, by SIGKILL."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
SIGKILLED = -9


@dataclass
class Ended:
    code: int
    output: str
    errors: str
    at: float


def run(name: str, timeout_s: float = 60.0) -> list[Ended]:
    """Runs both ranks of a program to their end; nothing may be left in /dev/shm."""
    import mori

    unique_id = mori.shmem.shmem_get_unique_id().hex()
    before = set(os.listdir("/dev/shm"))
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.v1.programs", name, str(rank), unique_id],
            cwd=REPOSITORY,
            env=os.environ | {"MORI_TIMEOUT_S": "20", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    ended: list[Ended] = []
    deadline = time.monotonic() + timeout_s
    try:
        for process in processes:
            output, errors = process.communicate(timeout=deadline - time.monotonic())
            ended.append(Ended(process.returncode, output, errors, time.monotonic()))
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.communicate()
    assert set(os.listdir("/dev/shm")) == before
    return ended


@pytest.mark.parametrize("name", ["exit_without_finalize", "finalize_and_exit"])
def test_a_normal_end_is_silent(name: str):
    for ended in run(name):
        assert (ended.code, ended.output, ended.errors) == (0, "", "")


def test_a_rank_that_ends_early_is_missed_by_name():
    first, second = run("one_exits_early")
    assert (first.code, first.errors) == (0, "")
    assert second.code == 1
    assert "PeerLost: rank 0" in second.errors and "left the communicator" in second.errors


def test_an_uncaught_error_ends_all_ranks():
    first, second = run("one_raises")
    assert first.code == 1 and "ZeroDivisionError" in first.errors and "Peer" not in first.errors
    assert second.code == 1 and "PeerLost: rank 0" in second.errors


def test_a_killed_rank_ends_all_ranks_in_time():
    first, second = run("one_is_killed")
    assert first.code == SIGKILLED
    assert second.code == 1 and "PeerLost: rank 0" in second.errors and "died" in second.errors
    # 2 s for the others to notice, and what the interpreter takes to end.
    assert second.at - float(first.output) < 2.0 + 2.0


def test_a_survivor_can_start_again():
    first, second = run("catches_and_goes_on_alone")
    assert first.code == SIGKILLED
    assert (second.code, second.output, second.errors) == (0, "alone: 1\n", "")
