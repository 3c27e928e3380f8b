"""Many dispatch/combine pairs in a row, without any other synchronisation, every row of every round checked.

Token counts, ids, values and weights are functions of (seed, round, rank, row), so stale or foreign rows show.
Values are integers small enough for their sums to be exact in float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from tests import reference
from tests.rank_worker import RankContext


@dataclass(frozen=True)
class Shape:
    max_tokens: int = 24
    hidden: int = 8
    topk: int = 4
    experts_per_rank: int = 2
    kernel_type: str = "IntraNode"


def mixed(seed: int, shape: tuple[int, ...], bits: int) -> np.ndarray:
    """Integers in [0, 2**bits) that look random, from `seed` and the position."""
    x = np.arange(np.prod(shape), dtype=np.uint64).reshape(shape) + np.uint64(seed * 0x9E3779B97F4A7C15 % 2**64)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return ((x ^ (x >> np.uint64(31))) >> np.uint64(64 - bits)).astype(np.int64)


class Round:
    """Everything that all ranks send, receive and return in one round."""

    def __init__(self, number: int, world_size: int, shape: Shape) -> None:
        self.number = number
        tokens, experts = shape.max_tokens, world_size * shape.experts_per_rank
        key = number * 16
        # Every fourth rank or so is idle, every fourth full.
        size = mixed(key, (world_size, 2), 20)
        counts = np.select([size[:, 0] % 4 == 0, size[:, 0] % 4 == 1], [0, tokens], size[:, 1] % (tokens + 1))
        ids = (mixed(key + 1, (world_size, tokens, shape.topk), 20) % (experts + 1) - 1).astype(np.int32)
        self.ids = [ids[rank, :count] for rank, count in enumerate(counts)]
        self.values = mixed(key + 2, (world_size, tokens, shape.hidden), 20).astype(np.float32)
        self.weights = mixed(key + 3, (world_size, tokens, shape.topk), 20).astype(np.float32)
        received = world_size * tokens
        self.answers = mixed(key + 4, (world_size, received, shape.hidden), 20).astype(np.float32)
        self.answer_weights = mixed(key + 5, (world_size, received, shape.topk), 20).astype(np.float32)
        self.external = number % 3 != 0
        self.with_weights = number % 2 == 0
        self.routing = reference.route(self.ids, shape.experts_per_rank)

    def sum_returned(self, rank: int, table: np.ndarray) -> np.ndarray:
        destination, row = self.routing.destination[rank], self.routing.row[rank]
        terms = table[destination, row]
        return np.where((destination >= 0)[..., None], terms, 0).sum(axis=1, dtype=np.float32)


def require_equal(actual: torch.Tensor, expected: np.ndarray, what: str, number: int) -> None:
    got = actual.numpy()
    if not np.array_equal(got, expected):
        row = np.nonzero((got != expected).reshape(len(got), -1).any(axis=1))[0]
        raise AssertionError(f"round {number}: {what}: rows {row[:8]} are {got[row[:2]]}, expected {expected[row[:2]]}")


def play(op, rank: int, round_: Round) -> None:
    """Dispatch and combine of one round on one rank, with all checks."""
    for _ in halves(op, rank, round_):
        pass


def halves(op, rank: int, round_: Round) -> Iterator[str]:
    """`play`, stopping where a call of AsyncLL has been sent and not yet received."""
    splits = op.config.kernel_type.name == "AsyncLL"
    number = round_.number
    ids = torch.from_numpy(round_.ids[rank])
    count = len(ids)
    weights = torch.from_numpy(round_.weights[rank, :count])
    rows, received_weights, _, received_ids, received = op.dispatch(
        torch.from_numpy(round_.values[rank, :count]), weights, None, ids
    )
    if splits:
        yield "dispatch"
        op.dispatch_recv()
    source = round_.routing.source[rank]
    total = len(source)
    if int(received) != total:
        raise AssertionError(f"round {number}: rank {rank} received {int(received)} rows, expected {total}")
    sender, token = source[:, 0], source[:, 1]
    require_equal(rows[:total], round_.values[sender, token], "rows", number)
    require_equal(received_weights[:total], round_.weights[sender, token], "weights", number)
    expected_ids = np.concatenate(round_.ids)[np.cumsum([0, *map(len, round_.ids)])[sender] + token]
    require_equal(received_ids[:total], expected_ids, "ids", number)

    answer = torch.from_numpy(round_.answers[rank, :total])
    if not round_.external:
        buffer = op.get_registered_combine_input_buffer(torch.float32)
        buffer[:total].copy_(answer)
        answer = buffer
    answer_weights = torch.from_numpy(round_.answer_weights[rank]) if round_.with_weights else None
    out, out_weights = op.combine(answer, answer_weights, ids, use_external_inp_buf=int(round_.external))
    if splits:
        yield "combine"
        op.combine_recv()
    require_equal(out[:count], round_.sum_returned(rank, round_.answers), "combined rows", number)
    if round_.with_weights:
        expected_weights = round_.sum_returned(rank, round_.answer_weights)
        require_equal(out_weights[:count], expected_weights, "combined weights", number)


def new_op(context: RankContext, shape: Shape):
    import mori

    return mori.ops.EpDispatchCombineOp(
        mori.ops.EpDispatchCombineConfig(
            data_type=torch.float32,
            rank=context.rank,
            world_size=context.world_size,
            hidden_dim=shape.hidden,
            scale_dim=0,
            scale_type_size=0,
            max_token_type_size=4,
            max_num_inp_token_per_rank=shape.max_tokens,
            num_experts_per_rank=shape.experts_per_rank,
            num_experts_per_token=shape.topk,
            kernel_type=getattr(mori.ops.EpDispatchCombineKernelType, shape.kernel_type),
        )
    )


def storm(context: RankContext, first: int, rounds: int, max_delay_us: int, shape: Shape = Shape()) -> int:
    """Plays `rounds` rounds; returns how many rows this rank received in all."""
    op = new_op(context, shape)
    if max_delay_us:
        op._plan.set_test_delays(context.rank + 1, max_delay_us)
    total = 0
    for number in range(first, first + rounds):
        round_ = Round(number, context.world_size, shape)
        play(op, context.rank, round_)
        total += round_.routing.received(context.rank)
    return total


def storm_from(context: RankContext, call_numbers: list[int], rounds: int, shape: Shape = Shape()) -> None:
    """For each call number: sets it on all ranks, then plays some rounds."""
    op = new_op(context, shape)
    played = 0
    for call_number in call_numbers:
        context.barrier()
        op._plan.set_call_number(call_number)
        context.barrier()
        for _ in range(rounds):
            play(op, context.rank, Round(played, context.world_size, shape))
            played += 1
