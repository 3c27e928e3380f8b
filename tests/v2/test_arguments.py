"""What a caller can do wrong: an error on that rank, before anything is sent, and the op goes on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.rank_worker import RankContext
from tests.ranks import pool
from tests.v1.cases import BF16, F32, Step, routing
from tests.v1.exercise import raises, require
from tests.v2.exercise import Exercise, case_of, new_op

WORLD, HIDDEN, TOPK, EXPERTS, TOKENS = 2, 64, 4, 3, 6
INDICES = routing("any", [5, 6], TOPK, EXPERTS)
STEPS = (Step("dispatch", INDICES), Step("combine"), Step("dispatch", INDICES), Step("combine", external=False))
CASE = case_of(WORLD, HIDDEN, TOPK, EXPERTS, TOKENS, scale_dim=3, steps=STEPS)


def fitting(op: Any) -> dict[str, Any]:
    """Arguments of a dispatch of three tokens that is in order."""
    return {
        "input": torch.zeros(3, HIDDEN, dtype=BF16),
        "weights": torch.zeros(3, TOPK),
        "scales": torch.zeros(3, 3),
        "indices": torch.zeros(3, TOPK, dtype=torch.int32),
    }


# argument, what is passed instead, error, words of the message
DISPATCH: dict[str, tuple[str, Callable[[torch.Tensor], Any], type[Exception], str]] = {
    "dtype": ("input", lambda t: t.float(), TypeError, "torch.float32.*dispatch rows of torch.bfloat16"),
    "columns": ("input", lambda t: torch.zeros(3, 32, dtype=BF16), ValueError, "32 columns, rows of this op have 64"),
    "no tensor": ("input", lambda t: [1], TypeError, "torch.Tensor"),
    "dimensions": ("input", lambda t: t[0], ValueError, "2 dimensions"),
    "too many": ("input", lambda t: torch.zeros(7, HIDDEN, dtype=BF16), ValueError, "7 rows.*max_num_inp.*6"),
    "strided": ("input", lambda t: torch.zeros(3, 2 * HIDDEN, dtype=BF16)[:, ::2], ValueError, "contiguous"),
    "device": ("input", lambda t: t.to("meta"), ValueError, "meta.*cpu"),
    "int64 ids": ("indices", lambda t: t.long(), TypeError, "int32.*int64"),
    "no ids": ("indices", lambda t: None, TypeError, "torch.Tensor"),
    "rows of ids": ("indices", lambda t: t[:2], ValueError, "2 rows, input has 3"),
    "topk": ("indices", lambda t: t[:, :3].contiguous(), ValueError, "3 columns.*num_experts_per_token 4"),
    "weights dtype": ("weights", lambda t: t.to(BF16), TypeError, "float32"),
    "weights rows": ("weights", lambda t: t[:1], ValueError, "1 rows, input has 3"),
    "scale bytes": ("scales", lambda t: torch.zeros(3, 4), ValueError, "16 bytes, the op was built for 12"),
    "scale rows": ("scales", lambda t: t[:2], ValueError, "2 rows, input has 3"),
}


def wrong_dispatch(context: RankContext, name: str) -> None:
    exercise = Exercise(context, CASE)
    op: Any = exercise.op
    argument, change, error, says = DISPATCH[name]
    for number, step in enumerate(STEPS):
        arguments = fitting(op)
        arguments[argument] = change(arguments[argument])
        with pytest.raises(error, match=says):
            op.dispatch(**arguments, return_routing=True)
        # The handle of the last good call is still the one that counts.
        exercise.dispatch(number, step) if step.kind == "dispatch" else exercise.combine(number, step)
    require(op.stats()["dispatches"] == 2, f"{op.stats()}")
    op.close()


@pytest.mark.parametrize("name", DISPATCH)
def test_wrong_dispatch(name: str):
    pool(WORLD).run(wrong_dispatch, name)


def wrong_options(context: RankContext) -> None:
    op = new_op(context, CASE)
    arguments = fitting(op)
    *_, handle = op.dispatch(**arguments, return_routing=True)
    raises(ValueError, lambda: op.dispatch(**arguments, snapshot=True), says="return_routing=True")
    raises(ValueError, lambda: op.dispatch(**arguments, routing=handle, return_routing=True), says="exclude")
    raises(NotImplementedError, lambda: op.dispatch(**arguments, routing=handle), says="no replay of a routing")
    rows = torch.zeros(handle.cur_rank_num_token * 4, HIDDEN, dtype=BF16)
    raises(TypeError, lambda: op.combine(rows), says="routing")
    raises(NotImplementedError, op.local_expert_count, says="no local_expert_count")
    raises(NotImplementedError, op.convert_dispatch_output, says="no standard-MoE conversions")
    raises(NotImplementedError, op.convert_combine_input, handle, says="no standard-MoE conversions")
    raises(ValueError, op.push_landing, says="pushes no rows")
    raises(TypeError, lambda: op.combine(rows, routing=None), says="EpDispatchRoutingHandle")
    raises(TypeError, lambda: op.combine(rows.float(), routing=handle), says="combine rows of torch.bfloat16")
    raises(ValueError, lambda: op.combine(rows[:, :32].contiguous(), routing=handle), says="32 columns")
    raises(ValueError, lambda: op.combine(op.combine_in_view()[1:], routing=handle), says="first row")
    op.combine(rows, routing=handle)
    op.close()


def test_wrong_options_and_combines():
    pool(WORLD).run(wrong_options)


def short_input(context: RankContext) -> None:
    """All rows go to rank 1, which has to bring as many back."""
    op = new_op(context, replace(CASE, scale_dim=0))
    ids = torch.full((5, TOPK), EXPERTS, dtype=torch.int32)
    *_, handle = op.dispatch(torch.zeros(5, HIDDEN, dtype=BF16), None, None, ids, return_routing=True)
    received = 10 * context.rank
    if received:
        short = torch.zeros(received - 1, HIDDEN, dtype=BF16)
        raises(ValueError, lambda: op.combine(short, routing=handle), says="9 rows but this rank received 10")
    op.combine(torch.zeros(received, HIDDEN, dtype=BF16), routing=handle)
    op.close()


def test_too_few_rows_for_a_combine():
    pool(WORLD).run(short_input)


def own_memory(context: RankContext) -> None:
    op = new_op(context, case_of(1, HIDDEN, TOPK, EXPERTS, TOKENS, scale_dim=3))
    arguments = fitting(op) | {"input": op.recv_tokens()[:3]}
    with pytest.raises(ValueError, match="input overlaps the receive memory"):
        op.dispatch(**arguments)
    *_, handle = op.dispatch(**fitting(op), return_routing=True)
    with pytest.raises(ValueError, match="input overlaps the results"):
        op.combine(op.combine_out[:4], routing=handle)
    op.combine(op.combine_in_view(), routing=handle)
    op.close()


def test_arguments_that_lie_in_the_ops_own_memory():
    pool(1).run(own_memory)


def fakes(context: RankContext) -> None:
    """A fake tensor looks like the real ones of the calls before, and has no memory."""
    from torch._subclasses import FakeTensorMode

    op = new_op(context, case_of(1, HIDDEN, TOPK, EXPERTS, TOKENS, scale_dim=3))
    *_, handle = op.dispatch(**fitting(op), return_routing=True)
    op.combine(torch.zeros(3, HIDDEN, dtype=BF16), routing=handle)
    with FakeTensorMode():
        fake, rows = fitting(op), torch.zeros(3, HIDDEN, dtype=BF16)
    for name in fake:
        raises(ValueError, lambda name=name: op.dispatch(**(fitting(op) | {name: fake[name]})), says="has no memory")
    raises(ValueError, lambda: op.combine(rows, routing=handle), says="has no memory")
    op.close()


@pytest.mark.filterwarnings("ignore:.*FakeTensor")
def test_tensors_that_have_no_memory():
    pool(1).run(fakes)


def validated(context: RankContext) -> None:
    op = new_op(context, replace(CASE, environment=(("MORI_EP_VALIDATE", "1"),)))
    arguments = fitting(op)
    arguments["indices"][2, 1] = WORLD * EXPERTS
    with pytest.raises(ValueError, match=r"indices\[2, 1\] is 6"):
        op.dispatch(**arguments)
    arguments["indices"][2, 1] = -1
    op.dispatch(**arguments)
    op.close()


def test_expert_ids_are_validated_if_asked_for():
    pool(WORLD).run(validated)


def without_scales(context: RankContext) -> None:
    """(n, 0) means no scales; so does None, and on an op without them anything else is refused."""
    op = new_op(context, replace(CASE, scale_dim=0))
    arguments = fitting(op) | {"scales": torch.zeros(3, 0)}
    require(op.dispatch(**arguments)[2] is None and op.scale_stride_bytes() == 0, "scales of an op without them")
    with pytest.raises(ValueError, match="12 bytes, the op was built for 0"):
        op.dispatch(**fitting(op))
    op.close()


def test_scales_of_an_op_without_them():
    pool(WORLD).run(without_scales)


def scales_on_one_rank_only(context: RankContext) -> None:
    """A fault of the call, equal on all ranks; the op goes on."""
    from mori.errors import RowMismatch

    op = new_op(context, CASE)
    arguments = fitting(op) | ({} if context.rank else {"scales": None})
    with pytest.raises(RowMismatch, match="presence of scales"):
        op.dispatch(**arguments)
    op.dispatch(**fitting(op))
    op.close()


def test_scales_on_one_rank_only():
    pool(WORLD).run(scales_on_one_rank_only)


def test_the_message_names_the_field_to_set():
    pool(1).run(f32_rows_alone)


def f32_rows_alone(context: RankContext) -> None:
    op = new_op(context, case_of(1, HIDDEN, TOPK, EXPERTS, TOKENS, dtype=F32, combine_dtype=F32))
    with pytest.raises(TypeError, match="dispatch rows of torch.float32: convert it, or set dispatch_data_type"):
        op.dispatch(**(fitting(op) | {"scales": None}))
    op.close()
