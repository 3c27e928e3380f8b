"""A dispatch and a combine in CUDA graphs, with inputs that are refilled in place between replays."""

from __future__ import annotations

from typing import Any

import torch

from tests.gpu.ranks import device_of
from tests.gpu.rounds import Ledger, Pattern, Shape, check_combine, check_dispatch
from tests.rank_worker import RankContext


class GraphedPair:
    """Captured once for `tokens` tokens of this rank, replayed with any pattern of that size.

    `together`: one graph holds both calls, else each has its own. `layers`: how often the pair is in the graph.
    """

    def __init__(
        self,
        context: RankContext,
        op: Any,
        shape: Shape,
        tokens: int,
        *,
        together: bool = True,
        external: bool = True,
        layers: int = 1,
    ) -> None:
        device = device_of(context)
        self.op, self.shape, self.external = op, shape, external
        rows = op.max_num_tokens_to_recv()
        self.values = torch.zeros(tokens, shape.hidden, dtype=shape.dtype, device=device)
        self.weights = torch.zeros(tokens, shape.topk, device=device)
        self.ids = torch.zeros(tokens, shape.topk, dtype=torch.int32, device=device)
        self.answers = torch.zeros(rows, shape.hidden, dtype=shape.dtype, device=device)
        self.answer_weights = torch.zeros(rows, shape.topk, device=device)
        self.views: tuple = ()
        self.results: tuple = ()
        calls = (self._pair,) if together else (self._dispatch, self._combine)
        self.graphs = []
        for call in calls:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                for _ in range(layers):
                    call()
            self.graphs.append(graph)

    def _dispatch(self) -> None:
        self.views = self.op.dispatch(self.values, self.weights, None, self.ids)

    def _combine(self) -> None:
        answers = self.answers
        if not self.external:
            answers = self.op.get_registered_combine_input_buffer(self.shape.dtype)
            answers.copy_(self.answers)
        self.results = self.op.combine(answers, self.answer_weights, self.ids, use_external_inp_buf=int(self.external))

    def _pair(self) -> None:
        self._dispatch()
        self._combine()

    def fill(self, pattern: Pattern, tag: int) -> None:
        """New data, weights and routing at the same addresses."""
        small_tag = tag % self.shape.values
        self.values.copy_(pattern.tagged(pattern.values, tag))
        self.weights.copy_(pattern.weights + small_tag)
        self.ids.copy_(pattern.ids)
        self.answers[: pattern.received].copy_(pattern.tagged(pattern.answers, tag))
        self.answer_weights[: pattern.received].copy_(pattern.answer_weights + small_tag)

    def replay(self) -> None:
        for graph in self.graphs:
            graph.replay()

    def play(self, pattern: Pattern, tag: int, ledger: Ledger) -> None:
        """Refill, replay and check, all in stream order."""
        self.fill(pattern, tag)
        self.replay()
        check_dispatch(ledger, pattern, tag, self.views)
        check_combine(ledger, pattern, tag, self.results)
