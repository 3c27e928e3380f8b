"""Any order of calls that is the same on all ranks is legal, on one op and on several at once."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch

from tests.rank_worker import RankContext
from tests.ranks import pool
from tests.v1.cases import Case, Step, routing
from tests.v1.exercise import Exercise, exercise, new_op, require, require_same_bits


def steps_of(letters: str, world_size: int, max_tokens: int, topk: int, experts: int) -> tuple[Step, ...]:
    """A step per letter: D dispatch, d dispatch in which odd ranks have no tokens, C combine, c combine zero copy."""
    steps = []
    for number, letter in enumerate(letters):
        if letter in "Dd":
            tokens = [max_tokens if letter == "D" or rank % 2 == 0 else 0 for rank in range(world_size)]
            steps.append(Step("dispatch", routing("any", tokens, topk, experts, seed=number)))
        else:
            steps.append(Step("combine", external=letter == "C", whole_view=number % 2 == 0))
    return tuple(steps)


def refills_while_read(letters: str) -> bool:
    """Whether a zero-copy combine follows another combine of the same dispatch, whose rows peers may still read."""
    refillable = True
    for letter in letters:
        if letter == "c" and not refillable:
            return True
        refillable = letter != "c" and (refillable or letter in "Dd")
        if letter == "C":
            refillable = False
    return False


@pytest.mark.parametrize("world_size", [2, 3])
def test_every_order_of_four_calls(world_size: int):
    for letters in product("DC", repeat=4):
        order = "".join(letters)
        case = Case(world_size, 24, 3, 2, 12, steps_of(order, world_size, 12, 3, 2), values="bits")
        pool(world_size).run(exercise, case)


@pytest.mark.parametrize("world_size", [1, 4, 8])
@pytest.mark.parametrize("order", ["DDCC", "CCC", "DDDD", "DCCDCDCC", "dCDcdc", "DcCDcC", "ccD", "DdDdC", "CDdCCd"])
def test_orders(world_size: int, order: str):
    if refills_while_read(order):
        order = order.replace("cc", "cC")
    case = Case(world_size, 40, 4, 3, 15, steps_of(order, world_size, 15, 4, 3), values="bits", scale_dim=2)
    pool(world_size).run(exercise, case)


def interleave(context: RankContext, wide: Case, narrow: Case, order: str) -> None:
    one, other = Exercise(context, wide), Exercise(context, narrow)
    for number, letter in enumerate(order):
        exercise_, case = (one, wide) if letter == "1" else (other, narrow)
        position = order[:number].count(letter)
        exercise_.take(position, case.steps[position])
        for checked in (one, other):
            if checked.expected is not None:
                checked.check_dispatch(f"after call {number} of {order}")


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("order", ["12121212", "11221122", "12211221", "22221111"])
def test_two_ops_interleaved(world_size: int, order: str):
    wide = Case(world_size, 2880, 4, 3, 8, steps_of("DCDc", world_size, 8, 4, 3), values="bits", seed=1)
    narrow = Case(world_size, 7, 6, 2, 30, steps_of("DDCC", world_size, 30, 6, 2), dtype=torch.float32, scale_dim=3)
    pool(world_size).run(interleave, wide, narrow, order)


def create_destroy_create(context: RankContext, cases: list[Case]) -> None:
    import gc

    kept = Exercise(context, cases[0])
    kept.run()
    for number, case in enumerate(cases[1:]):
        Exercise(context, case).run()
        gc.collect()
        kept.check_dispatch(f"the op that stays, after op {number} came and went")
    kept.run()


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_an_op_is_untouched_by_others_that_come_and_go(world_size: int):
    base = Case(world_size, 96, 4, 3, 16, steps_of("DCD", world_size, 16, 4, 3), values="bits")
    others = [replace(base, hidden=hidden, seed=hidden) for hidden in (7, 2880, 1, 672)]
    pool(world_size).run(create_destroy_create, [base, *others])


def zero_copy_equals_external(context: RankContext, kernel_type: str) -> None:
    indices = [torch.from_numpy(ids) for ids in routing("any", [20] * context.world_size, 4, 3)]
    case = Case(context.world_size, 64, 4, 3, 20, (), kernel_type=kernel_type)

    def combine(*arguments, **keywords):
        result = op.combine(*arguments, **keywords)
        if kernel_type == "AsyncLL":
            op.combine_recv()
        return result

    for external_by_default in (True, False):
        op = new_op(context, case, use_external_inp_buf=external_by_default)
        generator = torch.Generator().manual_seed(context.rank)
        rows = torch.randn(20, 64, generator=generator).to(torch.bfloat16)
        own = indices[context.rank]
        results = []
        for way in ("external", "view", "other tensor", "stale buffer, other tensor"):
            received, _, _, _, count = op.dispatch_send(rows, None, None, own)
            op.dispatch_recv()
            answer = received[: int(count)].clone()
            buffer = op.get_registered_combine_input_buffer(torch.bfloat16)
            if way == "view":
                buffer[: int(count)].copy_(answer)
                out, _ = combine(buffer, None, own, use_external_inp_buf=False)
            elif way == "external":
                out, _ = combine(answer, None, own, use_external_inp_buf=True)
            else:
                if way.startswith("stale"):
                    buffer.fill_(float("nan"))
                out, _ = combine(answer, None, own, use_external_inp_buf=0)
            results.append(out[:20].clone())
        for result in results[1:]:
            require_same_bits(result, results[0], "combine by another way of passing the rows")
        out, weights = combine(answer, None, own)
        require_same_bits(out[:20], results[0], "combine with the config's default")
        assert weights is None


def rows_inside_the_registered_buffer(context: RankContext) -> None:
    """Whatever part of the buffer is passed, in either mode, the rows passed are the rows that come back."""
    import mori

    op = mori.ops.EpDispatchCombineOp(Case(1, 64, 3, 3, 12, ()).config(context.rank))
    ids = torch.tensor([[0, 1, 2]] * 6, dtype=torch.int32)
    for external in (True, False):
        for first in (0, 1, 3, 6):
            op.dispatch(torch.ones(6, 64, dtype=torch.bfloat16), None, None, ids)
            buffer = op.get_registered_combine_input_buffer(torch.bfloat16)
            buffer.copy_(torch.arange(1, 13, dtype=torch.bfloat16)[:, None].expand(-1, 64))
            passed = buffer[first : first + 6]
            expected = passed.clone()
            try:
                out, _ = op.combine(passed, None, ids, use_external_inp_buf=external)
            except ValueError as error:
                require(first and "registered" in str(error), f"rows from {first} of the buffer: {error}")
            else:
                require_same_bits(out[:6], expected, f"external={external}, rows from {first} of the buffer")


@pytest.mark.parametrize("world_size", [1])
def test_rows_inside_the_registered_buffer(world_size: int):
    pool(world_size).run(rows_inside_the_registered_buffer)


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("kernel_type", ["IntraNode", "AsyncLL"])
def test_zero_copy_gives_the_bits_of_the_external_mode(world_size: int, kernel_type: str):
    pool(world_size).run(zero_copy_equals_external, kernel_type)


def split_calls(context: RankContext) -> None:
    import mori

    case = Case(context.world_size, 16, 2, 2, 5, ())
    op = mori.ops.EpDispatchCombineOp(case.config(context.rank))
    rows, ids = torch.ones(5, 16, dtype=torch.bfloat16), torch.tensor([[0, 2]] * 5, dtype=torch.int32)
    for receive in (op.dispatch_recv, op.combine_recv):
        with pytest.raises(RuntimeError, match="send"):
            receive()
    for _ in range(2):
        received, _, _, _, count = op.dispatch_send(rows, None, None, ids)
        op.reset()  # legal at any time
        assert op.dispatch_recv() is None
        assert int(count) == 10
        out, _ = op.combine_send(received, None, ids)
        assert op.combine_recv() is None
        require_same_bits(out[:5], rows * 2, "both ranks return the token")
    op.dispatch_send(rows, None, None, ids)
    with pytest.raises(RuntimeError, match="dispatch_recv"):
        op.dispatch_send(rows, None, None, ids)
    op.dispatch_recv()
    with pytest.raises(RuntimeError, match="dispatch_send"):
        op.dispatch_recv()


@pytest.mark.parametrize("world_size", [2])
def test_send_is_complete_and_receive_returns_none(world_size: int):
    pool(world_size).run(split_calls)
