"""What the tensors of a v2 call must be. Dtypes and row sizes are those of the config, one per leg."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..validation import (
    IDS_ARE_INT32,
    IS_FLOAT32,
    PLACEMENT,
    ROW_PER_TOKEN,
    SCALES_OF_TOKENS,
    TOPK_COLUMNS,
    Rule,
)
from .config import EpDispatchCombineConfig
from .symm_arena import align_up


class LegLimits(NamedTuple):
    """What the calls of one leg are compared with."""

    leg: str
    dtype: torch.dtype
    columns: int  # of a row: H, or H/2 pairs of fp4
    max_tokens: int  # M
    topk: int  # K
    scale_bytes: int  # of a row, a multiple of 4; 0: no scales
    world_size: int
    experts_per_rank: int


def scale_stride_bytes(row_bytes: int) -> int:
    """Bytes between rows of scales, for rows of so many bytes: whole dwords, nothing between them."""
    return align_up(row_bytes, 4)


def scale_row_bytes(config: EpDispatchCombineConfig) -> int:
    """Bytes of a row of scales as it travels; 0 when scales are off."""
    return scale_stride_bytes(config.scale_dim * config.scale_type_size)


def limits_of(config: EpDispatchCombineConfig, leg: str) -> LegLimits:
    dtype = config.dispatch_dtype if leg == "dispatch" else config.combine_dtype
    row_bytes = config.token_nbytes if leg == "dispatch" else config.combine_token_nbytes
    return LegLimits(
        leg,
        dtype,
        row_bytes // dtype.itemsize,
        config.max_num_inp_token_per_rank,
        config.num_experts_per_token,
        scale_row_bytes(config),
        config.world_size,
        config.num_experts_per_rank,
    )


_ROW_DTYPE = Rule(
    TypeError,
    lambda a: a.tensor.dtype == a.limits.dtype,
    "has dtype {t.dtype}, this op was built for {l.leg} rows of {l.dtype}: convert it, or set {l.leg}_data_type",
)
_ROW_COLUMNS = Rule(
    ValueError,
    lambda a: a.columns == a.limits.columns,
    "has {a.columns} columns, rows of this op have {l.columns} of {l.dtype} (hidden_dim; fp4 has two values in one)",
)

DISPATCH_RULES: dict[str, tuple[Rule, ...]] = {
    "input": (
        _ROW_DTYPE,
        *PLACEMENT,
        Rule(
            ValueError,
            lambda a: a.rows <= a.limits.max_tokens,
            "has {a.rows} rows, the op was built for at most max_num_inp_token_per_rank {l.max_tokens}",
        ),
        _ROW_COLUMNS,
    ),
    "weights": (IS_FLOAT32, *PLACEMENT, ROW_PER_TOKEN, TOPK_COLUMNS),
    "scales": (
        *SCALES_OF_TOKENS,
        Rule(
            ValueError,
            lambda a: a.columns == 0 or a.row_bytes == a.limits.scale_bytes,
            "has rows of {a.row_bytes} bytes, the op was built for {l.scale_bytes} (scale_dim x scale_type_size, "
            "rounded up to whole dwords): pass such rows, or None",
        ),
    ),
    "indices": (IDS_ARE_INT32, *PLACEMENT, ROW_PER_TOKEN, TOPK_COLUMNS),
}

COMBINE_RULES: dict[str, tuple[Rule, ...]] = {"input": (_ROW_DTYPE, *PLACEMENT, _ROW_COLUMNS)}
