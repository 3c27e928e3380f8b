"""What a dispatch/combine example is made of: a small description from which every rank derives the same data.

Routing is spelled out (it is what matters and what shrinks well); payloads, weights and scales follow from a seed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from tests import reference

BF16, F32, FP4 = torch.bfloat16, torch.float32, torch.float4_e2m1fn_x2
PAYLOAD_DTYPES = (BF16, F32, torch.float8_e4m3fn, torch.float8_e4m3fnuz, FP4)
KERNEL_TYPES = ("IntraNode", "InterNode", "InterNodeV1", "InterNodeV1LL", "AsyncLL", "IntraNodeLL")
QUANT_TYPES = ("none", "fp8_direct_cast", "fp8_blockwise", "fp4_blockwise")
# Which kernel types offer a quantisation; a direct cast is offered by all.
BLOCKWISE = {"fp8_blockwise": ("IntraNode", "IntraNodeLL", "AsyncLL"), "fp4_blockwise": ("IntraNode", "IntraNodeLL")}
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
    """numbers: normal variates; wide: of many magnitudes; bits: any bit pattern; special: zeros, NaNs, infinities,
    denormals, ties."""
    seed: int = 0
    grid: tuple[int, int] = (-1, -1)
    """block_num and warp_per_block, of every call and of the op; results must not depend on them."""
    kernel_type: str = "IntraNode"
    quant_type: str = "none"
    wire_fp8: torch.dtype = torch.float8_e4m3fn
    """What rows are quantised to where the kernels run."""
    environment: tuple[tuple[str, str], ...] = ()
    """Variables that are set while the op is built."""

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

    @property
    def scales_per_row(self) -> int:
        """How many blocks a row has when it is quantised block-wise."""
        return int(dict(self.environment).get("MORI_FP8_COMBINE_SCALE_DIM", 56))

    def quantises(self, step: Step) -> bool:
        """Whether the rows of this combine travel quantised."""
        return self.quant_type != "none" and self.combine_dtype == BF16 and step.external

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
            "kernel_type": getattr(mori.ops.EpDispatchCombineKernelType, self.kernel_type),
            "quant_type": self.quant_type,
        }
        if self.grid[0] > 0:
            fields |= {"block_num": self.grid[0], "warp_num_per_block": self.grid[1]}
        return mori.ops.EpDispatchCombineConfig(**(fields | overrides))

    def with_steps(self, *steps: Step) -> Case:
        return replace(self, steps=steps)


def _generator(case: Case, step: int, rank: int, purpose: int) -> np.random.Generator:
    return np.random.default_rng([case.seed, step, rank, purpose])


def _numbers(generator: np.random.Generator, shape: tuple[int, int], values: str) -> np.ndarray:
    """float32 of one of the kinds that `Case.values` names, but for bits."""
    if values == "special":
        return generator.choice(_SPECIAL_BITS, size=shape).view(np.float32)
    numbers = generator.standard_normal(shape, dtype=np.float32)
    if values == "wide":  # by row and by element, from what fp8 rounds to zero to what it cannot hold
        numbers *= np.exp2(generator.integers(-12, 13, size=(shape[0], 1)).astype(np.float32))
        numbers *= np.exp2(generator.integers(-6, 7, size=shape).astype(np.float32))
    return numbers


def _rows(generator: np.random.Generator, count: int, columns: int, dtype: torch.dtype, values: str) -> torch.Tensor:
    if count == 0:
        return torch.empty(0, columns, dtype=dtype)
    if values == "bits":
        raw = generator.integers(0, 256, size=(count, columns * dtype.itemsize), dtype=np.uint8)
        return torch.from_numpy(raw).view(dtype).reshape(count, columns)
    numbers = _numbers(generator, (count, columns * 2 if dtype == FP4 else columns), values)
    if dtype == F32:
        return torch.from_numpy(numbers)
    if dtype == BF16 and values == "special":  # the upper half, cut off rather than rounded, keeps the kinds
        return torch.from_numpy((numbers.view(np.uint32) >> np.uint32(16)).astype(np.uint16).view(np.int16)).view(BF16)
    return reference.narrow(numbers, dtype)


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
