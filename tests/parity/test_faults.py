"""Parity finds faults: each one that is planted in the data of v2's API shows as differences, or as an error."""

from __future__ import annotations

import pytest

from mori.parity.compare import differences
from mori.parity.configuration import draw
from tests.parity.faults import FAULTS, planted
from tests.parity.judge import play_way
from tests.rank_worker import RankContext
from tests.ranks import private_pool

WORLD = 2
# With scales, weights, rows that are passed and rows in place, several rounds and idle ranks among them.
SEEDS = (0, 1, 3, 5, 8)


def compared(context: RankContext, fault: str | None) -> list[str]:
    """Differences between v1 and v2. A call that refuses is a find as well."""
    found: list[str] = []
    for seed in SEEDS:
        configuration = draw(seed, context.world_size)
        if seed not in context.cache:
            context.cache[seed] = play_way(context, configuration, "v1")
        try:
            with planted(fault):
                outcome = play_way(context, configuration, "v2")
        except Exception as refusal:
            return [*found, f"refused: {refusal}"]
        found += map(str, differences(("v1", "v2"), [configuration], [[context.cache[seed]]], [[outcome]]))
    return found


@pytest.fixture(scope="module")
def ranks():
    with private_pool(WORLD, MORI_TIMEOUT_S="5") as own:
        yield own


def test_without_a_fault_nothing_is_found(ranks):
    assert ranks.run(compared, None) == [[], []]


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found(ranks, name: str):
    outcomes = ranks.outcomes(compared, name)
    answers = [outcome.value for outcome in outcomes if outcome.value is not None]
    assert answers, [outcome.failure for outcome in outcomes]
    assert any(answers), "nothing was found"
