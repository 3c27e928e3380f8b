"""Small inputs that other libraries failed on, in every kernel type; docs/user-pains.md names all tests of the kind."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.rank_worker import RankContext
from tests.ranks import pool
from tests.v1.cases import Case, Step, payload, routing
from tests.v1.exercise import Exercise, require, require_same_bits

WORLD_SIZE = 2
KERNELS = ("IntraNode", "IntraNodeLL", "InterNode", "InterNodeV1", "InterNodeV1LL", "AsyncLL")


class WholeCalls:
    """An op whose dispatch and combine are complete when they return, also where they are send halves."""

    def __init__(self, op: Any) -> None:
        from mori.ops import EpDispatchCombineKernelType

        self._op, self._split = op, op.config.kernel_type is EpDispatchCombineKernelType.AsyncLL

    def __getattr__(self, name: str) -> Any:
        return getattr(self._op, name)

    def dispatch(self, *args: Any, **options: Any) -> tuple:
        views = self._op.dispatch(*args, **options)
        if self._split:
            self._op.dispatch_recv()
        return views

    def combine(self, *args: Any, **options: Any) -> tuple:
        results = self._op.combine(*args, **options)
        if self._split:
            self._op.combine_recv()
        return results


def build(context: RankContext, case: Case, kernel: str) -> WholeCalls:
    import mori

    member = mori.ops.EpDispatchCombineKernelType[kernel]
    config = case.config(context.rank, kernel_type=member, gpu_per_node=context.world_size)
    return WholeCalls(mori.ops.EpDispatchCombineOp(config))


def twice(indices: tuple[np.ndarray, ...]) -> tuple[Step, ...]:
    return (Step("dispatch", indices), Step("combine"), Step("dispatch", indices), Step("combine", external=False))


def case(tokens: list[int], style: str = "any", *, topk: int = 4, experts: int = 4, hidden: int = 24) -> Case:
    indices = routing(style, tokens, topk, experts, seed=topk)
    return Case(WORLD_SIZE, hidden, topk, experts, max(*tokens, 1), twice(indices), values="bits", scale_dim=2)


def with_id(bad: int) -> Case:
    indices = routing("any", [6, 6], 4, 4)
    indices[1][2, 1] = bad
    return Case(WORLD_SIZE, 24, 4, 4, 6, twice(indices))


def all_to_rank(rank: int) -> Case:
    indices = tuple(ids % 4 + 4 * rank for ids in routing("any", [600, 600], 4, 4))
    return Case(WORLD_SIZE, 24, 4, 4, 600, twice(indices), values="bits")


CASES: dict[str, Case] = {
    "a rank without tokens": case([5, 0]),
    "no tokens at all": case([0, 0]),
    "one rank receives everything": all_to_rank(0),
    "the other rank receives everything": all_to_rank(1),
    "everything to one expert": case([600, 600], "one expert"),
    "an id of W*E": with_id(8),
    "an id of 2^30": with_id(2**30),
    "an id of -2": with_id(-2),
    "half of the ids -1": case([13, 7], "half none"),
    "all ids -1": case([13, 7], "none"),
    **{f"top-{topk}": case([9, 16], topk=topk, experts=11) for topk in (1, 2, 7, 9, 16, 22)},
    **{f"top-{topk} of the same two ranks": case([200, 130], "two ranks", topk=topk) for topk in (3, 5, 6)},
    **{f"hidden {hidden}": case([9, 16], hidden=hidden) for hidden in (1, 7, 96, 672, 2880, 4097)},
}


def run(context: RankContext, name: str, kernel: str) -> None:
    Exercise(context, CASES[name], op=build(context, CASES[name], kernel)).run()


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("name", CASES)
def test_small_inputs(kernel: str, name: str):
    pool(WORLD_SIZE).run(run, name, kernel)


def combine_with(context: RankContext, kernel: str, lenient: bool) -> None:
    """Ids as dispatch returned them have other rows; ids of the right shape are not read, whatever they say."""
    op, rank = build(context, case([9, 16]), kernel), context.rank
    given = case([9, 16])
    ids = torch.from_numpy(given.steps[0].indices[rank])
    rows = payload(given, 0, rank)
    received, _, _, received_ids, count = op.dispatch(rows, None, None, ids)
    answer = torch.ones_like(received)
    expected = op.combine(answer, None, ids)[0][: len(ids)].clone()
    for wrong in (received_ids, received_ids[: int(count)]):
        require(len(wrong) != len(ids), "the numbers of rows are equal by chance")
        op.dispatch(rows, None, None, ids)
        if lenient:
            require_same_bits(op.combine(answer, None, wrong)[0][: len(ids)], expected, "combine with received ids")
        else:
            with pytest.raises(ValueError, match=f"{len(wrong)} rows.*{len(ids)} tokens"):
                op.combine(answer, None, wrong)
    op.dispatch(rows, None, None, ids)
    nonsense = torch.full_like(ids, -1)
    require_same_bits(op.combine(answer, None, nonsense)[0][: len(ids)], expected, "combine with ids of no expert")


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("lenient", [False, True], ids=["strict", "lenient"])
def test_received_ids_in_combine(kernel: str, lenient: bool):
    pool(WORLD_SIZE, MORI_EP_LENIENT_INDICES=str(int(lenient))).run(combine_with, kernel, lenient)
