"""One MoE layer of all ranks, as a client sees it: what the router chose, what the experts do, and the right result.

Everything follows from numbers, so each rank knows what its peers send. Values are small multiples of powers of two:
sums and products are exact in float32, whatever their order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from benchmarks.expected import float_values
from tests import reference


@dataclass(frozen=True)
class Wire:
    """How a client packs rows for dispatch: `block` logical values share a scale; 0 means no scales."""

    dtype: torch.dtype = torch.bfloat16
    block: int = 0
    scale_dtype: torch.dtype = torch.float32

    @property
    def values_per_element(self) -> int:
        return 2 if self.dtype == torch.float4_e2m1fn_x2 else 1

    def columns(self, hidden: int) -> int:
        return hidden // self.values_per_element

    def scale_dim(self, hidden: int) -> int:
        return hidden // self.block if self.block else 0

    def rows(self, generator: np.random.Generator, count: int, hidden: int) -> torch.Tensor:
        if self.dtype == torch.float4_e2m1fn_x2:
            raw = generator.integers(0, 256, (count, hidden // 2), dtype=np.uint8)
            return torch.from_numpy(raw).view(self.dtype)
        return torch.from_numpy(generator.integers(-8, 9, (count, hidden)).astype(np.float32)).to(self.dtype)

    def scales(self, generator: np.random.Generator, count: int, hidden: int) -> torch.Tensor | None:
        if not self.block:
            return None
        exponents = generator.integers(-2, 3, (count, self.scale_dim(hidden)))
        return torch.from_numpy((2.0**exponents).astype(np.float32)).to(self.scale_dtype)

    def unpack(self, rows: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
        """float32 [rows, hidden]."""
        values = float_values(rows)
        return values if scales is None else values * scales.float().repeat_interleave(self.block, dim=1)


class Layer:
    """Tokens of every rank (`counts`), their experts and weights; E experts per rank, each of which scales rows."""

    def __init__(
        self,
        counts: Sequence[int],
        *,
        wire: Wire = Wire(),
        hidden: int = 256,
        topk: int = 4,
        experts_per_rank: int = 4,
        max_tokens: int = 16,
        returned: torch.dtype = torch.bfloat16,
        seed: int = 0,
        only_rank: int | None = None,
    ) -> None:
        self._made_from = {name: value for name, value in locals().items() if name != "self"}
        self.world_size, self.wire, self.hidden, self.topk = len(counts), wire, hidden, topk
        self.experts_per_rank, self.max_tokens, self.returned = experts_per_rank, max_tokens, returned
        generator = np.random.default_rng(seed)
        first, last = (0, self.world_size) if only_rank is None else (only_rank, only_rank + 1)
        candidates = np.arange(first * experts_per_rank, last * experts_per_rank, dtype=np.int32)

        def choose(count: int) -> torch.Tensor:
            order = np.argsort(generator.random((count, len(candidates))), axis=1)[:, :topk]
            return torch.from_numpy(candidates[order])

        self.ids = [choose(count) for count in counts]
        self.rows = [wire.rows(generator, count, hidden) for count in counts]
        self.scales = [wire.scales(generator, count, hidden) for count in counts]
        self.weights = [
            torch.from_numpy(generator.integers(1, 9, (count, topk)).astype(np.float32)) / 8 for count in counts
        ]
        self.routing = reference.route(self.ids, experts_per_rank)

    def __reduce__(self) -> tuple:
        # Each rank makes the data itself: torch does not pickle tensors of the narrow dtypes.
        return _make_layer, (self._made_from,)

    def config_fields(self, rank: int, **of_the_client: Any) -> dict[str, Any]:
        """The keywords that every client passes, with its own among them."""
        fields = {
            "data_type": self.wire.dtype,
            "rank": rank,
            "world_size": self.world_size,
            "hidden_dim": self.hidden,
            "scale_dim": self.wire.scale_dim(self.hidden),
            "scale_type_size": self.wire.scale_dtype.itemsize,
            "max_token_type_size": self.returned.itemsize,
            "max_num_inp_token_per_rank": self.max_tokens,
            "num_experts_per_rank": self.experts_per_rank,
            "num_experts_per_token": self.topk,
        }
        return fields | of_the_client

    def received(self, rank: int, weights: bool = True) -> reference.Received:
        """What `rank` must hold after the dispatch."""
        scales = None if self.scales[0] is None else self.scales
        sent = self.weights if weights else [None] * self.world_size
        return reference.dispatch(self.routing, self.rows, self.ids, sent, scales, self.max_tokens)[rank]

    def factors(self, rank: int, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """[rows]: what the experts of `rank` multiply each row by in all: weight x (1 + local number) of each."""
        local = ids.long() - rank * self.experts_per_rank
        mine = (local >= 0) & (local < self.experts_per_rank)
        return torch.where(mine, weights * (1 + local), 0.0).sum(dim=1)

    def experts(
        self, rank: int, rows: torch.Tensor, scales: torch.Tensor | None, weights: torch.Tensor, ids: torch.Tensor
    ) -> torch.Tensor:
        """Contribution of the experts of `rank` to each row, weighted. Takes whole untrimmed views."""
        values = self.wire.unpack(rows, scales)
        return (values * self.factors(rank, weights, ids)[:, None]).to(self.returned)

    def result(self, rank: int) -> torch.Tensor:
        """[n, hidden]: what the layer must give for the tokens of `rank`."""
        answers = []
        for peer in range(self.world_size):
            got = self.received(peer)
            answers.append(self.experts(peer, got.rows, got.scales, got.weights, got.indices))
        return reference.combine(self.routing, answers)[rank]

    def local_expert_count(self, rank: int) -> list[int]:
        """How often each expert of `rank` is named in the rows it receives."""
        ids = self.received(rank).indices
        first = rank * self.experts_per_rank
        return [int((ids == expert).sum()) for expert in range(first, first + self.experts_per_rank)]


def _make_layer(arguments: dict[str, Any]) -> Layer:
    return Layer(**arguments)
