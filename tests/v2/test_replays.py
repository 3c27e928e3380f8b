"""Captured calls replayed with new data: a recorded list of launches plays the part of a graph on CPUs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.rank_worker import RankContext
from tests.ranks import pool
from tests.v1.exercise import require
from tests.v2.exercise import Exercise, case_of, new_op
from tests.v2.graphs import recording
from tests.v2.replays import CapturedPair
from tests.v2.test_lifecycle import steps_of

WORLD, REPLAYS = 2, 200
CASE = case_of(WORLD, 64, 3, 2, 6)


def generators(context: RankContext, count: int) -> Iterator[torch.Generator]:
    for number in range(count):
        yield torch.Generator().manual_seed(1000 * number + context.rank)


def replayed(context: RankContext, together: bool, external: bool) -> None:
    op = new_op(context, CASE)
    pair = CapturedPair(op, 5 + context.rank, together=together, external=external)
    require(op.stats()["dispatches"] == 0, "capturing has launched something")
    wrong = sum(int(pair.play(generator)) for generator in generators(context, REPLAYS))
    require(wrong == 0, f"{wrong} values are wrong")
    counts = op.stats()
    require((counts["dispatches"], counts["combines"]) == (REPLAYS, REPLAYS), f"{counts}")
    op.close()


@pytest.mark.parametrize("together", [True, False], ids=["together", "apart"])
@pytest.mark.parametrize("external", [True, False], ids=["external", "in place"])
def test_two_hundred_replays(together: bool, external: bool):
    pool(WORLD).run(replayed, together, external)


def mixed(context: RankContext) -> None:
    """Captures of several sizes and eager calls in turns on one op."""
    case = CASE.with_steps(*steps_of("DCDC"))
    op = new_op(context, case)
    pairs = [CapturedPair(op, tokens, together=tokens % 2 == 0) for tokens in (0, 1, 4, 6)]
    eager = Exercise(context, case, op=op)
    for number, generator in enumerate(generators(context, 24)):
        pair = pairs[(number + context.rank) % len(pairs)]
        require(int(pair.play(generator)) == 0, f"turn {number}, {pair.tokens} tokens")
        if number % 3 == 0:
            eager.dispatch(0, case.steps[0])
            eager.combine(1, case.steps[1])
    op.close()


def test_captures_of_many_sizes_and_eager_calls():
    pool(WORLD).run(mixed)


def recorded(context: RankContext) -> None:
    op = new_op(context, case_of(1, 64, 3, 2, 6))
    ids = torch.zeros(2, 3, dtype=torch.int32)
    with recording(op) as launches:
        op.dispatch(torch.ones(2, 64, dtype=torch.bfloat16), None, None, ids)
    require(len(launches) == 1 and op.stats()["dispatches"] == 0, f"{launches}")
    op.dispatch(torch.ones(2, 64, dtype=torch.bfloat16), None, None, ids)
    require(op.stats()["dispatches"] == 1, "calls after a recording are launches again")
    op.close()


def test_a_recording_launches_nothing():
    pool(1).run(recorded)
