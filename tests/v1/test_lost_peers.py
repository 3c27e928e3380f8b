"""Peers that die, leave, do something else, or never come: the others learn it in time, with a name."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.rank_worker import RankContext
from tests.ranks import RankPool, private_pool
from tests.v1.cases import Case
from tests.v1.exercise import require
from tests.v1.storm import Round, Shape, new_op, play

DETECTION_SECONDS = 2.0


@pytest.fixture(scope="module", params=[3], ids=["world of 3"])
def own_pool(request: pytest.FixtureRequest) -> Iterator[RankPool]:
    """Processes of this module only: it kills them."""
    with private_pool(request.param) as ranks:
        yield ranks


def report_under_way(context: RankContext, directory: Path) -> None:
    (directory / str(context.rank)).touch()


def kill_once_all_are_under_way(ranks: RankPool, victim: int, directory: Path, delay_ms: int) -> float:
    """Kills a rank `delay_ms` after the last one has reported; the time of the kill."""
    deadline = time.monotonic() + 30
    while len(list(directory.iterdir())) < ranks.world.size:
        assert time.monotonic() < deadline, "the ranks did not get under way"
        time.sleep(0.005)
    pid = ranks.pid(victim)
    moment = threading.Timer(delay_ms / 1000, os.kill, (pid, signal.SIGKILL))
    moment.start()
    moment.join()
    return time.monotonic()


def loop_until_lost(context: RankContext, shape: Shape, directory: Path) -> dict:
    """Dispatches and combines for ever; returns what ended it and when."""
    import mori

    op = new_op(context, shape)
    op._plan.set_test_delays(context.rank + 1, 300)
    number = 0
    try:
        while True:
            play(op, context.rank, Round(number % 50, context.world_size, shape))
            number += 1
            if number == 10:
                report_under_way(context, directory)
    except mori.PeerLost as error:
        ended = time.monotonic()
        first = error
    # The fault stays: later calls raise it before they launch anything.
    started = time.monotonic()
    for call in (lambda: play(op, context.rank, Round(0, context.world_size, shape)), mori.shmem.shmem_barrier_all):
        try:
            call()
        except mori.PeerLost as error:
            require(error.peer == first.peer, f"the first fault named rank {first.peer}, a later one {error.peer}")
        else:
            raise AssertionError("a call on a lost communicator succeeded")
    return {
        "rounds": number,
        "ended": ended,
        "peer": first.peer,
        "pid": first.pid,
        "reason": first.reason,
        "phase": first.phase,
        "text": str(first),
        "later_s": time.monotonic() - started,
    }


def shared_memory_files() -> set[str]:
    return set(os.listdir("/dev/shm"))


@pytest.mark.parametrize("victim", [0, 1, 2])
@pytest.mark.parametrize("delay_ms", [0, 37, 151])
def test_survivors_of_a_killed_rank_name_it_within_two_seconds(
    own_pool: RankPool, tmp_path: Path, victim: int, delay_ms: int
):
    before = shared_memory_files()
    own_pool.renew()
    own_pool.start(loop_until_lost, Shape(max_tokens=200, hidden=64), tmp_path)
    victim_pid = own_pool.pid(victim)
    killed = kill_once_all_are_under_way(own_pool, victim, tmp_path, delay_ms)
    outcomes = own_pool.collect(timeout_s=20)
    assert outcomes[victim].exit_code == -signal.SIGKILL
    survivors = [outcome for rank, outcome in enumerate(outcomes) if rank != victim]
    for outcome in survivors:
        assert outcome.failure is None, outcome.failure
        found = outcome.value
        assert found["rounds"] >= 10
        assert (found["peer"], found["pid"], found["reason"]) == (victim, victim_pid, "died")
        assert 0 <= found["ended"] - killed < DETECTION_SECONDS
        assert found["later_s"] < 1.0
        assert f"rank {victim}" in found["text"] and str(victim_pid) in found["text"] and found["phase"]
    assert shared_memory_files() == before


def barrier_until_lost(context: RankContext, directory: Path) -> tuple[int | None, float]:
    import mori

    try:
        while True:
            mori.shmem.shmem_barrier_all()
            report_under_way(context, directory)
    except mori.PeerLost as error:
        return error.peer, time.monotonic()


def construct_until_lost(context: RankContext, directory: Path) -> tuple[int | None, float]:
    import mori

    try:
        while True:
            new_op(context, Shape())
            report_under_way(context, directory)
    except mori.PeerLost as error:
        return error.peer, time.monotonic()


@pytest.mark.parametrize("task", [barrier_until_lost, construct_until_lost])
@pytest.mark.parametrize("victim", [0, 2])
def test_a_rank_killed_in_barriers_or_construction(own_pool: RankPool, tmp_path: Path, task, victim: int):
    own_pool.renew()
    own_pool.start(task, tmp_path)
    killed = kill_once_all_are_under_way(own_pool, victim, tmp_path, 20)
    outcomes = own_pool.collect(timeout_s=20)
    for rank, outcome in enumerate(outcomes):
        if rank != victim:
            assert outcome.failure is None, outcome.failure
            peer, ended = outcome.value
            assert peer == victim
            assert ended - killed < DETECTION_SECONDS


def one_finalizes(context: RankContext, leaver: int) -> dict | None:
    import mori

    op = new_op(context, Shape())
    play(op, context.rank, Round(0, context.world_size, Shape()))
    context.barrier()  # else a fast rank's complaint may end a slow rank's round 0
    if context.rank == leaver:
        started = time.monotonic()
        mori.shmem.shmem_finalize()
        return {"finalize_s": time.monotonic() - started}
    started = time.monotonic()
    try:
        for number in range(1, 1000):
            play(op, context.rank, Round(number, context.world_size, Shape()))
    except mori.PeerLost as error:
        return {
            "peer": error.peer,
            "reason": error.reason,
            "text": str(error),
            "seconds": time.monotonic() - started,
        }
    return None


@pytest.mark.parametrize("leaver", [0, 1])
def test_a_rank_that_finalizes_while_others_call(leaver: int):
    # The leaver's finalize waits for the others, but only as long as this.
    with private_pool(3, MORI_BOOTSTRAP_TIMEOUT="6") as ranks:
        outcomes = ranks.outcomes(one_finalizes, leaver, timeout_s=30)
    for rank, outcome in enumerate(outcomes):
        assert outcome.failure is None, outcome.failure
        if rank != leaver:
            assert outcome.value is not None, "the calls went on without the rank that left"
            assert (outcome.value["peer"], outcome.value["reason"]) == (leaver, "left the communicator")
            assert f"rank {leaver}" in outcome.value["text"] and "left the communicator" in outcome.value["text"]


def out_of_step(context: RankContext) -> tuple[str, str]:
    import mori

    op = new_op(context, Shape())
    shape = Shape()
    for number in range(3):
        play(op, context.rank, Round(number, context.world_size, shape))
    ids, rows = torch.zeros(2, shape.topk, dtype=torch.int32), torch.ones(2, shape.hidden)
    context.barrier()  # else a fast pair could end the last good round of a slow rank
    try:
        if context.rank == 0:
            op.dispatch(rows, None, None, ids)
        else:
            count = Round(2, context.world_size, shape).ids[context.rank].shape[0]
            op.combine(torch.ones(100, shape.hidden), None, torch.zeros(count, shape.topk, dtype=torch.int32))
    except mori.MoriError as error:
        first = type(error).__name__, str(error)
    else:
        raise AssertionError("dispatch met combine and nobody noticed")
    try:
        op.dispatch(rows, None, None, ids)
    except mori.OutOfStep:
        return first
    raise AssertionError("the communicator is still usable after ranks were out of step")


@pytest.mark.parametrize("world_size", [2, 3])
def test_dispatch_that_meets_combine(world_size: int):
    with private_pool(world_size) as ranks:
        for name, text in ranks.run(out_of_step, timeout_s=20):
            assert name == "OutOfStep"
            assert "dispatch" in text and "combine" in text
            assert "7" in text, "the call number is missing"


def breaks_off(context: RankContext) -> tuple[float, str]:
    """Rank 0 is interrupted in a call that its peers do not make; they find out."""
    import mori

    op = new_op(context, Shape())
    play(op, context.rank, Round(0, context.world_size, Shape()))
    context.barrier()
    started = time.monotonic()
    if context.rank == 0:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
        try:
            op.dispatch(torch.ones(2, 8), None, None, torch.zeros(2, 4, dtype=torch.int32))
        except KeyboardInterrupt:
            return time.monotonic() - started, "interrupted"
        raise AssertionError("the call went on")
    while time.monotonic() < started + 10:
        try:
            op.check()
        except mori.PeerLost as error:
            return time.monotonic() - started, f"rank {error.peer} {error.reason}"
        time.sleep(0.01)
    raise AssertionError("nobody told this rank")


def test_an_interrupt_ends_a_wait_and_peers_learn_of_it():
    with private_pool(3) as ranks:
        outcomes = ranks.run(breaks_off, timeout_s=20)
    assert [text for _, text in outcomes] == ["interrupted", *2 * ["rank 0 left the communicator"]]
    assert max(seconds for seconds, _ in outcomes) < 2.0


def never_calls(context: RankContext, silent: int, phase: str) -> dict | None:
    import mori

    op = new_op(context, Shape())
    play(op, context.rank, Round(0, context.world_size, Shape()))
    ids, rows = torch.zeros(2, 4, dtype=torch.int32), torch.ones(2, 8)
    if phase == "combine":
        op.dispatch(rows, None, None, ids)
    context.barrier()
    if context.rank == silent:
        context.barrier()
        return None
    started = time.monotonic()
    try:
        if phase == "dispatch":
            op.dispatch(rows, None, None, ids)
        else:
            op.combine(torch.ones(100, 8), None, ids)
    except mori.PeerTimeout as error:
        seconds = time.monotonic() - started
        context.barrier()
        return {"peer": error.peer, "text": str(error), "seconds": seconds, "phase": error.phase}
    raise AssertionError("the call succeeded without the silent rank")


@pytest.mark.parametrize("phase", ["dispatch", "combine"])
@pytest.mark.parametrize("silent", [0, 1])
def test_a_rank_that_never_calls(phase: str, silent: int):
    with private_pool(3, MORI_TIMEOUT_S="0.7") as ranks:
        for rank, found in enumerate(ranks.run(never_calls, silent, phase, timeout_s=20)):
            if rank == silent:
                continue
            assert found["peer"] == silent
            assert f"rank {silent}" in found["text"] and "MORI_TIMEOUT_S" in found["text"]
            assert phase in found["phase"]
            assert 0.5 < found["seconds"] < 0.7 + DETECTION_SECONDS


def opposite_order(context: RankContext) -> str:
    """Calls are synchronous here, so each rank waits inside the op that the other has not come to yet."""
    import mori

    ops = [new_op(context, Shape()), new_op(context, Shape())]
    ids, rows = torch.zeros(2, 4, dtype=torch.int32), torch.ones(2, 8)
    try:
        for op in ops if context.rank == 0 else reversed(ops):
            op.dispatch(rows, None, None, ids)
    except mori.PeerTimeout as error:
        return str(error)
    return "no error"


def test_two_ops_in_opposite_order_on_two_ranks():
    with private_pool(2, MORI_TIMEOUT_S="0.7") as ranks:
        for text in ranks.run(opposite_order, timeout_s=20):
            assert "MORI_TIMEOUT_S" in text


def late_construction(context: RankContext, absent: int, delay_s: float) -> str | None:
    import mori

    if context.rank == absent:
        if delay_s:
            threading.Event().wait(delay_s)
            new_op(context, Shape())
        context.barrier()
        return None
    try:
        op = new_op(context, Shape())
    except mori.BootstrapTimeout as error:
        context.barrier()
        return str(error)
    require(delay_s, "an op was built without the absent rank")
    require(op is not None, "no op")
    context.barrier()
    return None


def test_an_op_waits_for_a_late_rank():
    with private_pool(2) as ranks:
        assert ranks.run(late_construction, 1, 1.5) == [None, None]


@pytest.mark.parametrize("absent", [0, 1])
def test_a_rank_that_never_constructs(absent: int):
    with private_pool(2, MORI_BOOTSTRAP_TIMEOUT="1.5") as ranks:
        outcomes = ranks.outcomes(late_construction, absent, 0.0, timeout_s=20)
        text = outcomes[1 - absent].value
        assert outcomes[1 - absent].failure is None, outcomes[1 - absent].failure
        assert text is not None and "MORI_BOOTSTRAP_TIMEOUT" in text
        assert re.search(rf"ranks? \[?{absent}\b", text), text


def raise_in_the_middle(context: RankContext) -> str:
    """Rank 0 stops after dispatch because of an error of its own; the process goes on to its end."""
    import mori

    case = Case(context.world_size, 8, 2, 2, 4, ())
    op = mori.ops.EpDispatchCombineOp(case.config(context.rank))
    ids, rows = torch.zeros(2, 2, dtype=torch.int32), torch.ones(2, 8, dtype=torch.bfloat16)
    received = op.dispatch(rows, None, None, ids)[0]
    if context.rank == 0:
        raise ZeroDivisionError("an error in the expert computation")
    try:
        op.combine(received, None, ids)
    except mori.MoriError as error:
        return type(error).__name__
    return "no error"


def test_an_error_in_the_middle_of_a_step():
    with private_pool(2, MORI_TIMEOUT_S="2") as ranks:
        outcomes = ranks.outcomes(raise_in_the_middle, timeout_s=20)
        assert "ZeroDivisionError" in (outcomes[0].error or "")
        assert outcomes[1].value == "PeerTimeout"  # alive, as this pool keeps it, but not coming
