"""Inputs of all ranks for one round of a point, the conversion between its two dtypes, and its op."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from benchmarks.expected import FP4, float_values
from tests import reference
from tests.python.ops.points import DTYPES, GEOMETRY, ONE_NODE, Point
from tests.rank_worker import RankContext


def columns(hidden: int, dtype: torch.dtype) -> int:
    """Elements of a row of `hidden` logical values."""
    return hidden // 2 if dtype == FP4 else hidden


def converted(rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Rows as experts that do nothing return them: exact, since only narrow dtypes become wide ones."""
    return rows if rows.dtype == dtype else float_values(rows).to(dtype)


def new_op(context: RankContext, point: Point, **overrides: Any) -> Any:
    import mori

    kernel = mori.ops.EpDispatchCombineKernelType[point.kernel]
    block_num, rdma_block_num, warps = GEOMETRY[point.kernel]
    dispatched, combined = DTYPES[point.dtype], DTYPES[point.combines]
    values: dict[str, Any] = {
        "data_type": dispatched,
        "rank": context.rank,
        "world_size": context.world_size,
        "hidden_dim": max(columns(point.hidden, dispatched), columns(point.hidden, combined)),
        "scale_dim": point.scale_dim,
        "scale_type_size": point.scale_bytes,
        "max_token_type_size": max(dispatched.itemsize, combined.itemsize),
        "max_num_inp_token_per_rank": point.max_tokens,
        "num_experts_per_rank": point.experts_per_rank,
        "num_experts_per_token": point.topk,
        "block_num": block_num,
        "warp_num_per_block": warps,
        "rdma_block_num": rdma_block_num,
        "use_external_inp_buf": point.external,
        "kernel_type": kernel,
        "quant_type": point.quant_type,
    }
    if point.kernel not in ONE_NODE:
        values["gpu_per_node"] = context.world_size
    return mori.ops.EpDispatchCombineOp(mori.ops.EpDispatchCombineConfig(**(values | overrides)))


def with_sentinels(ids: np.ndarray, pattern: str | int) -> np.ndarray:
    """A copy of int32 [n, K] ids in which the columns of the pattern are -1."""
    columns_ = np.arange(ids.shape[1])
    if pattern == "every_other":
        gone = columns_ % 2 == 1
    elif pattern == "first_only":
        gone = columns_ > 0
    elif isinstance(pattern, int):
        gone = columns_ >= ids.shape[1] - pattern
    else:
        gone = columns_ < 0
    return np.where(gone, -1, ids).astype(np.int32)


class Data:
    """What every rank sends in one round. `counts`: tokens by rank; `spread`: one expert of every rank per token."""

    def __init__(self, point: Point, world_size: int, number: int, counts: Sequence[int], spread: bool = False) -> None:
        self.point, self.world_size, self.counts = point, world_size, list(counts)
        seed = zlib.crc32(point.id.encode())
        self.generators = [np.random.default_rng([seed, number, rank]) for rank in range(world_size)]
        choose = self._spread if spread else self._random
        self.ids = [
            torch.from_numpy(with_sentinels(choose(generator, count), point.sentinel))
            for generator, count in zip(self.generators, counts, strict=True)
        ]
        self.rows = [self._rows(*each) for each in zip(self.generators, counts, strict=True)]
        self.weights = [self._uniform(*each, point.topk) for each in zip(self.generators, counts, strict=True)]
        self.scales = [self._scales(*each) for each in zip(self.generators, counts, strict=True)]
        self.routing = reference.route(self.ids, point.experts_per_rank)

    def _random(self, generator: np.random.Generator, count: int) -> np.ndarray:
        experts = self.world_size * self.point.experts_per_rank
        return np.argsort(generator.random((count, experts)), axis=1)[:, : self.point.topk].astype(np.int32)

    def _spread(self, generator: np.random.Generator, count: int) -> np.ndarray:
        local = generator.integers(0, self.point.experts_per_rank, (count, self.world_size))
        return (local + np.arange(self.world_size) * self.point.experts_per_rank).astype(np.int32)

    def _rows(self, generator: np.random.Generator, count: int) -> torch.Tensor:
        dtype = DTYPES[self.point.dtype]
        if dtype == FP4:
            raw = generator.integers(0, 256, (count, self.point.hidden // 2), dtype=np.uint8)
            return torch.from_numpy(raw).view(dtype)
        values = generator.standard_normal((count, self.point.hidden), dtype=np.float32)
        if self.point.quant_type == "fp8_blockwise":
            values[::2] *= 700  # beyond what fp8 holds: these tokens have scales
        return torch.from_numpy(values).to(dtype)

    def _uniform(self, generator: np.random.Generator, count: int, width: int) -> torch.Tensor:
        return torch.from_numpy(generator.random((count, width), dtype=np.float32))

    def _scales(self, generator: np.random.Generator, count: int) -> torch.Tensor | None:
        if not self.point.scale_dim:
            return None
        scales = self._uniform(generator, count, self.point.scale_dim)
        return scales.to(torch.float8_e4m3fnuz) if self.point.scale_bytes == 1 else scales

    def received(self, rank: int) -> reference.Received:
        scales = None if self.scales[0] is None else self.scales
        return reference.dispatch(self.routing, self.rows, self.ids, self.weights, scales, self.point.max_tokens)[rank]


def random_counts(point: Point, world_size: int, number: int) -> list[int]:
    """0..M tokens for each rank, but at least one in all."""
    generator = np.random.default_rng([point.max_tokens, number])
    counts = [int(count) for count in generator.integers(0, point.max_tokens + 1, world_size)]
    return counts if any(counts) else [1, *counts[1:]]
