"""v2 ops against the reference, bit for bit, over shapes, routings, dtypes of both legs and orders of calls."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.rank_worker import RankContext
from tests.ranks import pool
from tests.v1 import cases
from tests.v1.cases import BF16, F32, Case, Step, routing
from tests.v1.exercise import require
from tests.v2.exercise import case_of, exercise, new_op
from tests.v2.strategies import case_for

BOTH_COMBINES = (Step("combine"), Step("combine", external=False))


def round_trips(*routings: tuple, **options: bool) -> tuple[Step, ...]:
    """Dispatch and combine for each routing, alternating between the two ways to pass rows."""
    steps: list[Step] = []
    for number, indices in enumerate(routings):
        steps += [Step("dispatch", indices, **options), BOTH_COMBINES[number % 2]]
    return tuple(steps)


def run(case: Case) -> None:
    pool(case.world_size).run(exercise, case)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@given(data=st.data())
def test_any_case(world_size: int, data: st.DataObject):
    run(data.draw(case_for(world_size)))


@pytest.mark.parametrize("world_size", [2])
@pytest.mark.parametrize("combine_dtype", [BF16, F32], ids=["to bf16", "to f32"])
@pytest.mark.parametrize("dtype", cases.PAYLOAD_DTYPES, ids=lambda dtype: str(dtype).split(".")[1])
def test_dtypes_of_both_legs(world_size: int, dtype: torch.dtype, combine_dtype: torch.dtype):
    indices = routing("any", [21, 8], 5, 3)
    steps = round_trips(indices, indices)
    run(case_of(world_size, 224, 5, 3, 21, dtype=dtype, combine_dtype=combine_dtype, steps=steps, values="bits"))


@pytest.mark.parametrize("world_size", [2])
@pytest.mark.parametrize("scale_dim", [1, 3, 32, 56])
def test_scales_are_moved_as_bytes(world_size: int, scale_dim: int):
    indices = routing("any", [11, 3], 4, 3)
    run(case_of(world_size, 64, 4, 3, 11, scale_dim=scale_dim, steps=round_trips(indices, indices)))


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("style", cases.ROUTING_STYLES)
def test_kinds_of_routing(world_size: int, style: str):
    indices, full = (routing(each, [13] * world_size, 6, 4) for each in (style, "any"))
    run(case_of(world_size, 48, 6, 4, 13, steps=round_trips(full, indices, full), values="bits"))


@pytest.mark.parametrize("world_size", [2])
@pytest.mark.parametrize("tokens", [[5, 0], [0, 5], [0, 0]], ids=str)
def test_a_rank_without_tokens(world_size: int, tokens: list[int]):
    indices = routing("any", tokens, 4, 2)
    run(case_of(world_size, 32, 4, 2, 5, scale_dim=4, steps=round_trips(indices, indices, indices)))


@pytest.mark.parametrize("world_size", [8])
def test_eight_ranks(world_size: int):
    indices = routing("spread", [9] * world_size, 8, 2)
    run(case_of(world_size, 96, 8, 2, 9, steps=round_trips(indices, indices), values="special"))


def asked_by_one(context: RankContext) -> None:
    """Rank 0 asks for weights, rank 1 does not: rank 0 gets its own only, rank 1 none, and rows are whole on both."""
    op = new_op(context, case_of(2, 32, 2, 1, 4))
    rows, weights = torch.ones(4, 32, dtype=BF16), torch.rand(4, 2)
    ids = torch.tensor([[0, 1]] * 4, dtype=torch.int32)
    received, *_, handle = op.dispatch(rows, weights, None, ids, return_routing=True)
    out, out_weights = op.combine(received, None if context.rank else weights, routing=handle)
    require(bool((out == 2).all()), "rows")
    require(out_weights is None if context.rank else torch.equal(out_weights, weights), "weights")
    op.close()


def test_weights_are_those_of_the_ranks_that_ask():
    pool(2).run(asked_by_one)


@pytest.mark.parametrize("world_size", [2])
def test_weights_that_were_not_sent_count_as_zeros(world_size: int):
    indices = routing("any", [7, 7], 4, 2)
    run(case_of(world_size, 32, 4, 2, 7, steps=round_trips(indices, indices, weights=False)))
