"""The rank processes behind the other tests: results, failures, replacement, and that none is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from tests.rank_worker import RankContext
from tests.ranks import RankFailure, RankPool, private_pool

REPOSITORY = Path(__file__).resolve().parent.parent


def describe(context: RankContext, word: str) -> tuple[int, int, str, int]:
    return context.rank, context.world_size, word, os.getpid()


def fail_on(context: RankContext, *guilty: int) -> None:
    if context.rank in guilty:
        raise ValueError(f"rank {context.rank} says no")


def kill_own_process(context: RankContext, victim: int) -> str:
    if context.rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    return "alive"


def never_return(context: RankContext, guilty: int) -> str:
    while context.rank == guilty:
        signal.pause()
    return "returned"


def remember(context: RankContext, value: int) -> int | None:
    before = context.cache.get("value")
    context.cache["value"] = value
    return before


def environment(context: RankContext, name: str) -> str | None:
    return os.environ.get(name)


def pids(bare: RankPool) -> list[int]:
    return [pid for *_, pid in bare.run(describe, "pid")]


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def wait_until_gone(all_pids: list[int], seconds: float) -> list[int]:
    deadline = time.monotonic() + seconds
    while (left := [pid for pid in all_pids if is_running(pid)]) and time.monotonic() < deadline:
        time.sleep(0.02)
    return left


def test_results_come_by_rank_and_processes_persist():
    with private_pool(3, bare=True) as bare:
        first = bare.run(describe, "hello")
        assert [result[:3] for result in first] == [(0, 3, "hello"), (1, 3, "hello"), (2, 3, "hello")]
        assert [result[3] for result in bare.run(describe, "again")] == [result[3] for result in first]
        assert bare.run(remember, 1) == [None] * 3
        assert bare.run(remember, 2) == [1] * 3
        assert first[1][3] == bare.pid(1)


def test_every_failing_rank_is_reported_with_its_traceback():
    with private_pool(3, bare=True) as bare:
        before = pids(bare)
        with pytest.raises(RankFailure, match=r"failed on ranks \[0, 2\]") as failure:
            bare.run(fail_on, 0, 2)
        text = str(failure.value)
        assert "ValueError: rank 0 says no" in text and "ValueError: rank 2 says no" in text
        assert "rank 1 says no" not in text and "in fail_on" in text
        assert pids(bare) == before


def test_a_crashed_rank_is_reported_and_replaced():
    with private_pool(3, bare=True) as bare:
        before = pids(bare)
        with pytest.raises(RankFailure, match=r"failed on ranks \[1\][^\0]*exit code -9"):
            bare.run(kill_own_process, 1)
        after = pids(bare)
        assert after[1] != before[1] and (after[0], after[2]) == (before[0], before[2])
        outcomes = bare.outcomes(kill_own_process, 0)
        assert [outcome.value for outcome in outcomes] == [None, "alive", "alive"]
        assert outcomes[0].exit_code == -signal.SIGKILL and not outcomes[0].answered


def test_a_silent_rank_is_killed_with_its_stack_and_replaced():
    with private_pool(2, bare=True) as bare:
        before = pids(bare)
        with pytest.raises(RankFailure, match=r"failed on ranks \[1\]") as failure:
            bare.run(never_return, 1, timeout_s=0.5)
        assert "never_return" in str(failure.value) and "no answer in time" in str(failure.value)
        after = pids(bare)
        assert after[0] == before[0] and after[1] != before[1]


def test_variables_last_as_long_as_their_world():
    with private_pool(1, bare=True, MORI_TEST_WORD="one") as bare:
        assert bare.run(environment, "MORI_TEST_WORD") == ["one"]
        assert bare.run(environment, "MORI_TIMEOUT_S") == ["30"]
    with private_pool(1, bare=True) as bare:
        assert bare.run(environment, "MORI_TEST_WORD") == [None]


def test_no_process_outlives_its_pool():
    with private_pool(2, bare=True) as bare:
        started = pids(bare)
        assert all(is_running(pid) for pid in started)
    assert wait_until_gone(started, seconds=5.0) == []


@pytest.mark.parametrize("busy", [False, True], ids=["idle ranks", "busy ranks"])
def test_no_process_outlives_a_killed_parent(busy: bool, tmp_path: Path):
    script = f"""
        from tests import test_ranks as this
        from tests.ranks import private_pool
        with private_pool(2, bare=True) as bare:
            print(*this.pids(bare), flush=True)
            if {busy}:
                bare.run(this.never_return, 1)
            input()
    """
    parent = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)],
        cwd=REPOSITORY,
        env=os.environ | {"TMPDIR": str(tmp_path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert parent.stdout is not None and parent.stdin is not None
    started = [int(pid) for pid in parent.stdout.readline().split()]
    assert len(started) == 2 and all(is_running(pid) for pid in started)
    parent.kill()
    parent.wait()
    parent.stdin.close()
    parent.stdout.close()
    assert wait_until_gone(started, seconds=5.0) == []
