"""What dispatch and combine must give, computed on the device from the inputs of all ranks. Bit-exact.

Plain torch, for shapes at which the tests' reference on the CPU would take longer than the measurement.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

FP4 = torch.float4_e2m1fn_x2
_FP4_VALUES = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])


def float_values(rows: torch.Tensor) -> torch.Tensor:
    """float32 [n, hidden] of rows of any dtype; a byte of fp4 holds the even column in its low half."""
    if rows.dtype != FP4:
        return rows.float()
    raw = rows.contiguous().view(torch.uint8)
    return _FP4_VALUES.to(raw.device)[torch.stack([raw & 15, raw >> 4], dim=2).long()].flatten(1)


class Routing:
    """Who sends which token where, from each rank's [n, K] ids."""

    def __init__(self, ids: Sequence[torch.Tensor], experts_per_rank: int) -> None:
        world = len(ids)
        self.kept = [_kept(each, world, experts_per_rank) for each in ids]
        ranks = torch.arange(world, device=ids[0].device)
        self.hits = [(kept[:, :, None] == ranks).any(dim=1) for kept in self.kept]
        """Per source [n, W]: whether the token goes there."""
        counts = torch.stack([hits.sum(dim=0) for hits in self.hits])
        first = counts.cumsum(dim=0) - counts
        self.row = [hits.long().cumsum(dim=0) - 1 + first[source] for source, hits in enumerate(self.hits)]
        """Per source [n, W]: the row that the token fills there, if it goes there."""
        self.counts = counts
        """[source, destination]: rows."""

    def gather(self, rank: int, tables: Sequence[torch.Tensor]) -> torch.Tensor:
        """What `rank` receives of `tables`, one per source: ordered by (source rank, token), as bytes [rows, bytes]."""
        return torch.cat([as_bytes(table)[hits[:, rank]] for table, hits in zip(tables, self.hits, strict=True)])

    def combine(self, rank: int, returned: Sequence[torch.Tensor]) -> torch.Tensor:
        """[n, h] of the dtype of `returned`: float32 sums in ascending k, rounded once. `returned[d]`: from rank d."""
        kept, row = self.kept[rank], self.row[rank]
        total = torch.zeros(len(kept), returned[0].shape[1], dtype=torch.float32, device=kept.device)
        for column in kept.unbind(dim=1):
            for sender, table in enumerate(returned):
                tokens = (column == sender).nonzero()[:, 0]
                total[tokens] += table[row[tokens, sender]].float()
        return total.to(returned[0].dtype)


def _kept(ids: torch.Tensor, world: int, experts_per_rank: int) -> torch.Tensor:
    """[n, K]: the rank that an entry is the first to name, else -1."""
    names_an_expert = (ids >= 0) & (ids < world * experts_per_rank)
    kept = torch.where(names_an_expert, ids.long() // experts_per_rank, -1)
    for k in range(1, ids.shape[1]):
        again = (kept[:, :k] == kept[:, k : k + 1]).any(dim=1)
        kept[:, k] = torch.where(again, -1, kept[:, k])
    return kept


def as_bytes(table: torch.Tensor) -> torch.Tensor:
    return table.contiguous().view(torch.uint8)


def require_equal(what: str, actual: torch.Tensor, expected: torch.Tensor) -> None:
    """RuntimeError naming the first row that differs in any bit."""
    got, want = as_bytes(actual), as_bytes(expected)
    if got.shape != want.shape:
        raise RuntimeError(f"{what}: {tuple(got.shape)} rows and bytes, expected {tuple(want.shape)}")
    wrong = (got != want).any(dim=1).nonzero()[:, 0]
    if len(wrong):
        raise RuntimeError(f"{what}: {len(wrong)} of {len(want)} rows differ, the first is row {int(wrong[0])}")
