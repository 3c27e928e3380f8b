"""Peers that die, leave, do something else or never come while kernels wait for them: all ends in time, with a name."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
import torch

from tests.gpu.graphs import GraphedPair
from tests.gpu.ranks import private_gpu_pool, synchronize
from tests.gpu.rounds import Ledger, Pattern, Shape, new_op, play
from tests.rank_worker import RankContext
from tests.v1.exercise import require

pytestmark = pytest.mark.gpu

DETECTION_SECONDS = 2.0
SHAPE = Shape(max_tokens=64, hidden=672, dtype=torch.bfloat16)


def die(moment: str) -> None:
    """Ends this process as SIGKILL from outside would, after writing down when."""
    Path(moment).write_text(repr(time.monotonic()))
    os.kill(os.getpid(), signal.SIGKILL)


def wait_until_lost(op) -> dict:
    """Waits for the device; what PeerLost said, and when."""
    import mori

    try:
        op.check()
    except mori.PeerLost as error:
        facts = {"peer": error.peer, "pid": error.pid, "reason": error.reason, "text": str(error)}
        return facts | {"phase": error.phase, "ended": time.monotonic()}
    raise AssertionError("nothing was raised although a peer died")


def spin_until_lost(context: RankContext, victim: int, phase: str, moment: str) -> dict:
    """The victim dies while the kernels of all others wait for it."""
    import mori

    op, ledger = new_op(context, SHAPE), Ledger(context)
    pattern = Pattern(context, SHAPE, 1, [SHAPE.max_tokens] * context.world_size)
    play(op, pattern, 0, ledger)
    if phase == "combine":
        op.dispatch(pattern.values.bfloat16(), pattern.weights, None, pattern.ids)
    synchronize()
    context.barrier()
    if context.rank != victim:
        if phase == "dispatch":
            op.dispatch(pattern.values.bfloat16(), pattern.weights, None, pattern.ids)
        else:
            op.combine(pattern.answers.bfloat16(), None, pattern.ids)
    context.barrier()  # calls return at once: from here on the kernels of the others spin
    if context.rank == victim:
        die(moment)
    facts = wait_until_lost(op)
    started = time.monotonic()
    for call in (lambda: play(op, pattern, 1, ledger), mori.shmem.shmem_barrier_all):
        try:
            call()
        except mori.PeerLost as error:
            require(error.peer == victim, f"a later call named rank {error.peer}")
        else:
            raise AssertionError("a call on a lost communicator succeeded")
    facts["later_s"] = time.monotonic() - started
    return facts


@pytest.mark.parametrize("phase", ["dispatch", "combine"])
@pytest.mark.parametrize("which", ["first", "last"])
def test_survivors_of_a_killed_rank_name_it_within_two_seconds(world: int, tmp_path: Path, which: str, phase: str):
    victim = 0 if which == "first" else world - 1
    moment = tmp_path / "moment"
    with private_gpu_pool() as ranks:
        outcomes = ranks.outcomes(spin_until_lost, victim, phase, str(moment), timeout_s=60)
    killed = float(moment.read_text())
    assert outcomes[victim].exit_code == -signal.SIGKILL
    for rank, outcome in enumerate(outcomes):
        if rank == victim:
            continue
        assert outcome.failure is None, outcome.failure
        found = outcome.value
        assert (found["peer"], found["reason"]) == (victim, "died")
        assert 0 <= found["ended"] - killed < DETECTION_SECONDS, found
        assert found["later_s"] < 1.0
        assert f"rank {victim}" in found["text"] and str(found["pid"]) in found["text"] and found["phase"]


def fault_in_replays(context: RankContext, victim: int, moment: str, mode: str) -> dict:
    """Fifty replays of twenty layers are queued; the victim is gone in the third."""
    op, ledger = new_op(context, SHAPE), Ledger(context)
    counts = [SHAPE.max_tokens] * context.world_size
    pair = GraphedPair(context, op, SHAPE, counts[context.rank], layers=20)
    pattern = Pattern(context, SHAPE, 2, counts)
    pair.play(pattern, 0, ledger)
    pair.play(pattern, 1, ledger)
    synchronize()
    require(ledger.settle() == 12, "the first two replays were not checked")
    context.barrier()
    if context.rank == victim:
        if mode == "between kernels":
            context.barrier()
            die(moment)
        torch.cuda._sleep(2_000_000_000)  # about a second: this rank's third replay is queued and does not begin
        pair.replay()
        context.barrier()
        die(moment)
    for _ in range(48):
        pair.replay()
    context.barrier()
    return wait_until_lost(op)


@pytest.mark.parametrize("mode", ["between kernels", "with work queued"])
def test_a_fault_in_the_third_of_fifty_replays_ends_them_all(world: int, tmp_path: Path, mode: str):
    victim = world - 1
    moment = tmp_path / "moment"
    with private_gpu_pool() as ranks:
        outcomes = ranks.outcomes(fault_in_replays, victim, str(moment), mode, timeout_s=60)
    killed = float(moment.read_text())
    assert outcomes[victim].exit_code == -signal.SIGKILL
    for outcome in outcomes[:victim]:
        assert outcome.failure is None, outcome.failure
        assert outcome.value["peer"] == victim
        assert 0 <= outcome.value["ended"] - killed < DETECTION_SECONDS + 1.0, outcome.value


def never_calls(context: RankContext, silent: int, phase: str) -> dict | None:
    import mori

    op, ledger = new_op(context, SHAPE), Ledger(context)
    pattern = Pattern(context, SHAPE, 3, [SHAPE.max_tokens] * context.world_size)
    play(op, pattern, 0, ledger)
    if phase == "combine":
        op.dispatch(pattern.values.bfloat16(), None, None, pattern.ids)
    op.check()
    context.barrier()
    found = None
    if context.rank != silent:
        started = time.monotonic()
        if phase == "dispatch":
            op.dispatch(pattern.values.bfloat16(), None, None, pattern.ids)
        else:
            op.combine(pattern.answers.bfloat16(), None, pattern.ids)
        try:
            op.check()
        except mori.PeerTimeout as error:
            seconds = time.monotonic() - started
            found = {"peer": error.peer, "text": str(error), "seconds": seconds, "phase": error.phase}
        require(found, "the call succeeded without the silent rank")
    context.barrier()
    return found


@pytest.mark.parametrize("phase", ["dispatch", "combine"])
def test_a_rank_that_never_calls(phase: str):
    with private_gpu_pool(MORI_TIMEOUT_S="0.7") as ranks:
        for rank, found in enumerate(ranks.run(never_calls, 0, phase, timeout_s=30)):
            if rank:
                assert found["peer"] == 0
                assert "rank 0" in found["text"] and "MORI_TIMEOUT_S" in found["text"]
                assert phase in found["phase"]
                assert 0.5 < found["seconds"] < 0.7 + DETECTION_SECONDS


def out_of_step(context: RankContext) -> tuple[str, str]:
    import mori

    op, ledger = new_op(context, SHAPE), Ledger(context)
    pattern = Pattern(context, SHAPE, 4, [SHAPE.max_tokens] * context.world_size)
    for tag in range(3):
        play(op, pattern, tag, ledger)
    op.check()
    context.barrier()
    if context.rank == 0:
        op.dispatch(pattern.values.bfloat16(), None, None, pattern.ids)
    else:
        op.combine(pattern.answers.bfloat16(), None, pattern.ids)
    try:
        op.check()
    except mori.MoriError as error:
        return type(error).__name__, str(error)
    return "no error", ""


def test_dispatch_that_meets_combine():
    with private_gpu_pool(MORI_TIMEOUT_S="5") as ranks:
        for name, text in ranks.run(out_of_step, timeout_s=30):
            assert name == "OutOfStep", text
            assert "dispatch" in text and "combine" in text and "7" in text


def finalize_while_others_call(context: RankContext, leaver: int) -> dict | None:
    import mori

    op, ledger = new_op(context, SHAPE), Ledger(context)
    pattern = Pattern(context, SHAPE, 5, [SHAPE.max_tokens] * context.world_size)
    play(op, pattern, 0, ledger)
    op.check()
    context.barrier()
    if context.rank == leaver:
        mori.shmem.shmem_finalize()
        return None
    started = time.monotonic()
    try:
        play(op, pattern, 1, ledger)
        op.check()
    except mori.PeerLost as error:
        seconds = time.monotonic() - started
        return {"peer": error.peer, "reason": error.reason, "text": str(error), "seconds": seconds}
    raise AssertionError("the calls went on without the rank that left")


def test_a_rank_that_finalizes_while_others_call(world: int):
    with private_gpu_pool(MORI_BOOTSTRAP_TIMEOUT="4") as ranks:
        for rank, found in enumerate(ranks.run(finalize_while_others_call, world - 1, timeout_s=40)):
            if rank != world - 1:
                assert (found["peer"], found["reason"]) == (world - 1, "left the communicator")
                assert found["seconds"] < 4 + DETECTION_SECONDS
