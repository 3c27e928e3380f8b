"""What a dispatch/combine example is made of: a small description from which every rank derives the same data.

Routing is spelled out (it is what matters and what shrinks well); payloads, weights and scales follow from a seed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

BF16, F32 = torch.bfloat16, torch.float32
PAYLOAD_DTYPES = (BF16, F32, torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float4_e2m1fn_x2)
COMBINE_DTYPES = (BF16, F32)
SCALE_DTYPES = {1: torch.float8_e8m0fnu, 2: torch.bfloat16, 4: torch.float32}

# As float32 bit patterns: zeros, infinities, NaNs of several kinds, denormals, extremes, and neighbours whose sums tie.
_SPECIAL_BITS = np.array(
    [0x00000000, 0x80000000, 0x7F800000, 0xFF800000, 0x7FC00000, 0xFFC12345, 0x7F800001, 0x00000001, 0x80000001]
    + [0x007FFFFF, 0x00010000, 0x7F7F0000, 0xFF7F0000, 0x7F7FFFFF, 0x3F800000, 0x43800000, 0x3F808000, 0x3B800000],
    dtype=np.uint32,
)


@dataclass(frozen=True)
class Step:
    """One call on every rank: a dispatch with its routing, or a combine of the rows of the last dispatch."""

    kind: str
    """dispatch | combine"""
    indices: tuple[np.ndarray, ...] = ()
    """Per rank, int32 [n, K]; what a dispatch sends. The number of rows is the number of tokens."""
    weights: bool = True
    scales: bool = True
    external: bool = True
    whole_view: bool = False
    """combine: pass all R rows instead of the valid ones."""


@dataclass(frozen=True)
class Case:
    world_size: int
    hidden: int
    """Elements per row in calls (h); the op is built for `hidden + spare_hidden`."""
    topk: int
    experts_per_rank: int
    max_tokens: int
    steps: tuple[Step, ...]
    dtype: torch.dtype = BF16
    combine_dtype: torch.dtype = BF16
    combine_hidden: int | None = None
    spare_hidden: int = 0
    scale_dim: int = 0
    scale_bytes: int = 1
    receive_cap: int = 0
    values: str = "numbers"
    """numbers: normal variates; bits: any bit pattern; special: zeros, NaNs, infinities, denormals, ties."""
    seed: int = 0
    grid: tuple[int, int] = (-1, -1)
    """block_num and warp_per_block of every call; results must not depend on them."""

    @property
    def experts(self) -> int:
        return self.world_size * self.experts_per_rank

    @property
    def returned_hidden(self) -> int:
        return self.hidden if self.combine_hidden is None else self.combine_hidden

    @property
    def receive_rows(self) -> int:
        """R: the capacity of the receive buffers, a multiple of the world size."""
        if self.receive_cap <= 0:
            return self.world_size * self.max_tokens
        return self.world_size * min(-(-self.receive_cap // self.world_size), self.max_tokens)

    def config(self, own_rank: int, **overrides):
        """The op's config on `own_rank`."""
        import mori

        fields = {
            "data_type": self.dtype,
            "rank": own_rank,
            "world_size": self.world_size,
            "hidden_dim": max(self.hidden, self.returned_hidden) + self.spare_hidden,
            "scale_dim": self.scale_dim,
            "scale_type_size": self.scale_bytes,
            "max_token_type_size": max(self.dtype.itemsize, self.combine_dtype.itemsize),
            "max_num_inp_token_per_rank": self.max_tokens,
            "num_experts_per_rank": self.experts_per_rank,
            "num_experts_per_token": self.topk,
            "max_total_recv_tokens": self.receive_cap,
        }
        return mori.ops.EpDispatchCombineConfig(**(fields | overrides))

    def with_steps(self, *steps: Step) -> Case:
        return replace(self, steps=steps)


def _generator(case: Case, step: int, rank: int, purpose: int) -> np.random.Generator:
    return np.random.default_rng([case.seed, step, rank, purpose])


def _rows(generator: np.random.Generator, count: int, columns: int, dtype: torch.dtype, values: str) -> torch.Tensor:
    if count == 0:
        return torch.empty(0, columns, dtype=dtype)
    if values == "bits" or dtype not in COMBINE_DTYPES:
        raw = generator.integers(0, 256, size=(count, columns * dtype.itemsize), dtype=np.uint8)
        return torch.from_numpy(raw).view(dtype).reshape(count, columns)
    if values == "special":
        bits = generator.choice(_SPECIAL_BITS, size=(count, columns))
        if dtype == BF16:  # the upper half, cut off rather than rounded, keeps the kinds
            upper = (bits >> np.uint32(16)).astype(np.uint16).view(np.int16)
            return torch.from_numpy(upper).view(BF16)
        return torch.from_numpy(bits.view(np.float32))
    return torch.from_numpy(generator.standard_normal((count, columns), dtype=np.float32)).to(dtype)


