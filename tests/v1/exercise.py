"""Runs a Case on a rank and holds every result against the reference, bit for bit. Called on all ranks of a pool."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from tests import quantised_reference, reference
from tests.rank_worker import RankContext
from tests.v1 import cases
from tests.v1.cases import Case, Step


def require_same_bits(actual: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    """AssertionError naming the first row and column that differ, with both values."""
    if actual.dtype != expected.dtype:
        raise AssertionError(f"{what}: dtype is {actual.dtype}, expected {expected.dtype}")
    if actual.shape != expected.shape:
        raise AssertionError(f"{what}: shape is {tuple(actual.shape)}, expected {tuple(expected.shape)}")
    if actual.dim() == 1:
        actual, expected = actual[:, None], expected[:, None]
    got, want = reference.as_bytes(actual), reference.as_bytes(expected)
    if torch.equal(got, want):
        return
    different = got != want
    row = int(different.any(dim=1).nonzero()[0])
    byte = int(different[row].nonzero()[0])
    bad_rows = int(different.any(dim=1).sum())
    size = expected.element_size()
    start = byte // size * size
    values = [bytes(side[row, start : start + size].tolist())[::-1].hex() for side in (got, want)]
    raise AssertionError(
        f"{what}: row {row} column {start // size} is 0x{values[0]}, expected 0x{values[1]} "
        f"({bad_rows} of {got.shape[0]} rows differ)"
    )


def require(condition: object, message: str) -> None:
    """An assertion with a text that reaches the parent (rank processes run without pytest's rewriting)."""
    if not condition:
        raise AssertionError(message)


def raises(error: type[Exception], call: Callable, *args, says: str = "") -> None:
    """Requires that `call(*args)` raises `error` with a message that contains `says`."""
    try:
        call(*args)
    except error as raised:
        require(says in str(raised), f"the message does not say {says!r}: {raised}")
    else:
        raise AssertionError(f"{getattr(call, '__name__', call)}{args} raised nothing")


@contextlib.contextmanager
def environment(*variables: tuple[str, str]) -> Iterator[None]:
    """Sets variables for what is built inside."""
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def new_op(context: RankContext, case: Case, **overrides):
    """An op for the case, built under its environment."""
    import mori

    with environment(*case.environment):
        return mori.ops.EpDispatchCombineOp(case.config(context.rank, **overrides))


def overwrite(*tensors: torch.Tensor | None) -> None:
    """Fills what a call has been given with something that shows if it is still read."""
    for tensor in tensors:
        if tensor is not None and tensor.numel():
            tensor.view(torch.uint8).fill_(0x5B)


def combined(case: Case, step: Step, routing: reference.Routing, returned: list[torch.Tensor]) -> list[torch.Tensor]:
    """What a combine gives each rank, for the quantisation of the case."""
    if not case.quantises(step):
        return reference.combine(routing, returned)
    if case.quant_type == "fp8_direct_cast":
        return quantised_reference.fp8_direct_cast_combine(routing, returned, case.wire_fp8)
    if case.quant_type == "fp8_blockwise":
        return quantised_reference.fp8_blockwise_combine(routing, returned, case.scales_per_row, case.wire_fp8)
    return quantised_reference.fp4_blockwise_combine(routing, returned, case.scales_per_row)


@dataclass
class Exercise:
    """One op under test together with what it must hold at the moment."""

    context: RankContext
    case: Case
    op: object = None
    dispatched: int | None = None
    """Number of the step that was the last dispatch."""
    routing: reference.Routing | None = None
    views: tuple | None = None
    expected: reference.Received | None = None
    addresses: dict = field(default_factory=dict)
    refilled: bool = True
    """Whether the registered buffer may be written: not between a combine and the next dispatch."""

    def __post_init__(self) -> None:
        if self.op is None:
            self.op = new_op(self.context, self.case)

    @property
    def splits(self) -> bool:
        return self.case.kernel_type == "AsyncLL"

    def grid(self) -> dict[str, int]:
        return {"block_num": self.case.grid[0], "warp_per_block": self.case.grid[1]}

    def run(self) -> None:
        for number, step in enumerate(self.case.steps):
            self.take(number, step)

    def take(self, number: int, step: Step) -> None:
        if step.kind == "dispatch":
            self.dispatch(number, step)
        else:
            self.combine(number, step)

    def dispatch(self, number: int, step: Step) -> None:
        case, rank = self.case, self.context.rank
        ranks = range(case.world_size)
        indices = [torch.from_numpy(ids) for ids in step.indices]
        all_scales = [cases.scales(case, number, peer) for peer in ranks]
        self.routing = reference.route(indices, case.experts_per_rank)
        self.expected = reference.dispatch(
            self.routing,
            [cases.payload(case, number, peer) for peer in ranks],
            indices,
            [cases.weights(case, number, peer) for peer in ranks],
            None if all_scales[0] is None else all_scales,  # type: ignore[arg-type]
            case.max_tokens,
        )[rank]
        self.dispatched = number
        arguments = (
            cases.payload(case, number, rank),
            cases.weights(case, number, rank),
            all_scales[rank],
            indices[rank].clone(),
        )
        op: Any = self.op
        halves = number % 2 == 1  # in two calls, as any kernel type can be used
        self.views = (op.dispatch_send if halves else op.dispatch)(*arguments, **self.grid())
        if self.splits:
            overwrite(*arguments)
        if halves or self.splits:
            require(op.dispatch_recv() is None, "dispatch_recv returned something")
        self.refilled = True
        self.check_dispatch(f"step {number} (dispatch)")

    def check_dispatch(self, when: str) -> None:
        """The five views of the last dispatch hold exactly what the reference says."""
        case, expected = self.case, self.expected
        assert expected is not None and self.views is not None
        rows, weights, scales, indices, count = self.views
        total = len(expected.rows)
        capacity = case.receive_rows
        require(count.dtype == torch.int32 and tuple(count.shape) == (1,), f"{when}: the count is {count!r}")
        require(int(count) == total, f"{when}: rank {self.context.rank} received {int(count)} rows, expected {total}")
        require(tuple(rows.shape) == (capacity, case.hidden), f"{when}: rows have shape {tuple(rows.shape)}")
        require(tuple(weights.shape) == (capacity, case.topk), f"{when}: weights have shape {tuple(weights.shape)}")
        require(tuple(indices.shape) == (capacity, case.topk), f"{when}: indices have shape {tuple(indices.shape)}")
        require_same_bits(indices[:total], expected.indices, f"{when}: indices")
        require_same_bits(rows[:total], expected.rows, f"{when}: rows")
        require_same_bits(weights[:total], expected.weights, f"{when}: weights")
        if expected.scales is None:
            require(scales is None, f"{when}: scales are {type(scales)}, expected None")
        else:
            require(tuple(scales.shape) == (capacity, case.scale_dim), f"{when}: scales have {tuple(scales.shape)}")
            require_same_bits(scales[:total], expected.scales, f"{when}: scales")
        positions = self.op.get_dispatch_src_token_pos()  # type: ignore[attr-defined]
        require_same_bits(positions, expected.source_position, f"{when}: source positions")

    def combine(self, number: int, step: Step) -> None:
        case, rank = self.case, self.context.rank
        op: Any = self.op
        ranks = range(case.world_size)
        routing = self.routing
        counts = [0] * case.world_size if routing is None else [routing.received(peer) for peer in ranks]
        returned = [cases.expert_rows(case, number, peer, counts[peer]) for peer in ranks]
        weights = [cases.returned_weights(case, number, peer, counts[peer]) for peer in ranks]
        own = returned[rank].clone()
        given_weights = weights[rank]
        own_weights = None if given_weights is None else given_weights.clone()
        if not step.external:
            require(self.refilled, "the case refills the registered buffer while peers may still read it")
            self.refilled = False
            buffer = op.get_registered_combine_input_buffer(case.combine_dtype, hidden_dim=case.returned_hidden)
            require(
                tuple(buffer.shape) == (case.receive_rows, case.returned_hidden),
                f"the registered buffer has shape {tuple(buffer.shape)}",
            )
            buffer[: counts[rank]].copy_(own)
            own = buffer
        elif step.whole_view:
            spare_bytes = (case.receive_rows - len(own), own.shape[1] * own.itemsize)
            spare = torch.full(spare_bytes, 0xFF, dtype=torch.uint8)
            own = torch.cat([reference.as_bytes(own), spare]).view(own.dtype)
        if own_weights is not None and step.whole_view:
            spare = torch.full((case.receive_rows - len(own_weights), case.topk), float("nan"))
            own_weights = torch.cat([own_weights, spare])
        if routing is None or self.dispatched is None:
            indices = torch.zeros(1, case.topk, dtype=torch.int32)
        else:
            indices = torch.from_numpy(case.steps[self.dispatched].indices[rank])
        halves = number % 2 == 1 and step.external
        if halves:
            out, out_weights = op.combine_send(own, own_weights, indices, **self.grid())
        else:
            out, out_weights = op.combine(
                own, own_weights, indices, use_external_inp_buf=int(step.external), **self.grid()
            )
        if self.splits:
            overwrite(own if step.external else None, own_weights)
        if halves or self.splits:
            require(op.combine_recv() is None, "combine_recv returned something")
        when = f"step {number} (combine)"
        shape = (case.max_tokens, case.returned_hidden)
        require(tuple(out.shape) == shape, f"{when}: the result has shape {tuple(out.shape)}, expected {shape}")
        if routing is None:
            zeros = torch.zeros(len(indices), case.returned_hidden, dtype=case.combine_dtype)
            require_same_bits(out[: len(indices)], zeros, f"{when}: rows without any dispatch")
            return
        expected = combined(case, step, routing, returned)[rank]
        require_same_bits(out[: len(expected)], expected, f"{when}: rows")
        expected_weights = reference.combine_weights(routing, weights, case.topk)[rank]
        if expected_weights is None:
            require(out_weights is None, f"{when}: weights are {type(out_weights)}, expected None")
        elif len(own_weights) or out_weights is not None:  # a tensor without rows may count as none
            require_same_bits(out_weights[: len(expected_weights)], expected_weights, f"{when}: weights")
        self.check_dispatch(f"{when}, dispatch views afterwards")


def exercise(context: RankContext, case: Case) -> None:
    """Builds an op for the case, takes its steps and checks every result."""
    Exercise(context, case).run()
