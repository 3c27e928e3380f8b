"""Building, closing and building again; ops beside each other and beside v1; what is left behind."""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.rank_worker import RankContext
from tests.ranks import pool
from tests.v1 import exercise as v1_exercise
from tests.v1.cases import BF16, Step, routing
from tests.v1.exercise import raises, require
from tests.v2.exercise import Exercise, case_of, config_of, new_op
from tests.v2.ranks import communicator, new_communicator

WORLD = 2
CASE = case_of(WORLD, 64, 3, 2, 6, scale_dim=2)


def steps_of(letters: str, seed: int = 0) -> tuple[Step, ...]:
    return tuple(
        Step("dispatch", routing("any", [6, 4], 3, 2, seed + number)) if letter == "D" else Step("combine")
        for number, letter in enumerate(letters)
    )


def cycles(context: RankContext) -> None:
    comm = communicator(context)
    base, used = list(comm._resources), None
    for number in range(6):
        op = new_op(context, CASE)
        require(len(comm._resources) == len(base) + 2, f"{len(comm._resources)} resources beside {len(base)}")
        with op if number == 5 else replaced(op):
            Exercise(context, CASE.with_steps(*steps_of("DC", number)), op=op).run()
        op.close()
        require(comm._resources == base, f"cycle {number} has left resources behind")
        del op
        gc.collect()
        used = used or comm.used_bytes
        require(comm.used_bytes <= 2 * used, f"memory is not taken back: {comm.used_bytes} of {used}")


class replaced:
    """Closes an op by hand."""

    def __init__(self, op: Any) -> None:
        self.op = op

    def __enter__(self) -> None: ...

    def __exit__(self, *exception: object) -> None:
        self.op.close()


def test_building_and_closing_leaves_nothing_behind():
    pool(WORLD).run(cycles)


def closed(context: RankContext) -> None:
    op = new_op(context, CASE)
    rows, ids = torch.ones(2, 64, dtype=BF16), torch.zeros(2, 3, dtype=torch.int32)
    view, *_, handle = op.dispatch(rows, None, None, ids, return_routing=True)
    kept = view.clone()
    op.close()
    for call in (
        lambda: op.dispatch(rows, None, None, ids),
        lambda: op.combine(rows, routing=handle),
        op.reset,
        op.check,
        op.stats,
    ):
        raises(RuntimeError, call, says="it has been closed")
    require(torch.equal(view.view(torch.uint8), kept.view(torch.uint8)), "the view has changed")
    require("rank=" in repr(op), repr(op))


def test_a_closed_op_says_so_and_its_views_stay():
    pool(WORLD).run(closed)


def destroyed(context: RankContext) -> None:
    from mori.ops.dispatch_combine_v2 import EpDispatchCombineOp

    comm = new_communicator(context, 64 << 20)
    op = EpDispatchCombineOp(config_of(CASE, context.rank), comm)
    rows, ids = torch.ones(2, 64, dtype=BF16), torch.zeros(2, 3, dtype=torch.int32)
    *_, handle = op.dispatch(rows, None, None, ids, return_routing=True)
    comm.destroy()
    raises(RuntimeError, lambda: op.dispatch(rows, None, None, ids), says="communicator has been destroyed")
    raises(RuntimeError, lambda: op.combine(rows, routing=handle), says="communicator has been destroyed")
    op.close()


def test_calls_after_the_end_of_the_communicator():
    pool(WORLD).run(destroyed)


def one_config_for_several_ops(context: RankContext) -> None:
    from mori.ops.dispatch_combine_v2 import EpDispatchCombineOp

    config = config_of(CASE, context.rank)
    op = EpDispatchCombineOp(config, communicator(context))
    config.hidden_dim, config.max_num_inp_token_per_rank, config.num_experts_per_token = 1024, 500, 8
    Exercise(context, CASE.with_steps(*steps_of("DCDC")), op=op).run()
    require(op.cfg == config_of(CASE, context.rank), f"{op.cfg}")


def test_an_op_keeps_the_config_that_it_was_built_with():
    pool(WORLD).run(one_config_for_several_ops)


def several(context: RankContext) -> None:
    """Two ops of one shape, one of another, interleaved."""
    other = replace(case_of(WORLD, 160, 5, 3, 9), steps=())
    orders = {"DCDC": CASE, "DDCC": CASE, "DCCD": other}
    exercises = []
    for seed, (letters, case) in enumerate(orders.items()):
        steps = tuple(
            Step("dispatch", routing("any", [case.max_tokens] * WORLD, case.topk, case.experts_per_rank, seed + number))
            if letter == "D"
            else Step("combine")
            for number, letter in enumerate(letters)
        )
        exercises.append(Exercise(context, case.with_steps(*steps)))
    for number in range(4):
        for each in exercises:
            step = each.case.steps[number]
            each.dispatch(number, step) if step.kind == "dispatch" else each.combine(number, step)
    for each in exercises:
        each.op.close()


