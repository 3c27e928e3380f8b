"""Ranks of an expert-parallel group on simulated devices: symmetric memory, launches, results."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import NamedTuple

import numpy as np
import torch

from mori.ops.engine import EpShape, layout
from mori.tensor_utils import dtype_to_int
from tests.amd.sim.launch_layout import LaunchLayout
from tests.amd.sim.machine import Code, Launch
from tests.amd.sim.memory import Arena, Memory
from tests.reference import Received

SYMMETRIC_BASE, SYMMETRIC_STRIDE = 0x10_0000_0000, 0x1_0000_0000
TWIN_BASE, TWIN_STRIDE = 0x50_0000_0000, 0x1_0000
INPUT_BASE, INPUT_STRIDE = 0x20_0000_0000, 0x10_0000
TIMEOUT_NS = 10**12
HALVES_BOTH = 3


class Grid(NamedTuple):
    blocks: int
    warps: int
    parts: int
    stagers: int


@dataclass(frozen=True)
class Kernels:
    """Each holds one kernel."""

    dispatch: Code
    combine: Code


class Rank:
    """One rank's memory, and launches on it; results are read by the host between launches."""

    def __init__(self, group: Group, rank: int) -> None:
        self._group = group
        self.rank = rank
        self.shape = replace(group.shape, rank=rank)
        self._regions = layout(self.shape)
        self._window = group.layout.control_bytes
        slice_bytes = self._window + self._regions.total_bytes
        self._slice = Arena(f"the slice of rank {rank}", SYMMETRIC_BASE + rank * SYMMETRIC_STRIDE, slice_bytes)
        self._twin = Arena(f"the twin of rank {rank}", TWIN_BASE + rank * TWIN_STRIDE, self._window)
        live = np.array([(1 << self.shape.world_size) - 1], np.uint64)
        for arena in (self._slice, self._twin):
            arena.write(0, np.zeros(self._window, np.uint8))
            group.memory.add(arena)
        self._slice.write(group.layout.live_offset, live)
        for name in ("control", "received_count", "stats"):  # what EpPlan::prepare zeroes
            region = self._regions.region(name)
            self._slice.write(self._window + region.offset, np.zeros(region.bytes, np.uint8))

    def dispatch(self, rows: torch.Tensor, weights: torch.Tensor, indices: torch.Tensor, staged: bool) -> Launch:
        values = self._common(rows, len(rows)) | {
            "input": self._group.give(rows),
            "weights": self._group.give(weights),
            "scales": 0,
            "indices": self._group.give(indices),
            "scale_bytes": 0,
            "staged": int(staged),
        }
        return self._launch("DispatchArgs", self._group.kernels.dispatch, values)

    def combine(self, rows: torch.Tensor, weights: torch.Tensor | None, tokens: int) -> Launch:
        values = self._common(rows, tokens) | {
            "input": self._group.give(rows),
            "weights": 0 if weights is None else self._group.give(weights),
            "input_rows": len(rows),
            "weight_rows": 0 if weights is None else len(weights),
            "stagers": self._group.grid.stagers,
        }
        return self._launch("CombineArgs", self._group.kernels.combine, values)

    def received(self, hidden: int) -> Received:
        count = int(self._read("received_count", 4).view(np.uint32)[0])
        topk = self.shape.topk
        return Received(
            rows=self._tensor("dispatch_rows", (count, hidden), torch.bfloat16),
            weights=self._tensor("dispatch_weights", (count, topk), torch.float32),
            scales=None,
            indices=self._tensor("dispatch_indices", (count, topk), torch.int32),
            source_position=self._tensor("dispatch_source", (count,), torch.int32),
        )

    def sender_map(self, tokens: int) -> torch.Tensor:
        return self._tensor("sender_map", (tokens, self.shape.topk), torch.int32)

    def combined_rows(self, tokens: int, hidden: int) -> torch.Tensor:
        return self._tensor("combine_rows", (tokens, hidden), torch.bfloat16)

    def combined_weights(self, tokens: int) -> torch.Tensor:
        return self._tensor("combine_weights", (tokens, self.shape.topk), torch.float32)

    def _read(self, region: str, count: int) -> np.ndarray:
        found = self._regions.region(region)
        if count > found.bytes:
            raise ValueError(f"{count} bytes of {region}, which has {found.bytes}")
        return self._slice.read(self._window + found.offset, count)

    def _tensor(self, region: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        raw = self._read(region, int(np.prod(shape)) * dtype.itemsize)
        return torch.from_numpy(raw).view(dtype).reshape(shape) if raw.size else torch.empty(shape, dtype=dtype)

    def _address(self, region: str, byte: int = 0) -> int:
        return self._slice.base + self._window + self._regions.region(region).offset + byte

    def _common(self, rows: torch.Tensor, tokens: int) -> dict[str, int | bytes]:
        layout, shape, regions = self._group.layout, self.shape, self._regions.regions
        fields: dict[str, int | bytes] = {f"ep.shape.{name}": int(value) for name, value in asdict(shape).items()}
        return fields | {
            "ep.symmetric.base": SYMMETRIC_BASE,
            "ep.symmetric.stride": SYMMETRIC_STRIDE,
            "ep.symmetric.rank": self.rank,
            "ep.symmetric.world_size": shape.world_size,
            "ep.window": self._window,
            "ep.layout.offset": _words(region.offset for region in regions),
            "ep.layout.bytes": _words(region.bytes for region in regions),
            "ep.layout.total_bytes": self._regions.total_bytes,
            "ep.experts.multiplier": layout.divider(shape.experts_per_rank),
            "ep.twin": self._twin.base,
            "ep.timeout_ns": TIMEOUT_NS,
            "ep.profiler": 0,
            "ep.test_delay_us": 0,
            "ep.test_delay_seed": 0,
            "routing.sender_map": self._address("sender_map"),
            "routing.received_count": self._address("received_count"),
            "routing.summary": self._address("control", layout.summary_offset(shape.world_size)),
            "packed.rows": 0,
            "packed.sources": 0,
            "tokens": tokens,
            "row_bytes": rows.shape[1] * rows.element_size(),
            "dtype": dtype_to_int(rows.dtype),
            "parts": self._group.grid.parts,
            "streaming": 0,
            "halves": HALVES_BOTH,
        }

    def _launch(self, struct: str, code: Code, values: dict[str, int | bytes]) -> Launch:
        grid, (kernel,) = self._group.grid, code.program.kernels
        return Launch(
            code=code,
            kernel=kernel,
            blocks=grid.blocks,
            threads=grid.warps * code.target.lanes,
            arguments=self._group.layout.pack(struct, values),
            dynamic_lds_bytes=self._group.layout.lds_bytes(self.shape, grid.warps, struct),
        )


def _words(values: Iterable[int]) -> bytes:
    return np.fromiter(values, np.uint64).tobytes()


class Group:
    def __init__(self, layout: LaunchLayout, kernels: Kernels, shape: EpShape, grid: Grid) -> None:
        self.layout = layout
        self.kernels = kernels
        self.shape = shape
        self.grid = grid
        self.memory = Memory()
        self._inputs = 0
        self.ranks = [Rank(self, rank) for rank in range(shape.world_size)]

    def give(self, tensor: torch.Tensor) -> int:
        """The address of a copy; what lies behind it is out of bounds."""
        base = INPUT_BASE + INPUT_STRIDE * self._inputs
        self._inputs += 1
        raw = tensor.contiguous().view(torch.uint8).numpy()
        arena = self.memory.add(Arena(f"input {self._inputs} of {tuple(tensor.shape)}", base, max(raw.size, 1)))
        arena.write(0, raw)
        return base
