"""Runs a Case of tests/v1 on a v2 op and holds every result against the reference, bit for bit, on any device."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from tests import reference
from tests.gpu.bridge import moved
from tests.rank_worker import RankContext
from tests.v1 import cases
from tests.v1.cases import BF16, FP4, Case, Step
from tests.v1.exercise import environment, require, require_same_bits
from tests.v2.ranks import communicator

SCALE_BYTES = 4


def case_of(world_size: int, hidden: int, topk: int, experts_per_rank: int, max_tokens: int, **fields: Any) -> Case:
    """A case for `hidden` values in a row of either leg."""
    case = Case(world_size, hidden, topk, experts_per_rank, max_tokens, (), scale_bytes=SCALE_BYTES)
    case = replace(case, **({"combine_dtype": BF16} | fields))
    return replace(case, hidden=hidden // 2, combine_hidden=hidden) if case.dtype == FP4 else case


def config_of(case: Case, rank: int, **overrides: Any) -> Any:
    from mori.ops.dispatch_combine_v2 import EpDispatchCombineConfig

    fields: dict[str, Any] = {
        "rank": rank,
        "world_size": case.world_size,
        "hidden_dim": case.returned_hidden,
        "max_num_inp_token_per_rank": case.max_tokens,
        "num_experts_per_rank": case.experts_per_rank,
        "num_experts_per_token": case.topk,
        "dispatch_data_type": case.dtype,
        "combine_data_type": case.combine_dtype,
        "scale_dim": case.scale_dim,
        "scale_type_size": case.scale_bytes if case.scale_dim else 0,
    }
    if case.grid != (-1, -1):
        blocks, warps = case.grid
        fields |= {"dispatch_block_num": blocks, "warp_num_per_block": warps, "combine_block_num": blocks}
    return EpDispatchCombineConfig(**(fields | overrides))


def new_op(context: RankContext, case: Case, **overrides: Any) -> Any:
    """An op for the case on the shared communicator, built under its environment."""
    from mori.ops.dispatch_combine_v2 import EpDispatchCombineOp

    with environment(*case.environment):
        return EpDispatchCombineOp(config_of(case, context.rank, **overrides), communicator(context))


@dataclass
class Exercise:
    """One op under test together with what it must hold at the moment. Odd dispatches make snapshots."""

    context: RankContext
    case: Case
    op: Any = None
    routing: reference.Routing | None = None
    received: list[reference.Received] = field(default_factory=list)
    handle: Any = None
    views: tuple = ()
    addresses: dict = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.op is None:
            self.op = new_op(self.context, self.case)

    @property
    def capacity(self) -> int:
        return self.case.world_size * self.case.max_tokens

    def there(self, tensor: torch.Tensor | None) -> torch.Tensor | None:
        return None if tensor is None else moved(tensor, self.op.dev)

    def run(self) -> None:
        try:
            for number, step in enumerate(self.case.steps):
                if step.kind == "dispatch":
                    self.dispatch(number, step)
                else:
                    self.combine(number, step)
            self.op.check()
        finally:
            self.op.close()

    def dispatch(self, number: int, step: Step) -> None:
        case, rank, ranks = self.case, self.context.rank, range(self.case.world_size)
        indices = [torch.from_numpy(ids) for ids in step.indices]
        rows = [cases.payload(case, number, peer) for peer in ranks]
        weights = [cases.weights(case, number, peer) for peer in ranks]
        scales = [cases.scales(case, number, peer) for peer in ranks]
        self.routing = reference.route(indices, case.experts_per_rank)
        sent_scales: Any = None if scales[0] is None else scales
        self.received = reference.dispatch(self.routing, rows, indices, weights, sent_scales, case.max_tokens)
        given = [self.there(each[rank]) for each in (rows, weights, scales, indices)]
        *self.views, self.handle = self.op.dispatch(*given, return_routing=True, snapshot=number % 2 == 1)
        self.check_dispatch(f"step {number} (dispatch)")
        self.check_maps(f"step {number} (dispatch)")

    def check_dispatch(self, when: str) -> None:
        case, op, expected = self.case, self.op, self.received[self.context.rank]
        rows, weights, scales, indices, count = self.views
        total = len(expected.rows)
        require(int(count) == total, f"{when}: received {int(count)} rows, expected {total}")
        require(tuple(rows.shape) == (self.capacity, case.hidden), f"{when}: rows have shape {tuple(rows.shape)}")
        require(rows is op.recv_tokens() and scales is op.recv_scales(), f"{when}: not the op's views")
        require(weights is op.recv_weights() and indices is op.recv_indices(), f"{when}: not the op's views")
        require_same_bits(moved(rows[:total], "cpu"), expected.rows, f"{when}: rows")
        require_same_bits(moved(weights[:total], "cpu"), expected.weights, f"{when}: weights")
        require_same_bits(moved(indices[:total], "cpu"), expected.indices, f"{when}: ids")
        require((scales is None) == (case.scale_dim == 0), f"{when}: scales are {type(scales)}")
        if expected.scales is not None:
            require(op.scale_stride_bytes() == scales.stride(0) * 4, f"{when}: stride of scales")
            require_same_bits(scales[:total].cpu(), expected.scales.view(torch.int32), f"{when}: scales")
        here = {name: view.data_ptr() for name, view in zip("rwsic", self.views, strict=True) if view is not None}
        self.addresses = self.addresses or here
        require(here == self.addresses, f"{when}: views have moved")

    def check_maps(self, when: str) -> None:
        """Forward: rank * cap + row, W * cap for none. Reverse: rank * M + token."""
        case, routing, rank = self.case, self.routing, self.context.rank
        assert routing is not None
        destination, row = routing.destination[rank], routing.row[rank]
        flat = np.where(destination >= 0, destination * self.capacity + row, case.world_size * self.capacity)
        require(self.handle.cur_rank_num_token == len(flat), f"{when}: tokens of the handle")
        forward = self.handle.disp_dest_tok_id_map.cpu().view(case.max_tokens, case.topk)[: len(flat)]
        require_same_bits(forward, torch.from_numpy(flat.astype(np.int32)), f"{when}: forward map")
        source = routing.source[rank]
        origin = torch.from_numpy((source[:, 0] * case.max_tokens + source[:, 1]).astype(np.int32))
        reverse = self.handle.disp_tok_id_to_src_tok_id_local.cpu()
        require_same_bits(reverse[: len(origin)], origin, f"{when}: reverse map")

    def combine(self, number: int, step: Step) -> None:
        case, rank, op, routing = self.case, self.context.rank, self.op, self.routing
        assert routing is not None
        counts = [routing.received(peer) for peer in range(case.world_size)]
        returned = [cases.expert_rows(case, number, peer, count) for peer, count in enumerate(counts)]
        own: Any = self.there(returned[rank])
        if step.whole_view or not step.external:
            whole = op.combine_in_view() if not step.external else torch.empty_like(op.combine_in_view())
            whole.view(torch.uint8)[: counts[rank]].copy_(own.contiguous().view(torch.uint8))
            own = whole if step.whole_view else whole[: counts[rank]]
        # Its contents must not matter.
        wanted = torch.full((1,), float("nan")) if step.weights else None
        out, out_weights = op.combine(own, wanted, routing=self.handle)
        when = f"step {number} (combine)"
        require_same_bits(moved(out, "cpu"), reference.combine(routing, returned)[rank], f"{when}: rows")
        if step.weights:
            tables = [received.weights for received in self.received]
            expected = reference.combine_weights(routing, tables, case.topk)[rank]
            assert expected is not None
            require_same_bits(out_weights.cpu(), expected, f"{when}: weights")
        else:
            require(out_weights is None, f"{when}: weights are {type(out_weights)}, expected None")
        self.check_dispatch(f"{when}, dispatch views afterwards")


def exercise(context: RankContext, case: Case) -> None:
    """Builds an op for the case, takes its steps and checks every result."""
    Exercise(context, case).run()