def payload(case: Case, step: int, rank: int) -> torch.Tensor:
    """[n, h] rows that `rank` dispatches in `step`."""
    count = len(case.steps[step].indices[rank])
    return _rows(_generator(case, step, rank, 0), count, case.hidden, case.dtype, case.values)


def weights(case: Case, step: int, rank: int) -> torch.Tensor | None:
    """[n, K] router weights, any bit pattern when the values are such; None when the step has none."""
    if not case.steps[step].weights:
        return None
    return _rows(_generator(case, step, rank, 1), len(case.steps[step].indices[rank]), case.topk, F32, case.values)


def scales(case: Case, step: int, rank: int) -> torch.Tensor | None:
    """[n, S] scales, every bit pattern; None when the step has none."""
    if not case.steps[step].scales or case.scale_dim == 0:
        return None
    count = len(case.steps[step].indices[rank])
    dtype = SCALE_DTYPES[case.scale_bytes]
    return _rows(_generator(case, step, rank, 2), count, case.scale_dim, dtype, "bits")


def expert_rows(case: Case, step: int, rank: int, count: int) -> torch.Tensor:
    """[count, h'] rows that `rank` hands to the combine of `step`: unrelated to what it received."""
    return _rows(_generator(case, step, rank, 3), count, case.returned_hidden, case.combine_dtype, case.values)


def returned_weights(case: Case, step: int, rank: int, count: int) -> torch.Tensor | None:
    """[count, K] weights that `rank` hands to the combine of `step`."""
    if not case.steps[step].weights:
        return None
    return _rows(_generator(case, step, rank, 4), count, case.topk, F32, case.values)


ROUTING_STYLES = (
    "distinct",  # K different experts, as a router chooses them
    "any",  # with repetitions
    "one rank",  # every entry to experts of one rank
    "one expert",  # one expert K times, the same for all tokens
    "two ranks",  # alternating between the same two ranks
    "spread",  # as many ranks as possible
    "none",  # only -1
    "half none",  # every other entry -1
    "wild",  # legal ids mixed with ids outside the experts
)


def styled_indices(style: str, tokens: int, topk: int, world_size: int, experts_per_rank: int, seed: int) -> np.ndarray:
    """int32 [tokens, topk] expert ids of one of the ROUTING_STYLES."""
    generator = np.random.default_rng([seed, len(style)])
    experts = world_size * experts_per_rank
    shape = (tokens, topk)
    any_expert = generator.integers(0, experts, size=shape)
    target = int(generator.integers(0, world_size))
    if style == "distinct":
        ids = np.argsort(generator.random((tokens, max(experts, topk))), axis=1)[:, :topk] % experts
    elif style == "one rank":
        ids = target * experts_per_rank + any_expert % experts_per_rank
    elif style == "one expert":
        ids = np.full(shape, target * experts_per_rank)
    elif style == "two ranks":
        ranks = np.array([target, (target + 1) % world_size])[(np.arange(topk) + np.arange(tokens)[:, None]) % 2]
        ids = ranks * experts_per_rank + any_expert % experts_per_rank
    elif style == "spread":
        ranks = (np.arange(topk) + np.arange(tokens)[:, None]) % world_size
        ids = ranks * experts_per_rank + any_expert % experts_per_rank
    elif style == "none":
        ids = np.full(shape, -1)
    elif style == "half none":
        ids = np.where((np.arange(topk) + np.arange(tokens)[:, None]) % 2 == 0, -1, any_expert)
    elif style == "wild":
        nobody = np.array([-1, -2, experts, experts + 1, 2**30, 2**31 - 1, -(2**31)])
        ids = np.where(generator.random(shape) < 0.5, any_expert, generator.choice(nobody, size=shape))
    else:
        assert style == "any", style
        ids = any_expert
    return ids.astype(np.int32)


def routing(style: str, tokens: list[int], topk: int, experts_per_rank: int, seed: int = 0) -> tuple[np.ndarray, ...]:
    """`styled_indices` for every rank, with the given numbers of tokens."""
    return tuple(
        styled_indices(style, count, topk, len(tokens), experts_per_rank, seed * 1000 + rank)
        for rank, count in enumerate(tokens)
    )
