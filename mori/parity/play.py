"""Plays a configuration on one rank and notes every result as bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .apis import APIS, POISON, to_device
from .configuration import Configuration, Inputs

# (what, when) -> bytes. Names of results; `when` is (round, combine), -1 for the dispatch.
Outcome = dict[tuple[str, int, int], bytes]
_PER_ROW = ("rows", "weights", "scales", "ids", "source")
UNTOUCHED = b"untouched"
_CPU = torch.device("cpu")


def as_bytes(tensor: torch.Tensor | None) -> bytes:
    if tensor is None:
        return b"None"
    if not tensor.numel():
        return b""
    raw: Any = to_device(tensor.contiguous().view(torch.uint8), _CPU)
    return bytes(raw.numpy().tobytes())


def play(
    configuration: Configuration, rank: int, api: str, backend: str, communicator: Any, barrier: Callable[[], None]
) -> Outcome:
    """`barrier`: by other means than the op. All memory that results pass through is poisoned before each round.

    Rows beyond the count are noted as well: nothing may be written there.
    """
    way = APIS[api](configuration, rank, communicator, backend)
    outcome: Outcome = {}
    for number, each in enumerate(configuration.rounds):
        barrier()
        way.poison()
        barrier()
        inputs = Inputs(configuration, number, rank)
        found = way.dispatch(inputs)
        tokens, total = each.tokens[rank], int(found["count"])  # type: ignore[arg-type]
        for name, value in found.items():
            kept = value
            if value is not None and name in _PER_ROW:
                kept = value[:total]
                if name != "source":
                    rest = as_bytes(value[total:])
                    untouched = rest.count(POISON) == len(rest)
                    outcome[f"{name} beyond the count", number, -1] = UNTOUCHED if untouched else rest
            elif value is not None and name == "destination":
                kept = value[:tokens]
            outcome[name, number, -1] = as_bytes(kept)
        for combine, external in enumerate(each.external):
            out, out_weights = way.combine(inputs.answers(total), external, each.weights)
            outcome["combined rows", number, combine] = as_bytes(out[:tokens])
            kept = None if out_weights is None else out_weights[:tokens]
            outcome["combined weights", number, combine] = as_bytes(kept)
    barrier()
    way.close()
    return outcome
