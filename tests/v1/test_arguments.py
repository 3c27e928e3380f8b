"""Wrong arguments raise on the rank that passed them, before anything is launched, and change nothing."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from tests.rank_worker import RankContext
from tests.ranks import pool
from tests.v1.cases import Case, routing
from tests.v1.exercise import require, require_same_bits

TOKENS, HIDDEN, TOPK, SCALES, MAX_TOKENS = 4, 16, 4, 3, 6
Arguments = dict[str, Any]


def good_dispatch(rank: int = 0) -> Arguments:
    generator = torch.Generator().manual_seed(rank)
    return {
        "input": torch.randn(TOKENS, HIDDEN, generator=generator).to(torch.bfloat16),
        "weights": torch.rand(TOKENS, TOPK, generator=generator),
        "scales": torch.rand(TOKENS, SCALES, generator=generator),
        "indices": torch.from_numpy(routing("any", [TOKENS, TOKENS], TOPK, 2)[rank]),
    }


@dataclass(frozen=True)
class Wrong:
    """One way to get a call wrong: `change` makes good arguments bad."""

    change: Callable[[Arguments], Arguments]
    error: type[Exception] | tuple[type[Exception], ...]
    says: str
    """Regular expressions, separated by ' & ', that the message must all contain."""


def replace(name: str, make: Callable[[torch.Tensor], Any]) -> Callable[[Arguments], Arguments]:
    return lambda given: given | {name: make(given[name])}


def more_rows(given: Arguments) -> Arguments:
    return {name: torch.cat([tensor] * 2)[: MAX_TOKENS + 1] for name, tensor in given.items()}


def transposed(tensor: torch.Tensor) -> torch.Tensor:
    """Same shape and values, other strides."""
    return tensor.t().contiguous().t()


def every_other(tensor: torch.Tensor) -> torch.Tensor:
    """Same shape and values, a gap between the columns."""
    return torch.stack([tensor, tensor], dim=2).flatten(1)[:, ::2]


def spread_rows(tensor: torch.Tensor) -> torch.Tensor:
    """Same shape and values, a gap between the rows."""
    return torch.cat([tensor, tensor], dim=1).reshape(2 * len(tensor), -1)[::2]


STRIDES = {"transposed": transposed, "columns with gaps": every_other, "rows with gaps": spread_rows}
ON_META = "device & meta"

WRONG_DISPATCH: dict[str, Wrong] = {
    "ids int64": Wrong(replace("indices", torch.Tensor.long), TypeError, "int32 & int64"),
    "ids int16": Wrong(replace("indices", torch.Tensor.short), TypeError, "int32 & int16"),
    "ids float": Wrong(replace("indices", torch.Tensor.float), TypeError, "int32 & float32"),
    "input float16": Wrong(replace("input", torch.Tensor.half), TypeError, "float16 & bfloat16"),
    "input float16 as KeyError": Wrong(replace("input", torch.Tensor.half), KeyError, "^[^'\"].*float16"),
    "input int32": Wrong(replace("input", torch.Tensor.int), (TypeError, KeyError), "int32"),
    "input float64": Wrong(replace("input", torch.Tensor.double), (TypeError, KeyError), "float64"),
    "input on meta": Wrong(replace("input", lambda x: x.to("meta")), (ValueError, TypeError), ON_META),
    "ids on meta": Wrong(replace("indices", lambda x: x.to("meta")), (ValueError, TypeError), ON_META),
    "weights on meta": Wrong(replace("weights", lambda x: x.to("meta")), (ValueError, TypeError), ON_META),
    "scales on meta": Wrong(replace("scales", lambda x: x.to("meta")), (ValueError, TypeError), ON_META),
    "input vector": Wrong(replace("input", lambda x: x[0].clone()), ValueError, "input"),
    "input cube": Wrong(replace("input", lambda x: x[None]), ValueError, "input"),
    "input no array": Wrong(replace("input", lambda x: x.float().numpy()), TypeError, "input"),
    "input None": Wrong(replace("input", lambda x: None), TypeError, "input"),
    "ids None": Wrong(replace("indices", lambda x: None), TypeError, "indices"),
    "no columns": Wrong(replace("input", lambda x: x[:, :0]), ValueError, "input"),
    "too wide": Wrong(
        replace("input", lambda x: torch.cat([x, x], dim=1)), ValueError, f"{2 * HIDDEN} & {HIDDEN} & hidden_dim"
    ),
    "too many bytes": Wrong(replace("input", torch.Tensor.float), ValueError, "64 & 32 & max_token_type_size"),
    "too many tokens": Wrong(more_rows, ValueError, f"{MAX_TOKENS + 1} & {MAX_TOKENS} & max_num_inp_token_per_rank"),
    "fewer ids": Wrong(replace("indices", lambda x: x[:-1].clone()), ValueError, "3 & 4"),
    "fewer weights": Wrong(replace("weights", lambda x: x[:-1].clone()), ValueError, "3 & 4"),
    "fewer scales": Wrong(replace("scales", lambda x: x[:-1].clone()), ValueError, "3 & 4"),
    "another topk": Wrong(replace("indices", lambda x: x[:, :3].clone()), ValueError, "3 & 4 & num_experts_per_token"),
    "another topk of weights": Wrong(replace("weights", lambda x: x[:, :3].clone()), ValueError, "weights & 3 & 4"),
    "another scale_dim": Wrong(replace("scales", lambda x: x[:, :2].clone()), ValueError, "2 & 3 & scale_dim"),
    "weights bf16": Wrong(replace("weights", torch.Tensor.bfloat16), TypeError, "float32 & bfloat16"),
    "weights float64": Wrong(replace("weights", torch.Tensor.double), TypeError, "float32 & float64"),
    "scales of another size": Wrong(replace("scales", torch.Tensor.double), TypeError, "8 & 4 & scale_type_size"),
    **{
        f"{name} {way}": Wrong(replace(name, make), ValueError, f"{name} & contiguous")
        for name in ("input", "weights", "scales", "indices")
        for way, make in STRIDES.items()
    },
}

WRONG_COMBINE: dict[str, Wrong] = {
    "ids int64": Wrong(replace("indices", torch.Tensor.long), TypeError, "int32 & int64"),
    "input float16": Wrong(replace("input", torch.Tensor.half), TypeError, "float16"),
    "input float16 as KeyError": Wrong(replace("input", torch.Tensor.half), KeyError, "float16"),
    "input on meta": Wrong(replace("input", lambda x: x.to("meta")), (ValueError, TypeError), ON_META),
    "input vector": Wrong(replace("input", lambda x: x[0].clone()), ValueError, "input"),
    "too wide": Wrong(replace("input", lambda x: torch.cat([x, x], dim=1)), ValueError, f"{2 * HIDDEN} & {HIDDEN}"),
    "too few rows": Wrong(replace("input", lambda x: x[:1].clone()), ValueError, "1 & rows"),
    "received ids": Wrong(
        replace("indices", lambda x: x.repeat(3, 1)), ValueError, f"{3 * TOKENS} & {TOKENS} & MORI_EP_LENIENT_INDICES"
    ),
    "fewer ids": Wrong(replace("indices", lambda x: x[:1].clone()), ValueError, f"1 & {TOKENS}"),
    "ids None": Wrong(replace("indices", lambda x: None), TypeError, "indices"),
    "weights bf16": Wrong(replace("weights", torch.Tensor.bfloat16), TypeError, "float32 & bfloat16"),
    "weights of another topk": Wrong(replace("weights", lambda x: x[:, :3].clone()), ValueError, "3 & 4"),
    **{
        f"{name} {way}": Wrong(replace(name, make), ValueError, f"{name} & contiguous")
        for name in ("input", "weights", "indices")
        for way, make in STRIDES.items()
    },
}


def expect(call: Callable[..., Any], given: Arguments, wrong: Wrong) -> None:
    try:
        call(**wrong.change(given))
    except wrong.error as error:
        for pattern in wrong.says.split(" & "):
            require(re.search(pattern, str(error)), f"{type(error).__name__} does not say {pattern!r}: {error}")
    else:
        raise AssertionError("no error was raised")


def make_op(context: RankContext):
    import mori

    case = Case(context.world_size, HIDDEN, TOPK, 2, MAX_TOKENS, (), scale_dim=SCALES, scale_bytes=4)
    return mori.ops.EpDispatchCombineOp(case.config(context.rank))


def shared_op(context: RankContext):
    """One op for all cases: none of them may harm it."""
    if "op" not in context.cache:
        context.cache["op"] = make_op(context)
    return context.cache["op"]


def one_rank_calls_wrongly(context: RankContext, guilty: int, phase: str, name: str) -> None:
    op = shared_op(context)
    dispatch = good_dispatch(context.rank)
    for round_ in range(2):
        if phase == "dispatch" and context.rank == guilty and round_ == 0:
            expect(op.dispatch, dispatch, WRONG_DISPATCH[name])
        received, weights, scales, _, count = op.dispatch(**dispatch)
        total = int(count)
        require(total > 1 and scales is not None, "the good call afterwards received too little")
        combine = {
            "input": received[:total].clone(),
            "weights": weights[:total].clone(),
            "indices": dispatch["indices"],
        }
        if phase == "combine" and context.rank == guilty and round_ == 0:
            expect(op.combine, combine, WRONG_COMBINE[name])
        out, _ = op.combine(**combine)
        ranks = torch.tensor([len(set(row)) for row in (dispatch["indices"] // 2).tolist()])
        require_same_bits(out[:TOKENS], dispatch["input"] * ranks[:, None].to(torch.bfloat16), "the good round")


@pytest.mark.parametrize("world_size", [2])
@pytest.mark.parametrize("name", WRONG_DISPATCH)
def test_wrong_dispatch_argument(world_size: int, name: str):
    pool(world_size).run(one_rank_calls_wrongly, len(name) % 2, "dispatch", name)


@pytest.mark.parametrize("world_size", [2])
@pytest.mark.parametrize("name", WRONG_COMBINE)
def test_wrong_combine_argument(world_size: int, name: str):
    pool(world_size).run(one_rank_calls_wrongly, len(name) % 2, "combine", name)


def alone_calls_wrongly_many_times(context: RankContext) -> None:
    """All wrong calls in a row on one op, with no peer involved in between."""
    op = make_op(context)
    given = good_dispatch()
    for wrong in WRONG_DISPATCH.values():
        expect(op.dispatch, given, wrong)
    require(op._plan.dispatched_tokens is None, "a refused call counts as dispatched")
    op.dispatch(**given)


@pytest.mark.parametrize("world_size", [1])
def test_refused_calls_change_nothing(world_size: int):
    pool(world_size).run(alone_calls_wrongly_many_times)


def unusual_but_legal(context: RankContext) -> None:
    op = make_op(context)
    given = good_dispatch(context.rank)
    expected = [None if view is None else view.clone() for view in op.dispatch(**given)]
    total = int(expected[4])
    for change in (
        replace("indices", lambda x: x.view(torch.uint32)),
        # A stride over a dimension of one element or none means nothing.
        replace("input", lambda x: torch.cat([x, x])[:TOKENS]),
    ):
        views = op.dispatch(**change(given))
        for view, old in zip(views[:4], expected[:4], strict=True):
            require_same_bits(view[:total], old[:total], "an unusual but legal argument")
    one = {name: tensor[::4] for name, tensor in given.items()}
    require(one["input"].shape[0] == 1, "one row, whatever its stride")
    op.dispatch(**one)
    none = {name: tensor[:0] for name, tensor in given.items()}
    require(int(op.dispatch(**none)[4]) == 0, "nobody sends anything")


@pytest.mark.parametrize("world_size", [2])
def test_unusual_arguments_that_are_legal(world_size: int):
    pool(world_size).run(unusual_but_legal)


def overlapping_input(context: RankContext) -> None:
    op = make_op(context)
    given = good_dispatch(context.rank)
    received = op.dispatch(**given)[0]
    for rows in (
        received[:TOKENS],
        received[1 : TOKENS + 1],
        received.flatten()[3:][: TOKENS * HIDDEN].view(TOKENS, -1),
    ):
        expect(op.dispatch, given | {"input": rows}, Wrong(lambda x: x, ValueError, "input & overlap|clone"))
    for name, view in zip(("weights", "scales", "indices"), op.dispatch(**given)[1:4], strict=True):
        own = Wrong(replace(name, lambda _, view=view: view[:TOKENS]), ValueError, f"{name} & overlap|clone")
        expect(op.dispatch, given, own)
    buffer = op.get_registered_combine_input_buffer(torch.bfloat16)
    buffer[:TOKENS].copy_(given["input"])
    op.dispatch(**given | {"input": buffer[:TOKENS]})  # another region: legal
    op.dispatch(**given | {"input": received[:TOKENS].clone()})


@pytest.mark.parametrize("world_size", [2])
def test_input_must_not_overlap_the_receive_region(world_size: int):
    pool(world_size).run(overlapping_input)


def two_threads(context: RankContext) -> int:
    """Two threads of rank 0 call the same op; the call that comes second is refused while the first one waits."""
    op = make_op(context)
    given = good_dispatch(context.rank)
    if context.rank == 1:
        context.barrier()  # rank 0 has been refused
        op.dispatch(**given)
        return 0
    refused: list[str] = []

    def call() -> None:
        try:
            op.dispatch(**given)
        except RuntimeError as error:
            refused.append(str(error))
            context.barrier()

    threads = [threading.Thread(target=call) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    require(all("thread" in text for text in refused), f"refused with {refused}")
    return len(refused)


@pytest.mark.parametrize("world_size", [2])
def test_a_second_thread_is_refused(world_size: int):
    assert pool(world_size).run(two_threads) == [1, 0]


def lenient_indices(context: RankContext) -> None:
    op = make_op(context)
    given = good_dispatch(context.rank)
    received, _, _, received_ids, count = op.dispatch(**given)
    expected = op.combine(received, None, given["indices"])[0][:TOKENS].clone()
    for ids in (received_ids, received_ids[: int(count)], given["indices"][:1]):
        op.dispatch(**given)
        require_same_bits(op.combine(received, None, ids)[0][:TOKENS], expected, "combine with other ids")


@pytest.mark.parametrize("world_size", [2])
def test_lenient_mode_ignores_the_indices_of_combine(world_size: int):
    pool(world_size, MORI_EP_LENIENT_INDICES="1").run(lenient_indices)


def validate_ids(context: RankContext) -> None:
    op = make_op(context)
    given = good_dispatch(context.rank)
    for bad in (4, 2**30, -2, -(2**31)):
        if context.rank == 1:
            ids = given["indices"].clone()
            ids[2, 3] = bad
            expect(op.dispatch, given | {"indices": ids}, Wrong(lambda x: x, ValueError, rf"{bad} & 2\D+3"))
        given["indices"][0, 0] = -1
        op.dispatch(**given)


@pytest.mark.parametrize("world_size", [2])
def test_ids_can_be_validated(world_size: int):
    pool(world_size, MORI_EP_VALIDATE="1").run(validate_ids)


def dropped_ids_are_counted(context: RankContext) -> tuple[dict, dict]:
    op = make_op(context)
    given = good_dispatch(context.rank)
    given["indices"][0] = torch.tensor([-1, -2, 4, 2**30], dtype=torch.int32)
    op.dispatch(**given)
    counted = op.stats()
    received = op.dispatch(**good_dispatch(context.rank))[0]
    op.combine(received, None, given["indices"], call_reset=True)
    return counted, op.stats()


@pytest.mark.parametrize("world_size", [2])
def test_dropped_ids_are_counted_until_reset(world_size: int):
    for counted, after_reset in pool(world_size).run(dropped_ids_are_counted):
        assert 4 in [value for name, value in counted.items() if "drop" in name]
        assert not any(value for name, value in after_reset.items() if "drop" in name)


def check_by_position(check: Callable[..., Any]) -> Callable[..., Any]:
    return lambda indices, n: check(indices, n)


def test_row_check_of_combine_needs_no_op():
    import mori

    check = check_by_position(mori.ops.EpDispatchCombineOp._check_combine_indices)
    check(torch.zeros(8, 4, dtype=torch.int32), 8)
    for rows, says in ((32, "out_idx & 32 & 8"), (4, "rows but this rank dispatched")):
        given = {"indices": torch.zeros(rows, 4, dtype=torch.int32), "n": 8}
        expect(check, given, Wrong(lambda x: x, ValueError, says))
