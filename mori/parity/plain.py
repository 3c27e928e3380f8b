"""The same results by plain loops over tokens, from the inputs of all ranks. Shares no code with what it judges."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .configuration import F32, Configuration, Inputs
from .play import UNTOUCHED, Outcome, as_bytes


def expected(configuration: Configuration, rank: int) -> Outcome:
    """What `play` has to find on `rank`."""
    outcome: Outcome = {}
    for number, each in enumerate(configuration.rounds):
        inputs = [Inputs(configuration, number, peer) for peer in range(configuration.world_size)]
        places, arrived = route(configuration, [one.ids.tolist() for one in inputs])
        mine = arrived[rank]

        topk = configuration.topk
        results = {
            "count": torch.tensor([len(mine)], dtype=torch.int32),
            "rows": taken([one.rows for one in inputs], mine),
            "weights": taken([one.weights for one in inputs], mine) if each.weights else torch.zeros(len(mine), topk),
            "scales": taken([one.scales for one in inputs], mine) if configuration.scale_dim else None,
            "ids": taken([one.ids for one in inputs], mine),
            "source": torch.tensor(mine, dtype=torch.int32),
            "destination": torch.tensor(places[rank], dtype=torch.int32),
        }
        for name, value in results.items():
            outcome[name, number, -1] = as_bytes(value)
        for name in ("rows", "weights", "scales", "ids"):
            if results[name] is not None:
                outcome[f"{name} beyond the count", number, -1] = UNTOUCHED
        for combine in range(len(each.external)):
            answers = [one.answers(len(rows)) for one, rows in zip(inputs, arrived, strict=True)]
            sums = torch.zeros(each.tokens[rank], configuration.hidden)
            copies = torch.zeros(each.tokens[rank], topk)
            for token, ways in enumerate(places[rank]):
                for peer, row in ways:
                    if peer >= 0:
                        sums[token] += answers[peer][row].to(F32)
                        if each.weights:
                            copies[token] += inputs[rank].weights[token]  # type: ignore[index]
            outcome["combined rows", number, combine] = as_bytes(sums.to(configuration.combine_dtype))
            outcome["combined weights", number, combine] = as_bytes(copies if each.weights else None)
    return outcome


def taken(tables: Sequence[torch.Tensor | None], rows: list[tuple[int, int]]) -> torch.Tensor:
    """Bytes of the rows that (rank, token) pairs name."""
    found = [tables[rank][token].view(torch.uint8) for rank, token in rows]  # type: ignore[index]
    return torch.stack(found) if found else torch.empty(0, dtype=torch.uint8)


def route(
    configuration: Configuration, ids: list[list[list[int]]]
) -> tuple[list[list[list[tuple[int, int]]]], list[list[tuple[int, int]]]]:
    """By rank, token and k: (rank, row) of where it goes, (-1, -1) for nowhere. By rank: (rank, token) of its rows."""
    arrived: list[list[tuple[int, int]]] = [[] for _ in ids]
    places: list[list[list[tuple[int, int]]]] = []
    for source, tokens in enumerate(ids):
        places.append([])
        for token, experts in enumerate(tokens):
            ways, seen = [], set()
            for expert in experts:
                peer = expert // configuration.experts_per_rank
                if not 0 <= expert < len(ids) * configuration.experts_per_rank or peer in seen:
                    ways.append((-1, -1))
                    continue
                seen.add(peer)
                ways.append((peer, len(arrived[peer])))
                arrived[peer].append((source, token))
            places[-1].append(ways)
    return places, arrived
