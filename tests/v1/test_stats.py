"""What an op counts: calls, rows and bytes by peer, ids that named nobody, and how evenly the last dispatch fell."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests import reference
from tests.rank_worker import RankContext
from tests.ranks import pool
from tests.v1.cases import KERNEL_TYPES, Case, Step, routing
from tests.v1.exercise import Exercise, new_op, raises, require


def expected_stats(case: Case, rank: int, taken: list[int]) -> dict:
    """What `rank` has counted after the given steps of the case."""
    world_size = case.world_size
    found = {
        "dispatches": 0,
        "combines": 0,
        "rows_sent": [0] * world_size,
        "rows_received": [0] * world_size,
        "bytes_sent": 0,
        "bytes_received": 0,
        "no_expert_ids": 0,
        "out_of_range_ids": 0,
        "last_received": [0] * world_size,
    }
    for number in taken:
        step = case.steps[number]
        if step.kind == "combine":
            found["combines"] += 1
            continue
        found["dispatches"] += 1
        route = reference.route(step.indices, case.experts_per_rank)
        scales = case.scale_dim * case.scale_bytes if step.scales else 0
        row_bytes = case.hidden * case.dtype.itemsize + scales + 8 * case.topk + 4
        sent = [int((route.destination[rank] == peer).sum()) for peer in range(world_size)]
        received = [int((route.source[rank][:, 0] == peer).sum()) for peer in range(world_size)]
        found["rows_sent"] = [a + b for a, b in zip(found["rows_sent"], sent, strict=True)]
        found["rows_received"] = [a + b for a, b in zip(found["rows_received"], received, strict=True)]
        found["bytes_sent"] += sum(sent) * row_bytes
        found["bytes_received"] += sum(received) * row_bytes
        ids = step.indices[rank]
        found["no_expert_ids"] += int((ids == -1).sum())
        found["out_of_range_ids"] += int(((ids < -1) | (ids >= case.experts)).sum())
        found["last_received"] = [route.received(peer) for peer in range(world_size)]
    found["dropped_ids"] = found["no_expert_ids"] + found["out_of_range_ids"]
    total = sum(found["last_received"])
    found["imbalance"] = max(found["last_received"]) * world_size / total if total else 0.0
    return found


def counted(context: RankContext, case: Case) -> None:
    exercise = Exercise(context, case)
    taken: list[int] = []
    for number, step in enumerate(case.steps):
        exercise.take(number, step)
        taken.append(number)
        stats = exercise.op.stats()  # type: ignore[attr-defined]
        wanted = expected_stats(case, context.rank, taken)
        require(stats == wanted, f"after step {number}: {stats}, expected {wanted}")
        if number == 3:
            exercise.op.reset()  # type: ignore[attr-defined]
            taken.clear()
            stats = exercise.op.stats()  # type: ignore[attr-defined]
            require(stats == expected_stats(case, context.rank, []), f"after a reset: {stats}")


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("kernel_type", KERNEL_TYPES)
@pytest.mark.parametrize("path", ["direct", "staged"])
def test_every_counter(world_size: int, kernel_type: str, path: str):
    tokens = [9 - 4 * (rank % 2) for rank in range(world_size)]
    steps = [
        Step("dispatch", routing("any", tokens, 4, 3)),
        Step("combine"),
        Step("dispatch", routing("wild", tokens, 4, 3), scales=False),
        Step("dispatch", routing("one rank", tokens, 4, 3)),
        Step("combine", external=False),
        Step("dispatch", routing("spread", [0] * world_size, 4, 3)),
        Step("dispatch", routing("wild", tokens, 4, 3)),
    ]
    case = Case(world_size, 24, 4, 3, 9, tuple(steps), scale_dim=5, scale_bytes=2, kernel_type=kernel_type)
    variables = (("MORI_EP_PATH", path), ("MORI_HOST_THREADS", "2"))
    pool(world_size).run(counted, replace(case, environment=variables))


def other_calls(context: RankContext) -> None:
    """Replays and dispatches into layouts count like others; a dispatch that fails counts nothing."""
    import mori

    case = Case(context.world_size, 8, 2, 2, 6, (), receive_cap=8)
    op = new_op(context, case)
    rows, ids = torch.ones(6, 8, dtype=torch.bfloat16), torch.tensor([[0, 2]] * 6, dtype=torch.int32)
    *_, handle = op.dispatch(rows[:4], None, None, ids[:4], return_routing=True)
    once = op.stats()
    require(once["rows_sent"] == [4, 4] and once["last_received"] == [8, 8], f"{once}")
    require(once["imbalance"] == 1.0, f"the imbalance of equal shares is {once['imbalance']}")
    raises(mori.errors.ReceiveOverflow, lambda: op.dispatch(rows, None, None, ids))
    require(op.stats() == once, f"after a dispatch that failed: {op.stats()}, before {once}")
    op.dispatch(rows[:4], None, None, ids[:4], routing=handle)
    op.dispatch_standard_moe(rows[:4], None, None, ids[:4])
    packed = torch.ones(2, case.world_size * 6, 8, dtype=torch.bfloat16)
    op.combine_standard_moe(packed, None, ids[:4])
    stats = op.stats()
    require((stats["dispatches"], stats["combines"]) == (3, 1), f"{stats}")
    require(stats["rows_received"] == [12, 12] and stats["bytes_sent"] == 24 * (16 + 16 + 4), f"{stats}")


def test_calls_of_other_kinds():
    pool(2).run(other_calls)


def uneven(context: RankContext) -> None:
    op = new_op(context, Case(context.world_size, 8, 1, 1, 6, ()))
    rows, ids = torch.ones(6, 8, dtype=torch.bfloat16), torch.tensor([[0]] * 5 + [[1]], dtype=torch.int32)
    op.dispatch(rows, None, None, ids)
    require(op.stats()["last_received"] == [20, 4, 0, 0], f"{op.stats()}")
    require(op.stats()["imbalance"] == 20 / 6, f"{op.stats()}")


def test_the_imbalance_is_the_most_over_the_mean():
    pool(4).run(uneven)
