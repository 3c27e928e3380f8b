"""What a combine of bf16 rows means whose rows travel in fp8 or fp4; see tests/reference.py, which it completes.

Every row is quantised, also one that a rank returns to itself. The values that come out are added as in any combine:
in float32, from +0.0, in ascending column, with one rounding to bf16.

In blocks: a row of h elements has `scale_dim` float32 scales, and block j covers elements [j*B, (j+1)*B) with
B = ceil(h / scale_dim); the last blocks may be shorter or empty. With m the largest magnitude of a block, NaN aside:

* fp8: a block with m above the format's largest value is multiplied by largest / m and has the scale m / largest; any
  other is stored as it is, with scale 1.
* fp4: every block is multiplied by 6 / m and has the scale m / 6; one of zeros has scale 1 and zeros.

The sign of a row's first scale is negative if any block of it was multiplied. `fp8` is the flavour of the machine:
torch.float8_e4m3fn, or torch.float8_e4m3fnuz on AMD gfx942.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from tests.reference import SMALL_FORMATS, Routing, decode, encode, narrow, sum_returned, widen

FP4 = torch.float4_e2m1fn_x2


class QuantisedRows(NamedTuple):
    """Rows as they travel, but with one code per byte, also of fp4."""

    codes: np.ndarray
    """uint8 [T, h]"""
    scales: np.ndarray
    """float32 [T, scale_dim]"""


def fp8_direct_cast_combine(
    routing: Routing, returned: Sequence[torch.Tensor], fp8: torch.dtype = torch.float8_e4m3fn
) -> list[torch.Tensor]:
    """Per rank bf16 [n, h]: the sum of rows that were rounded to fp8 on their way, without scales."""
    return _combine(routing, [decode(encode(widen(rows), fp8), fp8) for rows in returned])


def fp8_blockwise_combine(
    routing: Routing, returned: Sequence[torch.Tensor], scale_dim: int, fp8: torch.dtype = torch.float8_e4m3fn
) -> list[torch.Tensor]:
    """Per rank bf16 [n, h]: the sum of rows that were quantised to fp8 in blocks on their way."""
    return _combine(routing, [dequantise(quantise(rows, scale_dim, fp8), fp8) for rows in returned])


def fp4_blockwise_combine(routing: Routing, returned: Sequence[torch.Tensor], scale_dim: int) -> list[torch.Tensor]:
    """Per rank bf16 [n, h]: the sum of rows that were quantised to fp4 in blocks on their way."""
    return _combine(routing, [dequantise(quantise(rows, scale_dim, FP4), FP4) for rows in returned])


def block_length(hidden_dim: int, scale_dim: int) -> int:
    """Elements of a block; the last ones of a row may have fewer, or none."""
    return -(-hidden_dim // scale_dim)


def quantise(rows: torch.Tensor, scale_dim: int, dtype: torch.dtype) -> QuantisedRows:
    """bf16 rows [T, h] in blocks of an fp8 flavour or of fp4."""
    values = widen(rows)
    largest = SMALL_FORMATS[dtype].largest
    length = block_length(values.shape[1], scale_dim)
    magnitudes = np.where(np.isnan(values), np.float32(0), np.abs(values))
    codes = np.zeros(values.shape, dtype=np.uint8)
    scales = np.ones((len(values), scale_dim), dtype=np.float32)
    any_scaled = np.full(len(values), dtype == FP4)
    with np.errstate(all="ignore"):
        for block in range(scale_dim):
            part = slice(block * length, (block + 1) * length)
            maximum = magnitudes[:, part].max(axis=1, keepdims=True, initial=np.float32(0))
            scaled = maximum > (0 if dtype == FP4 else largest)
            factor = np.where(scaled, largest / maximum, np.float32(0 if dtype == FP4 else 1))
            codes[:, part] = encode(values[:, part] * factor, dtype)
            scales[:, block] = np.where(scaled, maximum / largest, np.float32(1))[:, 0]
            any_scaled |= scaled[:, 0]
    scales[any_scaled, 0] *= -1
    return QuantisedRows(codes, scales)


def dequantise(rows: QuantisedRows, dtype: torch.dtype) -> np.ndarray:
    """float32 [T, h]: what a receiver adds up."""
    values = decode(rows.codes, dtype)
    length = block_length(values.shape[1], rows.scales.shape[1])
    factors = np.repeat(np.abs(rows.scales), length, axis=1)[:, : values.shape[1]]
    with np.errstate(all="ignore"):
        return np.where(rows.scales[:, :1] < 0, values * factors, values)


def _combine(routing: Routing, tables: Sequence[np.ndarray]) -> list[torch.Tensor]:
    return [narrow(sum_returned(routing, rank, tables), torch.bfloat16) for rank in range(routing.world_size)]