def test_several_ops_on_one_communicator():
    pool(WORLD).run(several)


def beside_v1(context: RankContext) -> None:
    """v1 on the heap of shmem, v2 on a communicator of its own, turn by turn."""
    steps = steps_of("DCDDCC")
    case = replace(CASE, steps=steps, scale_dim=3, scale_bytes=4)
    old, new = v1_exercise.Exercise(context, case), Exercise(context, case)
    for number, step in enumerate(steps):
        old.take(number, step)
        new.dispatch(number, step) if step.kind == "dispatch" else new.combine(number, step)
        old.check_dispatch("v1 after v2")
        new.check_dispatch("v2 after v1")
    new.op.close()


def test_v1_and_v2_side_by_side():
    pool(WORLD).run(beside_v1)


def disagreeing(context: RankContext, field: str, value: Any) -> None:
    from mori.errors import ConfigMismatch

    base = list(communicator(context)._resources)
    with pytest.raises(ConfigMismatch, match=field):
        new_op(context, CASE, **({field: value} if context.rank else {}))
    require(communicator(context)._resources == base, "something was left behind")
    new_op(context, CASE).close()


@pytest.mark.parametrize(
    ("field", "value"), [("hidden_dim", 80), ("num_experts_per_rank", 3), ("max_num_inp_token_per_rank", 7)]
)
def test_ranks_that_disagree(field: str, value: Any):
    pool(WORLD).run(disagreeing, field, value)


def too_large(context: RankContext) -> None:
    from mori.errors import HeapExhausted

    base = list(communicator(context)._resources)
    with pytest.raises(HeapExhausted, match="per_rank_vmm"):
        new_op(context, CASE, max_num_inp_token_per_rank=2**22, hidden_dim=64)
    require(communicator(context)._resources == base, "something was left behind")
    new_op(context, CASE).close()


def test_too_little_memory():
    pool(WORLD).run(too_large)


def reset(context: RankContext) -> None:
    """Ranks that are out of step, as after an error that only some of them caught, go on together."""
    op = new_op(context, CASE)
    steps = steps_of("DCDC")
    exercise = Exercise(context, CASE.with_steps(*steps), op=op)
    exercise.dispatch(0, steps[0])
    exercise.combine(1, steps[1])
    if context.rank:
        op._plan.set_call_number(op._plan.call_number + 40)
    op.reset()
    require(op._plan.call_number == 44, f"call number {op._plan.call_number}")
    require(bool((op.routing_dest_map == op._null_flat).all()), "the map is not empty")
    require(bool((op.token_dest_map == -1).all()) and int(op.total_recv) == 0, "maps and count")
    exercise.dispatch(2, steps[2])
    exercise.combine(3, steps[3])
    op.reset()
    op.reset()
    exercise.dispatch(2, steps[2])
    op.close()


def test_reset_brings_ranks_into_step():
    pool(WORLD).run(reset)


def forked(context: RankContext) -> None:
    import os

    op = new_op(context, CASE)
    arguments = torch.ones(2, 64, dtype=BF16), None, None, torch.zeros(2, 3, dtype=torch.int32)
    child = os.fork()
    if child == 0:
        try:
            op.dispatch(*arguments)
        except RuntimeError as error:
            os._exit(7 if "forked" in str(error) else 1)
        os._exit(2)
    require(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7, "the child could dispatch")
    op.dispatch(*arguments)
    op.close()


def test_a_forked_child_has_no_part_in_it():
    pool(WORLD).run(forked)


@pytest.mark.parametrize("blocks", [1, 7])
def test_launch_sizes_are_picked_by_tokens(blocks: int):
    pool(1).run(picked, blocks)


def picked(context: RankContext, blocks: int) -> None:
    schedule = ((2, blocks, 4, 3, 8), (4, 9, 4, 3, 8), (None, 11, 2, 5, 8))
    case = case_of(1, 64, 3, 2, 6)
    op = new_op(context, case, schedule=schedule)
    picks = {tokens: op._pick(tokens) for tokens in (0, 2, 3, 5)}
    expected = {0: ((blocks, 4), (3, 8)), 2: ((blocks, 4), (3, 8)), 3: ((9, 4), (3, 8)), 5: ((11, 2), (5, 8))}
    require(picks == expected, f"{picks}")
    require(op._dispatch_specs == sorted({(blocks, 4), (9, 4), (11, 2)}), f"{op._dispatch_specs}")
    require(op._combine_specs == [(3, 8), (5, 8)], f"{op._combine_specs}")
    require(set(op._kernels.dispatch) == set(op._dispatch_specs), "not every size is built")
    steps = (Step("dispatch", routing("any", [5], 3, 2)), Step("combine"))
    Exercise(context, case.with_steps(*steps), op=op).run()
