"""Random shapes, routings and calls, and the inputs of all ranks that follow from them on any machine."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch

BF16, F32 = torch.bfloat16, torch.float32
DISPATCHED = tuple(
    getattr(torch, name)
    for name in ("bfloat16", "float32", "float8_e4m3fn", "float8_e4m3fnuz", "float4_e2m1fn_x2")
    if hasattr(torch, name)
)
_HIDDEN = (32, 96, 160, 672, 1056)
_NOBODY = 8  # one id of so many names no expert


@dataclass(frozen=True)
class Round:
    """A dispatch and the combines of its rows."""

    tokens: tuple[int, ...]  # by rank
    weights: bool
    external: tuple[bool, ...]  # of each combine: rows are passed, or lie in the registered buffer already


@dataclass(frozen=True)
class Configuration:
    seed: int
    world_size: int
    hidden: int  # values of a row
    topk: int
    experts_per_rank: int
    max_tokens: int
    dtype: torch.dtype  # of dispatch
    combine_dtype: torch.dtype
    scale_dim: int  # float32 scales of a row
    handles: bool  # v1: along routing handles
    rounds: tuple[Round, ...]

    @property
    def capacity(self) -> int:
        return self.world_size * self.max_tokens

    @property
    def columns(self) -> int:
        """Elements of a dispatched row as a tensor: fp4 has two values in one."""
        return self.hidden // 2 if self.dtype == getattr(torch, "float4_e2m1fn_x2", None) else self.hidden


def draw(seed: int, world_size: int) -> Configuration:
    """The configuration of that number."""
    choose = random.Random(seed * 1009 + world_size)
    hidden = choose.choice(_HIDDEN)
    max_tokens = choose.randint(1, 48 if hidden < 600 else 12)

    def tokens() -> int:
        return choose.choice((0, max_tokens, choose.randint(0, max_tokens)))

    rounds = tuple(
        Round(
            tokens=tuple(tokens() for _ in range(world_size)),
            weights=choose.random() < 0.75,
            # The registered buffer is not refilled for a second combine: peers may still read it.
            external=choose.choice(((True,), (False,), (True, True), (False, True), ())),
        )
        for _ in range(choose.randint(1, 3))
    )
    return Configuration(
        seed=seed,
        world_size=world_size,
        hidden=hidden,
        topk=choose.randint(1, 12),
        experts_per_rank=choose.randint(1, 8),
        max_tokens=max_tokens,
        dtype=choose.choice(DISPATCHED),
        combine_dtype=choose.choice((BF16, F32)),
        scale_dim=choose.choice((0, 0, 1, 7, 56)),
        handles=choose.random() < 0.5,
        rounds=rounds,
    )


class Inputs:
    """What `rank` passes in a round."""

    def __init__(self, configuration: Configuration, number: int, rank: int) -> None:
        self._configuration, self._rank = configuration, rank
        self._generator = torch.Generator().manual_seed((configuration.seed * 64 + number) * 1024 + rank)
        count, topk = configuration.rounds[number].tokens[rank], configuration.topk
        experts = configuration.world_size * configuration.experts_per_rank
        self.ids = self._whole(-experts // _NOBODY - 1, experts + 1, (count, topk)).to(torch.int32)
        self.rows = self._bits((count, configuration.columns), configuration.dtype)
        self.weights = self._numbers((count, topk)) if configuration.rounds[number].weights else None
        self.scales = self._bits((count, configuration.scale_dim), F32) if configuration.scale_dim else None

    def answers(self, received: int) -> torch.Tensor:
        """Rows that come back for those that were received; other ones in each combine. Call it once per combine."""
        config = self._configuration
        return self._numbers((received, config.hidden)).to(config.combine_dtype)

    def _whole(self, low: int, high: int, shape: tuple[int, int]) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=self._generator)

    def _bits(self, shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
        raw = self._whole(0, 256, (shape[0], shape[1] * dtype.itemsize)).to(torch.uint8)
        return raw.view(dtype) if raw.numel() else torch.empty(shape, dtype=dtype)

    def _numbers(self, shape: tuple[int, int]) -> torch.Tensor:
        """Of many magnitudes, so that the order of additions and each rounding show."""
        exponents = self._whole(-12, 13, shape)
        return torch.ldexp(torch.randn(shape, generator=self._generator), exponents)
