"""A dispatch and a combine that are captured, refilled in place and replayed, every result checked on the device.

Values are small whole numbers, so every sum is exact in bf16 and what comes back is known without the reference:
`copies * 3 * rows`, where the expert triples.
"""

from __future__ import annotations

from typing import Any

import torch

from tests.v2.graphs import captured

FACTOR = 3


class CapturedPair:
    """`together`: one capture holds both calls, else each has its own. `external`: rows are passed, not in place."""

    def __init__(self, op: Any, tokens: int, *, together: bool = True, external: bool = False) -> None:
        cfg, device = op.cfg, op.dev
        self.op, self.tokens = op, tokens
        self.rows = torch.zeros(tokens, cfg.hidden_dim, dtype=cfg.dispatch_dtype, device=device)
        self.weights = torch.zeros(tokens, cfg.num_experts_per_token, device=device)
        self.ids = torch.zeros(tokens, cfg.num_experts_per_token, dtype=torch.int32, device=device)
        self.answers = torch.empty_like(op.combine_in_view()) if external else op.combine_in_view()
        self.views: tuple = ()
        self.results: tuple = ()
        steps = (self._dispatch, self._work, self._combine)
        self.replays = [captured(op, *steps)] if together else [captured(op, step) for step in steps]

    def _dispatch(self) -> None:
        self.views = self.op.dispatch(self.rows, self.weights, None, self.ids, return_routing=True)

    def _work(self) -> None:
        torch.mul(self.op.recv_tokens(), FACTOR, out=self.answers)

    def _combine(self) -> None:
        self.results = self.op.combine(self.answers, self.weights, routing=self.views[5])

    def play(self, generator: torch.Generator) -> torch.Tensor:
        """New rows, weights and routing at the same addresses, one replay; how many values are wrong, on the device."""
        cfg, device = self.op.cfg, self.op.dev
        experts = cfg.world_size * cfg.num_experts_per_rank
        rows = torch.randint(0, 4, self.rows.shape, generator=generator).to(self.rows.dtype)
        weights = torch.randint(0, 100, self.weights.shape, generator=generator).float()
        ids = torch.randint(-1, experts + 1, self.ids.shape, generator=generator, dtype=torch.int32)
        copies = copies_of(ids, cfg.num_experts_per_rank, cfg.world_size).to(device)
        for kept, new in ((self.rows, rows), (self.weights, weights), (self.ids, ids)):
            kept.copy_(new)
        for replay in self.replays:
            replay()
        out, out_weights = self.results
        wrong = (out.float() != copies * FACTOR * self.rows.float()).sum()
        return wrong + (out_weights != copies * self.weights).sum()


def copies_of(ids: torch.Tensor, experts_per_rank: int, world_size: int) -> torch.Tensor:
    """float32 (n, 1): to how many ranks each token goes."""
    named = (ids >= 0) & (ids < world_size * experts_per_rank)
    ranks = torch.where(named, ids // experts_per_rank, world_size).long()
    sent = torch.zeros(len(ids), world_size + 1).scatter_(1, ranks, 1.0)
    return sent[:, :world_size].sum(dim=1, keepdim=True)
