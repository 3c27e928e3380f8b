"""The rule tables on plain CPU tensors: what passes, and that errors carry the numbers and the remedy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode

import mori
from mori.ops import calls
from mori.ops.calls import CallMemo, DispatchCall
from mori.ops.config import check_config
from mori.ops.dtypes import DTYPE_SUFFIX
from mori.ops.engine import DispatchWork
from mori.ops.validation import (
    COMBINE_RULES,
    DISPATCH_RULES,
    PLACEMENT,
    check_arguments,
    check_combine_indices,
    check_expert_ids,
    check_registered_rows,
)

from .test_config import make_config

CPU = torch.device("cpu")
LIMITS = check_config(
    make_config(
        world_size=2,
        hidden_dim=32,
        scale_dim=3,
        scale_type_size=4,
        max_token_type_size=2,
        max_num_inp_token_per_rank=6,
        num_experts_per_rank=4,
        num_experts_per_token=5,
    )
)


def dispatch_tensors(tokens: int = 6) -> dict[str, Any]:
    return {
        "input": torch.zeros(tokens, 32, dtype=torch.bfloat16),
        "weights": torch.zeros(tokens, 5),
        "scales": torch.zeros(tokens, 3),
        "indices": torch.zeros(tokens, 5, dtype=torch.int32),
    }


def check(tensors: dict[str, Any]) -> None:
    check_arguments("dispatch", DISPATCH_RULES, tensors, LIMITS, CPU)


LEGAL: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "full": lambda given: given,
    "nothing to send": lambda given: dispatch_tensors(tokens=0),
    "no weights": lambda given: given | {"weights": None},
    "no scales": lambda given: given | {"scales": None},
    "scales of no columns": lambda given: given | {"scales": torch.zeros(6, 0, dtype=torch.float64)},
    "an empty tensor for scales": lambda given: given | {"scales": torch.empty(0)},
    "scales of another type of that size": lambda given: given | {"scales": torch.zeros(6, 3, dtype=torch.int32)},
    "uint32 ids": lambda given: given | {"indices": given["indices"].view(torch.uint32)},
    "narrower rows": lambda given: given | {"input": torch.zeros(6, 7, dtype=torch.bfloat16)},
    "float32 of half the width": lambda given: given | {"input": torch.zeros(6, 16)},
    "fp8": lambda given: given | {"input": given["input"].to(torch.float8_e4m3fnuz)},
    "one row of a wider tensor": lambda given: dispatch_tensors(1) | {"input": torch.zeros(6, 64)[:1, :16]},
}


@pytest.mark.parametrize("name", LEGAL)
def test_legal_calls_pass(name: str):
    check(LEGAL[name](dispatch_tensors()))


ILLEGAL: dict[str, tuple[str, Callable[[torch.Tensor], Any], type[Exception], tuple[str, ...]]] = {
    "list": ("input", lambda x: x.tolist(), TypeError, ("torch.Tensor", "list")),
    "float16": ("input", torch.Tensor.half, mori.UnsupportedDtype, ("float16", "bfloat16", "float8_e4m3fn")),
    "sparse": ("input", torch.Tensor.to_sparse, ValueError, ("contiguous",)),
    "more rows": ("input", lambda x: torch.cat([x, x]), ValueError, ("12", "max_num_inp_token_per_rank 6")),
    "wider": ("input", lambda x: torch.cat([x, x], 1), ValueError, ("64", "hidden_dim 32")),
    "larger rows": ("input", torch.Tensor.float, ValueError, ("128", "64", "max_token_type_size to 4")),
    "int64 ids": ("indices", torch.Tensor.long, TypeError, ("int64", "indices.to(torch.int32)")),
    "bool ids": ("indices", torch.Tensor.bool, TypeError, ("bool", "int32")),
    "too few ids": ("indices", lambda x: x[:5], ValueError, ("5", "6")),
    "flat ids": ("indices", lambda x: x.flatten(), ValueError, ("2 dimensions", "(30,)")),
    "another top-k": ("indices", lambda x: x[:, :4].clone(), ValueError, ("4", "num_experts_per_token 5")),
    "bf16 weights": ("weights", torch.Tensor.bfloat16, TypeError, ("bfloat16", "weights.float()")),
    "strided weights": ("weights", lambda x: x.t().contiguous().t(), ValueError, ("weights.contiguous()",)),
    "byte scales": ("scales", lambda x: x.to(torch.uint8), TypeError, ("1 bytes", "scale_type_size 4")),
    "wide scales": ("scales", lambda x: torch.zeros(6, 4), ValueError, ("4", "scale_dim 3")),
    "other device": ("scales", lambda x: x.to("meta"), ValueError, ("device meta", "cpu")),
}


@pytest.mark.parametrize("name", ILLEGAL)
def test_illegal_arguments_are_named_with_both_numbers(name: str):
    argument, change, error, words = ILLEGAL[name]
    given = dispatch_tensors()
    with pytest.raises(error) as caught:
        check(given | {argument: change(given[argument])})
    message = str(caught.value)
    assert message.startswith(f"dispatch: {argument} ")
    assert all(word in message for word in words), message


def test_unsupported_dtype_is_what_releases_raise():
    with pytest.raises(KeyError):
        check(dispatch_tensors() | {"input": torch.zeros(6, 32, dtype=torch.float16)})


@pytest.mark.parametrize("dtype", [torch.int32, torch.float16, torch.float64])
def test_combine_adds_only_what_it_can_add(dtype: torch.dtype):
    given = {"input": torch.zeros(6, 32).to(dtype), "weights": None}
    with pytest.raises(mori.UnsupportedDtype, match=f"{dtype}.*float4_e2m1fn_x2, float8_e4m3fn"):
        check_arguments("combine", COMBINE_RULES, given, LIMITS, CPU)


def test_ids_are_named_by_token_and_column():
    ids = torch.full((6, 5), -1, dtype=torch.int32)
    ids[0] = torch.tensor([0, 1, 6, 7, -1])
    check_expert_ids(ids, LIMITS)
    for bad in (8, 2**30, -2, -(2**31)):
        ids[4, 3] = bad
        with pytest.raises(ValueError, match=rf"indices\[4, 3\] is {bad};.*0\.\.7"):
            check_expert_ids(ids, LIMITS)


def test_combine_indices_are_counted_not_read():
    static = mori.ops.EpDispatchCombineOp._check_combine_indices
    static(torch.zeros(6, 1, dtype=torch.int64), 6)
    with pytest.raises(ValueError, match="24 rows but this rank dispatched 6.*out_idx"):
        check_combine_indices(torch.zeros(24, 5, dtype=torch.int32), 6)


@pytest.mark.parametrize(
    ("dtype", "columns", "error"),
    [
        (torch.bfloat16, 32, None),
        (torch.float32, 16, None),
        (torch.float32, 17, ValueError),
        (torch.bfloat16, 33, ValueError),
        (torch.bfloat16, 0, ValueError),
        (torch.float16, 32, TypeError),
    ],
)
def test_registered_buffer_fits_what_the_op_was_built_for(
    dtype: torch.dtype, columns: int, error: type[Exception] | None
):
    if error is None:
        check_registered_rows(dtype, columns, LIMITS)
    else:
        with pytest.raises(error):
            check_registered_rows(dtype, columns, LIMITS)


WORK = DispatchWork(kernel=0, tokens=4, row_bytes=32, scale_bytes=0, dtype=0)


@pytest.fixture(params=["exchange interface", "attributes"])
def memo(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> CallMemo[DispatchCall]:
    """Both ways of looking at tensors; versions of torch before 2.10 have the second only."""
    if request.param == "attributes":
        monkeypatch.setattr(calls, "_describer", lambda: calls._describe_slowly)
    elif not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"):
        pytest.skip("this torch has no exchange interface")
    return CallMemo(enabled=True)


@pytest.mark.filterwarnings("ignore:.*FakeTensor")
def test_tensors_without_memory_are_refused_whatever_was_called_before(memo: CallMemo[DispatchCall]):
    def prepare(input: torch.Tensor, weights: torch.Tensor | None) -> DispatchCall:
        tensors = {"input": input, "weights": weights}
        check_arguments("dispatch", {"input": PLACEMENT, "weights": PLACEMENT}, tensors, None, CPU)
        return DispatchCall((), WORK)

    rows = torch.zeros(4, 8)
    with FakeTensorMode():
        fake, empty = torch.zeros(4, 8), torch.zeros(0, 8)
    memo.find(prepare, rows, rows)
    for name, given in (("input", (fake, rows)), ("weights", (rows, fake))):
        with pytest.raises(ValueError, match=rf"{name} with shape \(4, 8\) has no memory.*FakeTensorMode"):
            memo.find(prepare, *given)
    assert memo.find(prepare, empty, None)[1] == (0, 0)


def test_a_call_is_checked_once_per_metadata(memo: CallMemo[DispatchCall]):
    prepared: list[tuple[Any, ...]] = []

    def prepare(*tensors: torch.Tensor | None) -> DispatchCall:
        prepared.append(tensors)
        return DispatchCall((), WORK)

    rows, same = torch.zeros(4, 8), torch.ones(4, 8)
    first, addresses = memo.find(prepare, rows, None)
    assert addresses == (rows.data_ptr(), 0)
    found, addresses = memo.find(prepare, same, None)
    assert found is first
    assert addresses == (same.data_ptr(), 0)
    assert len(prepared) == 1
    others = [rows[:3], rows.bfloat16(), torch.zeros(8, 4).t(), rows.view(2, 16), rows.view(torch.int32), rows[0]]
    for other in others:
        assert memo.find(prepare, other, None)[0] is not first
    assert memo.find(prepare, rows[1:3], None)[1] == (rows.data_ptr() + 32, 0)
    assert memo.find(prepare, rows, rows)[0] is not first
    assert len(prepared) == 1 + len(others) + 2


@pytest.mark.parametrize("dtype", [*DTYPE_SUFFIX, torch.float8_e8m0fnu, torch.uint8], ids=str)
def test_every_dtype_is_looked_at(memo: CallMemo[DispatchCall], dtype: torch.dtype):
    raw = torch.zeros(4, 8, dtype=torch.uint8)
    calls = [memo.find(lambda *_: DispatchCall((), WORK), raw.view(dtype)) for _ in range(2)]
    assert calls[0][0] is calls[1][0]
    assert calls[0][1] == (raw.data_ptr(),)
    assert memo.find(lambda *_: DispatchCall((), WORK), raw.view(torch.int16))[0] is not calls[0][0]


@pytest.mark.parametrize("odd", [torch.zeros(2, 2).to_sparse(), torch.zeros(2, device="meta"), [1], 7], ids=repr)
def test_what_is_no_dense_tensor_is_left_to_the_rules(memo: CallMemo[DispatchCall], odd: Any):
    def refuse(*tensors: Any) -> DispatchCall:
        raise ValueError(type(tensors[0]).__name__)

    with pytest.raises(ValueError, match=type(odd).__name__):
        memo.find(refuse, odd)


def test_a_refused_call_is_refused_again(memo: CallMemo[DispatchCall]):
    def refuse(*tensors: torch.Tensor | None) -> DispatchCall:
        raise ValueError("no")

    for _ in range(2):
        with pytest.raises(ValueError, match="no"):
            memo.find(refuse, torch.zeros(2))
