"""A dispatch and a combine in one graph, replayed: every replay brings back each token once per rank that it went to.

HIDDEN, TOPK, EPR (experts per rank), CT (tokens), REPLAYS. On CPUs a recorded list of launches takes the graph's place.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[4]))

import torch

from mori.ops.dispatch_combine_v2 import EpDispatchCombineConfig, EpDispatchCombineOp
from tests.python.ops.dispatch_combine_v2.ranks import Rank, number, run
from tests.python.ops.harness import ranks_of
from tests.rank_worker import RankContext
from tests.v2.graphs import captured
from tests.v2.ranks import communicator
from tests.v2.replays import copies_of

TOLERANCE = 1e-2
WARM_UPS = 3


def program(this: Rank) -> bool:
    hidden, topk, experts_per_rank = number("HIDDEN", 2048), number("TOPK", 8), number("EPR", 16)
    tokens, replays = number("CT", 512), number("REPLAYS", 5)
    config = EpDispatchCombineConfig(this.rank, this.world_size, hidden, tokens, experts_per_rank, topk)
    generator = torch.Generator().manual_seed(1234 + this.rank)
    rows = torch.zeros(tokens, hidden, dtype=torch.bfloat16, device=this.device)
    ids = torch.zeros(tokens, topk, dtype=torch.int32, device=this.device)
    weights = torch.rand(tokens, topk, generator=generator).to(this.device)
    with EpDispatchCombineOp(config, this.communicator) as op:
        results: list[torch.Tensor] = []

        def pair() -> None:
            received, *_, handle = op.dispatch(rows, weights, None, ids, return_routing=True)
            results[:] = [op.combine(received, routing=handle)[0]]

        warm_up(this, pair)
        replay = captured(op, pair)
        wrong = 0
        for _ in range(replays):
            new_ids = torch.randint(0, this.world_size * experts_per_rank, ids.shape, generator=generator)
            ids.copy_(new_ids)
            rows.copy_(torch.randn(rows.shape, generator=generator))
            replay()
            this.finish_kernels()
            expected = rows.float() * copies_of(new_ids, experts_per_rank, this.world_size).to(this.device)
            error = (results[0].float() - expected).abs()
            wrong += int((error > TOLERANCE * (1 + expected.abs())).sum())
        passed = this.agree(wrong == 0)
        backend = op.backend_name
    this.say(
        f"# GRAPH-CAPTURE: {'PASS' if passed else 'FAIL'} ct={tokens} replays={replays} ranks={this.world_size} "
        f"backend={backend} on {this.device.type}"
    )
    return passed


def warm_up(this: Rank, call) -> None:
    if this.device.type != "cuda":
        for _ in range(WARM_UPS):
            call()
        return
    stream = torch.cuda.Stream(this.device)
    with torch.cuda.stream(stream):
        for _ in range(WARM_UPS):
            call()
    torch.cuda.current_stream(this.device).wait_stream(stream)


def in_pool(context: RankContext) -> list[str]:
    this = Rank(context.rank, context.world_size, communicator(context))
    program(this)
    return this.lines


def test_graph_capture() -> None:
    for (line,) in ranks_of().run(in_pool):
        assert line.startswith("# GRAPH-CAPTURE: PASS ct=512 replays=5"), line


if __name__ == "__main__":
    raise SystemExit(run(program))
