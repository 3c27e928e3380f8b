"""Rounds of dispatch and combine whose inputs and expected results lie on the device, so that checks need no waiting.

A Pattern fixes routing and values. Each round adds its own *tag* to every value, so what an earlier round left behind
is not taken for the result. All values and sums are whole numbers that the dtype holds exactly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from tests import reference
from tests.gpu.ranks import device_of
from tests.rank_worker import RankContext

NEVER = 2**62
CHECKS = ("count", "rows", "weights", "ids", "combined rows", "combined weights")


@dataclass(frozen=True)
class Shape:
    max_tokens: int = 64
    hidden: int = 96
    topk: int = 4
    experts_per_rank: int = 4
    dtype: torch.dtype = torch.float32

    @property
    def values(self) -> int:
        """Inputs and tags are below this; sums over 8 ranks stay exact."""
        return 2**19 if self.dtype == torch.float32 else 16


def new_op(context: RankContext, shape: Shape, **overrides: Any) -> Any:
    import mori

    fields = {
        "data_type": shape.dtype,
        "rank": context.rank,
        "world_size": context.world_size,
        "hidden_dim": shape.hidden,
        "scale_dim": 0,
        "scale_type_size": 1,
        "max_token_type_size": 4,
        "max_num_inp_token_per_rank": shape.max_tokens,
        "num_experts_per_rank": shape.experts_per_rank,
        "num_experts_per_token": shape.topk,
    }
    return mori.ops.EpDispatchCombineOp(mori.ops.EpDispatchCombineConfig(**(fields | overrides)))


class Pattern:
    """What this rank sends, receives, returns and gets back, before the tag is added."""

    def __init__(self, context: RankContext, shape: Shape, seed: int, counts: Sequence[int]) -> None:
        self.shape = shape
        rank, world = context.rank, context.world_size
        generator = np.random.default_rng(seed)

        def whole(*extents: int) -> torch.Tensor:
            return torch.from_numpy(generator.integers(0, shape.values, size=extents).astype(np.float32))

        experts = world * shape.experts_per_rank
        # -1 and `experts` name nobody.
        ids = [
            torch.from_numpy(generator.integers(-1, experts + 1, size=(n, shape.topk)).astype(np.int32)) for n in counts
        ]
        values = [whole(n, shape.hidden) for n in counts]
        weights = [whole(n, shape.topk) for n in counts]
        routing = reference.route(ids, shape.experts_per_rank)
        totals = [routing.received(peer) for peer in range(world)]
        answers = [whole(total, shape.hidden) for total in totals]
        answer_weights = [whole(total, shape.topk) for total in totals]
        received = reference.dispatch(routing, values, ids, weights, None, shape.max_tokens)[rank]
        combined_weights = reference.combine_weights(routing, answer_weights, shape.topk)[rank]
        assert combined_weights is not None

        device = device_of(context)
        self.tokens, self.received = counts[rank], totals[rank]
        self.ids, self.values, self.weights = (each[rank].to(device) for each in (ids, values, weights))
        self.answers, self.answer_weights = answers[rank].to(device), answer_weights[rank].to(device)
        self.received_rows, self.received_weights = received.rows.to(device), received.weights.to(device)
        self.received_ids = received.indices.to(device)
        self.combined = reference.combine(routing, answers)[rank].to(device)
        self.combined_weights = combined_weights.to(device)
        self.copies = torch.from_numpy(routing.copies(rank)).float()[:, None].to(device)

    def tagged(self, table: torch.Tensor, tag: int, times: torch.Tensor | int = 1) -> torch.Tensor:
        return (table + tag % self.shape.values * times).to(self.shape.dtype)


class Ledger:
    """Counts what differs, on the device; `settle` reads it once at the end."""

    def __init__(self, context: RankContext) -> None:
        device = device_of(context)
        self.rank = context.rank
        self.wrong = torch.zeros(len(CHECKS), dtype=torch.int64, device=device)
        self.first_tag = torch.full((len(CHECKS),), NEVER, dtype=torch.int64, device=device)
        self.checks = 0

    def expect(self, what: str, tag: int, actual: torch.Tensor, expected: torch.Tensor) -> None:
        place = CHECKS.index(what)
        wrong = (actual != expected).sum()
        self.wrong[place] += wrong
        self.first_tag[place] = torch.minimum(self.first_tag[place], torch.where(wrong > 0, tag, NEVER))
        self.checks += 1

    def settle(self) -> int:
        """AssertionError names what differed and the first round in which it did; else the number of checks."""
        found = [
            f"{count} values of {what}, first in round {first}"
            for what, count, first in zip(CHECKS, self.wrong.tolist(), self.first_tag.tolist(), strict=True)
            if count
        ]
        if found:
            raise AssertionError(f"rank {self.rank}: wrong are {'; '.join(found)}")
        return self.checks


def check_dispatch(ledger: Ledger, pattern: Pattern, tag: int, views: tuple) -> None:
    rows, weights, _, ids, count = views
    total = pattern.received
    ledger.expect("count", tag, count, torch.full_like(count, total))
    ledger.expect("rows", tag, rows[:total], pattern.tagged(pattern.received_rows, tag))
    ledger.expect("weights", tag, weights[:total], pattern.received_weights + tag % pattern.shape.values)
    ledger.expect("ids", tag, ids[:total], pattern.received_ids)


def check_combine(ledger: Ledger, pattern: Pattern, tag: int, results: tuple) -> None:
    rows, weights = results
    ledger.expect("combined rows", tag, rows[: pattern.tokens], pattern.tagged(pattern.combined, tag, pattern.copies))
    expected = pattern.combined_weights + tag % pattern.shape.values * pattern.copies
    ledger.expect("combined weights", tag, weights[: pattern.tokens], expected)


def play(op: Any, pattern: Pattern, tag: int, ledger: Ledger, *, external: bool = True, **grid: int) -> None:
    """One eager round with all checks, without waiting for the device."""
    small_tag = tag % pattern.shape.values
    views = op.dispatch(pattern.tagged(pattern.values, tag), pattern.weights + small_tag, None, pattern.ids, **grid)
    check_dispatch(ledger, pattern, tag, views)
    answer = pattern.tagged(pattern.answers, tag)
    if not external:
        buffer = op.get_registered_combine_input_buffer(pattern.shape.dtype)
        buffer[: pattern.received].copy_(answer)
        answer = buffer
    answer_weights = pattern.answer_weights + small_tag
    results = op.combine(answer, answer_weights, pattern.ids, use_external_inp_buf=int(external), **grid)
    check_combine(ledger, pattern, tag, results)


def varied_counts(number: int, world_size: int, max_tokens: int) -> list[int]:
    """Token counts of all ranks in pattern `number`: none, all and everything between, unlike on each rank."""
    generator = np.random.default_rng([number, max_tokens])
    kinds = generator.integers(0, 4, size=world_size)
    pairs = zip(kinds, generator.integers(0, max_tokens + 1, size=world_size), strict=True)
    return [int(np.select([kind == 0, kind == 1], [0, max_tokens], some)) for kind, some in pairs]
