"""Plays configurations on both APIs in one rank process and compares results with each other and with the reference."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from mori.parity.compare import differences
from mori.parity.configuration import Configuration, Inputs, draw
from mori.parity.play import UNTOUCHED, Outcome, as_bytes, play
from tests import reference
from tests.rank_worker import RankContext
from tests.v2.ranks import communicator


def expected(configuration: Configuration, rank: int) -> Outcome:
    """What tests/reference.py says that `play` finds on `rank`."""
    outcome: Outcome = {}
    ranks = range(configuration.world_size)
    for number, each in enumerate(configuration.rounds):
        inputs = [Inputs(configuration, number, peer) for peer in ranks]
        routing = reference.route([one.ids for one in inputs], configuration.experts_per_rank)
        received = reference.dispatch(
            routing,
            [one.rows for one in inputs],
            [one.ids for one in inputs],
            [one.weights for one in inputs],
            [one.scales for one in inputs] if configuration.scale_dim else None,
            configuration.max_tokens,
        )
        mine = received[rank]
        ways = np.stack([routing.destination[rank], routing.row[rank]], axis=-1).astype(np.int32)
        found = {
            "count": torch.tensor([len(mine.rows)], dtype=torch.int32),
            "rows": mine.rows,
            "weights": mine.weights,
            "scales": mine.scales,
            "ids": mine.indices,
            "source": torch.from_numpy(routing.source[rank].astype(np.int32)),
            "destination": torch.from_numpy(ways),
        }
        for name, value in found.items():
            outcome[name, number, -1] = as_bytes(value)
            if name in ("rows", "weights", "scales", "ids") and value is not None:
                outcome[f"{name} beyond the count", number, -1] = UNTOUCHED
        for combine in range(len(each.external)):
            answers = [one.answers(routing.received(peer)) for peer, one in enumerate(inputs)]
            outcome["combined rows", number, combine] = as_bytes(reference.combine(routing, answers)[rank])
            tables = [one.weights if each.weights else None for one in received]
            weights = reference.combine_weights(routing, tables, configuration.topk)[rank]
            outcome["combined weights", number, combine] = as_bytes(weights)
    return outcome


def play_way(context: RankContext, configuration: Configuration, api: str) -> Outcome:
    comm = communicator(context)
    return play(configuration, context.rank, api, "hip", comm, comm.barrier)


def judge(
    context: RankContext,
    first: int,
    count: int,
    reference_outcome: Callable[[Configuration, int], Outcome] = expected,
) -> tuple[list[str], int]:
    """Differences, as text, and how many bytes of results each way had."""
    found: list[str] = []
    compared = 0
    for seed in range(first, first + count):
        configuration = draw(seed, context.world_size)
        outcomes = {api: play_way(context, configuration, api) for api in ("v1", "v2")}
        outcomes["reference"] = reference_outcome(configuration, context.rank)
        for ways in (("v1", "v2"), ("v1", "reference"), ("v2", "reference")):
            sides = ([[outcomes[way]]] for way in ways)
            found += [f"rank {context.rank}: {each}" for each in differences(ways, [configuration], *sides)]
        compared += sum(map(len, outcomes["v2"].values()))
    return found, compared
