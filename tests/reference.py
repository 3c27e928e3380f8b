"""What expert-parallel dispatch and combine mean, in plain numpy and torch.

Every function takes the inputs of *all* ranks at once and returns the results of all ranks, so nothing here knows of
messages, buffers or order of arrival. It shares no code with the package it judges.

Dispatch sends a token once to every distinct rank among its experts. Rows arrive ordered by (source rank, token).
Combine sums the returned rows in float32, from +0.0, in ascending column of the entry that was kept for a rank, rounds
once to the dtype of the rows, and writes every NaN as the canonical quiet NaN. Rounding is to nearest, ties to even;
fp8 and fp4 saturate.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import torch

CANONICAL_NAN_F32 = np.uint32(0x7FC00000)
CANONICAL_NAN_BF16 = np.uint16(0x7FC0)


class SmallFormat(NamedTuple):
    """A floating-point format of at most 8 bits."""

    element: Any
    """Its type in ml_dtypes; an element fills a byte."""
    largest: np.float32
    nan: int
    """The code that a NaN becomes. fp4 has no NaN; this is its -0."""


SMALL_FORMATS = {
    torch.float8_e4m3fn: SmallFormat(ml_dtypes.float8_e4m3fn, np.float32(448), 0x7F),
    torch.float8_e4m3fnuz: SmallFormat(ml_dtypes.float8_e4m3fnuz, np.float32(240), 0x80),
    torch.float4_e2m1fn_x2: SmallFormat(ml_dtypes.float4_e2m1fn, np.float32(6), 0x8),
}


class Routing(NamedTuple):
    """Who sends which token where, for all ranks of one dispatch."""

    world_size: int
    destination: tuple[np.ndarray, ...]
    """Per source rank, int64 [n, K]: the rank that this entry is kept for, -1 where nothing is sent for it."""
    row: tuple[np.ndarray, ...]
    """Per source rank, int64 [n, K]: the row that the token fills at that rank, -1 where nothing is sent."""
    source: tuple[np.ndarray, ...]
    """Per destination rank, int64 [T, 2]: (source rank, token) of every received row, in order."""
    dropped: tuple[int, ...]
    """Per source rank: how many entries name no expert."""

    def received(self, rank: int) -> int:
        """Rows that `rank` receives."""
        return len(self.source[rank])

    def copies(self, rank: int) -> np.ndarray:
        """Per token of `rank`: the number of distinct ranks it is sent to."""
        return (self.destination[rank] >= 0).sum(axis=1)


class Received(NamedTuple):
    """What one rank holds after a dispatch: exactly the valid rows."""

    rows: torch.Tensor
    weights: torch.Tensor
    scales: torch.Tensor | None
    indices: torch.Tensor
    source_position: torch.Tensor


def route(indices: Sequence[torch.Tensor | np.ndarray], experts_per_rank: int) -> Routing:
    """Routing of one dispatch from each rank's [n, K] expert ids; ids outside [0, W*E) name no expert."""
    world_size = len(indices)
    ids = [np.asarray(rows, dtype=np.int64) for rows in indices]
    destination = []
    dropped = []
    for rows in ids:
        names_an_expert = (rows >= 0) & (rows < world_size * experts_per_rank)
        kept = np.where(names_an_expert, rows // experts_per_rank, -1)
        for k in range(1, rows.shape[1]):
            kept[(kept[:, :k] == kept[:, k : k + 1]).any(axis=1), k] = -1
        destination.append(kept)
        dropped.append(int((~names_an_expert).sum()))
    row = [np.full_like(kept, -1) for kept in destination]
    source = []
    for rank in range(world_size):
        pairs = []
        filled = 0
        for sender, kept in enumerate(destination):
            tokens, columns = np.nonzero(kept == rank)
            row[sender][tokens, columns] = filled + np.arange(len(tokens))
            pairs.append(np.stack([np.full(len(tokens), sender), tokens], axis=1))
            filled += len(tokens)
        source.append(np.concatenate(pairs))
    return Routing(world_size, tuple(destination), tuple(row), tuple(source), tuple(dropped))


def flat_position(rank: np.ndarray, token: np.ndarray, world_size: int, max_tokens: int) -> np.ndarray:
    """Flat indices of tokens: rank times W*M plus number of the token."""
    return rank * (world_size * max_tokens) + token


def as_bytes(table: torch.Tensor) -> torch.Tensor:
    """[rows, bytes of a row] of a two-dimensional tensor, also of one without elements and with odd strides."""
    if table.numel() == 0:
        return torch.empty(table.shape[0], table.shape[1] * table.element_size(), dtype=torch.uint8)
    return table.contiguous().view(torch.uint8)


def _gather(source: np.ndarray, tables: Sequence[torch.Tensor]) -> torch.Tensor:
    """Rows named by (rank, row) pairs, moved as bytes so that no payload value can change on the way."""
    example = tables[0]
    flat = [as_bytes(table) for table in tables]
    parts = [flat[rank][torch.from_numpy(source[source[:, 0] == rank, 1])] for rank in range(len(tables))]
    return torch.cat(parts).view(example.dtype).reshape(len(source), example.shape[1])


def dispatch(
    routing: Routing,
    rows: Sequence[torch.Tensor],
    indices: Sequence[torch.Tensor],
    weights: Sequence[torch.Tensor | None],
    scales: Sequence[torch.Tensor] | None,
    max_tokens: int,
) -> list[Received]:
    """What every rank receives. A rank whose weights are None sends zeros in their place."""
    sent_weights = [
        torch.zeros(ids.shape, dtype=torch.float32) if given is None else given
        for ids, given in zip(indices, weights, strict=True)
    ]
    results = []
    for pairs in routing.source:
        position = flat_position(pairs[:, 0], pairs[:, 1], routing.world_size, max_tokens)
        results.append(
            Received(
                rows=_gather(pairs, rows),
                weights=_gather(pairs, sent_weights),
                scales=None if scales is None else _gather(pairs, scales),
                indices=_gather(pairs, indices),
                source_position=torch.from_numpy(position.astype(np.int32)),
            )
        )
    return results


def decode(codes: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """The float32 values of codes, one per uint8, with canonical NaNs. `dtype` is one of SMALL_FORMATS."""
    return _canonical(codes.view(SMALL_FORMATS[dtype].element).astype(np.float32))


def encode(values: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """The codes, one per uint8, that float32 values round to. `dtype` is one of SMALL_FORMATS."""
    small = SMALL_FORMATS[dtype]
    is_nan = np.isnan(values)
    bounded = np.clip(np.where(is_nan, np.float32(0), values), -small.largest, small.largest)
    return np.where(is_nan, np.uint8(small.nan), bounded.astype(small.element).view(np.uint8))


def unpack_pairs(packed: np.ndarray) -> np.ndarray:
    """[rows, 2 * bytes] codes of fp4 rows, the low half of a byte first."""
    return np.stack([packed & 15, packed >> 4], axis=-1).reshape(len(packed), 2 * packed.shape[1])


def pack_pairs(codes: np.ndarray) -> np.ndarray:
    """The inverse of `unpack_pairs`."""
    return codes[:, 0::2] | (codes[:, 1::2] << 4)


def widen(rows: torch.Tensor) -> np.ndarray:
    """Rows as float32 values, bit for bit (a bf16 is the upper half of a float32). An fp4 row gives two per byte."""
    if rows.dtype == torch.float32:
        return rows.numpy().copy()
    if rows.dtype == torch.bfloat16:
        bits = rows.contiguous().view(torch.int16).numpy().view(np.uint16)
        return (bits.astype(np.uint32) << 16).view(np.float32)
    if rows.dtype in SMALL_FORMATS:
        codes = rows.contiguous().view(torch.uint8).numpy()
        return decode(unpack_pairs(codes) if rows.dtype == torch.float4_e2m1fn_x2 else codes, rows.dtype)
    raise TypeError(f"no arithmetic is defined for {rows.dtype}")


def _canonical(values: np.ndarray) -> np.ndarray:
    return np.where(np.isnan(values), CANONICAL_NAN_F32, values.view(np.uint32)).view(np.float32)


def narrow(values: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    """Rounds float32 values once, to nearest with ties to even, and makes every NaN canonical."""
    values = np.ascontiguousarray(values, dtype=np.float32)
    if dtype == torch.float32:
        return torch.from_numpy(_canonical(values))
    if dtype == torch.bfloat16:
        wide = values.view(np.uint32).astype(np.uint64)
        rounded = ((wide + 0x7FFF + ((wide >> 16) & 1)) >> 16).astype(np.uint16)
        bits = np.where(np.isnan(values), CANONICAL_NAN_BF16, rounded)
        return torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)
    if dtype in SMALL_FORMATS:
        codes = encode(values, dtype)
        return torch.from_numpy(pack_pairs(codes) if dtype == torch.float4_e2m1fn_x2 else codes).view(dtype)
    raise TypeError(f"no arithmetic is defined for {dtype}")


def sum_returned(routing: Routing, rank: int, tables: Sequence[np.ndarray]) -> np.ndarray:
    """float32 sums for the tokens of `rank`, in ascending k; `tables[d]` are the rows that rank d returns."""
    destination, row = routing.destination[rank], routing.row[rank]
    total = np.zeros((len(destination), tables[0].shape[1]), dtype=np.float32)
    with np.errstate(all="ignore"):
        for k in range(destination.shape[1]):
            for sender, table in enumerate(tables):
                tokens = np.nonzero(destination[:, k] == sender)[0]
                total[tokens] += table[row[tokens, k]]
    return total


def combine(routing: Routing, returned: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Per rank [n, h]: the sum of the rows that come back for each of its tokens. `returned[d]` has >= T_d rows.

    Rows are bf16, f32, fp8 of either flavour, or fp4 pairs.
    """
    tables = [widen(rows) for rows in returned]
    return [narrow(sum_returned(routing, rank, tables), returned[0].dtype) for rank in range(routing.world_size)]


def combine_weights(routing: Routing, returned: Sequence[torch.Tensor | None], topk: int) -> list[torch.Tensor | None]:
    """Per rank [n, K], None for a rank that passed none. Rows that a rank does not pass add nothing."""
    tables = []
    for rank, given in enumerate(returned):
        table = np.zeros((routing.received(rank), topk), dtype=np.float32)
        if given is not None:
            table[: len(given)] = given.numpy()[: len(table)]
        tables.append(table)
    return [
        None if given is None else narrow(sum_returned(routing, rank, tables), torch.float32)
        for rank, given in enumerate(returned)
    ]
