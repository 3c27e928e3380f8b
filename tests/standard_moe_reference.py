"""What the standard-MoE layouts mean, in plain numpy and torch; see tests/reference.py, which it completes.

A received row has a place with each local expert that its ids name, once if an expert is named twice. Places of an
expert are numbered in the order of the rows. On the way back a row's contribution is the sum over its ids in ascending
column of weight times the expert's row: in float32 from +0.0, multiplied and then added, rounded once.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from tests.reference import Received, as_bytes, narrow, widen


class Places(NamedTuple):
    """Where the received rows of one rank go."""

    rows: tuple[np.ndarray, ...]
    """Per local expert, int64: the received rows that name it, ascending."""
    slots: np.ndarray
    """int64 [E, T]: the place of a row with an expert, -1 for none."""
    experts: np.ndarray
    """int64 [T, K]: the local expert that an id names, -1 for none."""


def place(received: Received, rank: int, experts_per_rank: int) -> Places:
    """The places of what `rank` received."""
    local = received.indices.numpy().astype(np.int64) - rank * experts_per_rank
    experts = np.where((local >= 0) & (local < experts_per_rank), local, -1)
    rows = tuple(np.nonzero((experts == expert).any(axis=1))[0] for expert in range(experts_per_rank))
    slots = np.full((experts_per_rank, len(experts)), -1)
    for expert, of_expert in enumerate(rows):
        slots[expert, of_expert] = np.arange(len(of_expert))
    return Places(rows, slots, experts)


def packed_rows(received: Received, places: Places, expert: int) -> torch.Tensor:
    """[count, h] rows of one local expert, moved as bytes."""
    rows = torch.from_numpy(places.rows[expert])
    return as_bytes(received.rows)[rows].view(received.rows.dtype).reshape(len(rows), received.rows.shape[1])


def contributions(received: Received, places: Places, outputs: torch.Tensor) -> torch.Tensor:
    """[T, h] what the rank hands to combine, from the experts' outputs [E, P, h] and the weights that it received."""
    values = [widen(of_expert) for of_expert in outputs]
    weights = received.weights.numpy()
    total = np.zeros((len(received.indices), values[0].shape[1]), dtype=np.float32)
    with np.errstate(all="ignore"):
        for k in range(weights.shape[1]):
            for expert, of_expert in enumerate(values):
                rows = np.nonzero(places.experts[:, k] == expert)[0]
                total[rows] += weights[rows, k, None] * of_expert[places.slots[expert, rows]]
    return narrow(total, outputs.dtype)
