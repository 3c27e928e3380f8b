"""Routings and distributions of values by name, as functions of sizes and a generator on the CPU."""

from __future__ import annotations

from collections.abc import Callable

import torch


def random(generator: torch.Generator, rank: int, tokens: int, topk: int, world_size: int, per_rank: int):
    """Top-k different experts for each token, all equally likely."""
    scores = torch.rand(tokens, world_size * per_rank, generator=generator, dtype=torch.float64)
    return scores.argsort(dim=1)[:, :topk]


def round_robin(generator: torch.Generator, rank: int, tokens: int, topk: int, world_size: int, per_rank: int):
    """Expert after expert, through all of them."""
    return torch.arange(tokens * topk).view(tokens, topk) % (world_size * per_rank)


def remote_round_robin(generator: torch.Generator, rank: int, tokens: int, topk: int, world_size: int, per_rank: int):
    """Expert after expert, but for those of the own rank."""
    place = torch.arange(tokens * topk).view(tokens, topk) % ((world_size - 1) * per_rank)
    return place + per_rank * (place >= rank * per_rank)


def spread(generator: torch.Generator, rank: int, tokens: int, topk: int, world_size: int, per_rank: int):
    """One expert of every rank for each token: the most rows that a rank can receive. Top-k is the world size."""
    local = torch.randint(0, per_rank, (tokens, world_size), generator=generator)
    return local + torch.arange(world_size) * per_rank


def all_to_one(generator: torch.Generator, rank: int, tokens: int, topk: int, world_size: int, per_rank: int):
    """Expert 0 for everything."""
    return torch.zeros(tokens, topk, dtype=torch.int64)


ROUTINGS: dict[str, Callable[..., torch.Tensor]] = {
    each.__name__: each for each in (random, round_robin, remote_round_robin, spread, all_to_one)
}


def normal(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=generator)


def uniform(generator: torch.Generator, *shape: int) -> torch.Tensor:
    """-1 to 1."""
    return torch.rand(*shape, generator=generator) * 2 - 1


def lognormal(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.empty(*shape).log_normal_(generator=generator)


def two_bucket(generator: torch.Generator, *shape: int) -> torch.Tensor:
    """Normal, and one value in a hundred a hundred times as large."""
    rare = torch.rand(*shape, generator=generator) < 0.01
    return torch.randn(*shape, generator=generator) * torch.where(rare, 100.0, 1.0)


DISTRIBUTIONS: dict[str, Callable[..., torch.Tensor]] = {
    each.__name__: each for each in (normal, uniform, lognormal, two_bucket)
}
