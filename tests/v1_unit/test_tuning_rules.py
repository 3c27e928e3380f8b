"""Which rule a call gets: strict groups first, then the smallest count that suffices, else the largest."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mori.ops.tuning_rules import LaunchParams, fault_of, lookup, order_of

from .tuning import combine_rule, rule

BF16 = torch.bfloat16


def found(rules: list[dict[str, Any]], num_tokens: int = 128, hidden_dim: int = 7168, **call: Any) -> int | None:
    """block_num of the rule that the call gets, in the order in which files are read."""
    phase = "combine" if "zero_copy" in call else "dispatch"
    params = lookup(sorted(rules, key=order_of(phase)), BF16, num_tokens, hidden_dim, **call)
    return params and params.block_num


def test_all_three_numbers_come_from_the_rule():
    sizes = {"block_num": 5, "rdma_block_num": 3, "warp_per_block": 9}
    params = lookup([rule(**sizes)], BF16, 1, 7168)
    assert params == LaunchParams(5, 3, 9)
    with pytest.raises(AttributeError, match="cannot assign"):
        params.block_num = 1  # type: ignore[misc]


@pytest.mark.parametrize(
    "num_tokens, expected", [(0, 1), (1, 1), (64, 1), (65, 2), (128, 2), (129, 3), (512, 3), (513, 3), (10**6, 3)]
)
def test_the_smallest_count_that_suffices_else_the_largest(num_tokens: int, expected: int):
    assert found([rule(512, 3), rule(64, 1), rule(128, 2)], num_tokens) == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, None])
def test_an_element_type_without_a_name_has_no_rules(dtype: torch.dtype | None):
    assert lookup([rule()], dtype, 1, 7168) is None


@pytest.mark.parametrize(
    "dtype, name",
    [(torch.bfloat16, "bf16"), (torch.float8_e4m3fn, "fp8_e4m3"), (torch.float8_e4m3fnuz, "fp8_e4m3_fnuz")],
)
def test_rules_are_taken_of_the_same_element_type_only(dtype: torch.dtype, name: str):
    names = ["bf16", "fp4", "fp8_e4m3", "fp8_e4m3_fnuz"]
    rules = [rule(dtype=each, block_num=place) for place, each in enumerate(names)]
    assert lookup(rules, dtype, 1, 7168).block_num == names.index(name)  # type: ignore[union-attr]
    assert lookup([rule(dtype="other")], dtype, 1, 7168) is None


def test_no_rules_no_answer():
    assert lookup([], BF16, 1, 7168, topk=8) is None


def test_zero_copy_and_quant_type_are_never_relaxed():
    rules = [
        combine_rule(128, 1),
        combine_rule(128, 2, zero_copy=True),
        combine_rule(128, 3, quant_type="fp8_direct_cast"),
    ]
    assert found(rules, zero_copy=False, quant_type="none") == 1
    assert found(rules, zero_copy=True, quant_type="none") == 2
    assert found(rules, zero_copy=False, quant_type="fp8_direct_cast") == 3
    assert found(rules, zero_copy=True, quant_type="fp8_direct_cast") is None
    assert found(rules, zero_copy=True, quant_type="none", hidden_dim=1, topk=3) == 2


def test_what_is_not_given_does_not_matter():
    assert found([combine_rule(128, 1, zero_copy=True)]) == 1


def test_passes_with_topk():
    both, hidden, topk, neither = (
        rule(128, 1, topk=8),
        rule(128, 2, topk=4),
        rule(128, 3, hidden_dim=1, topk=8),
        rule(128, 4, hidden_dim=1, topk=4),
    )
    assert found([both, hidden, topk, neither], topk=8) == 1
    assert found([hidden, topk, neither], topk=8) == 2
    assert found([topk, neither], topk=8) == 3
    assert found([neither], topk=8) == 4


def test_a_stricter_pass_wins_even_if_it_has_to_clamp():
    assert found([rule(64, 1, topk=8), rule(4096, 2)], num_tokens=4096, topk=8) == 1
    assert found([rule(64, 1), rule(4096, 2, hidden_dim=4096)], num_tokens=4096, topk=8) == 1


def test_a_rule_without_topk_is_none_of_the_same_topk():
    assert found([rule(128, 1), rule(128, 2, topk=8)], topk=8) == 2
    assert found([rule(128, 1, topk=None), rule(128, 2, topk=8)], topk=8) == 2
    # Of another hidden size: the pass of the same topk comes before that of all.
    assert found([rule(128, 1, hidden_dim=1), rule(128, 2, hidden_dim=2, topk=8)], topk=8) == 2
    # In the pass of the same hidden size it takes part, before those with a topk.
    assert found([rule(128, 1), rule(128, 2, topk=4)], topk=8) == 1


def test_without_topk_only_the_hidden_size_is_strict():
    rules = [rule(128, 1, topk=8), rule(128, 2, topk=4), rule(128, 3, hidden_dim=1)]
    assert found(rules) == 2  # the lower topk stands first
    assert found(rules, hidden_dim=5) == 3


def test_a_relaxed_pass_goes_by_hidden_size_then_count():
    rules = [rule(64, 1, hidden_dim=1024), rule(512, 2, hidden_dim=1024), rule(128, 3, hidden_dim=2048)]
    assert found(rules, 100, hidden_dim=4096) == 2  # 128 is nearer, but of a larger hidden size
    assert found(rules, 513, hidden_dim=4096) == 3


def test_order_of_rules():
    rules = [
        combine_rule(2, 7, quant_type="none", zero_copy=True),
        combine_rule(1, 5, quant_type="fp8_direct_cast", zero_copy=True),
        combine_rule(3, 4),
        combine_rule(1, 3, hidden_dim=9000),
        combine_rule(1, 2, topk=2),
        combine_rule(1, 1, dtype="a"),
    ]

    def ordered(phase: str) -> list[int]:
        return [each["block_num"] for each in sorted(rules, key=order_of(phase))]

    assert ordered("combine") == [1, 4, 5, 7, 2, 3]
    assert ordered("dispatch") == [1, 5, 7, 4, 2, 3]


@pytest.mark.parametrize("missing", ["dtype", "num_tokens", "hidden_dim", "block_num", "rdma_block_num"])
def test_faults_of_any_rule(missing: str):
    broken = combine_rule()
    del broken[missing]
    for phase in ("dispatch", "combine"):
        assert fault_of(broken, phase) == f"it lacks {missing}"
        assert "not a " in str(fault_of(combine_rule(**{missing: None}), phase))


@pytest.mark.parametrize("missing", ["zero_copy", "quant_type"])
def test_faults_of_combine_rules(missing: str):
    broken = combine_rule()
    del broken[missing]
    assert fault_of(broken, "dispatch") is None
    assert fault_of(broken, "combine") == f"it lacks {missing}"


@pytest.mark.parametrize("block_num", [-1, 2**31, 1.5, True, "64", [1]])
def test_sizes_are_whole_numbers(block_num: object):
    assert fault_of(rule(block_num=block_num), "dispatch") == f"its block_num is {block_num!r}, not a whole number"


def test_zero_copy_is_a_json_bool_and_a_rule_an_object():
    assert fault_of(combine_rule(zero_copy=1), "combine") == "its zero_copy is 1, not true or false"
    assert fault_of(rule(topk="8"), "dispatch") == "its topk is '8', not a whole number"
    assert fault_of([rule()], "dispatch") is not None
    assert fault_of(rule(topk=None, latency_us=3.5, note="x"), "dispatch") is None


def plain_lookup(rules: list[dict[str, Any]], call: dict[str, Any]) -> int | None:
    """The rule word by word: passes, rules in order, first that suffices, else last considered."""
    passes = [(True, True), (True, False), (False, True), (False, False)]
    if call["topk"] is None:
        passes = [(True, False), (False, False)]
    for hidden_strict, topk_strict in passes:
        last = None
        for each in rules:
            if each["dtype"] != "bf16":
                continue
            if any(call[name] is not None and each[name] != call[name] for name in ("zero_copy", "quant_type")):
                continue
            if hidden_strict and each["hidden_dim"] != call["hidden_dim"]:
                continue
            if topk_strict and each.get("topk") != call["topk"]:
                continue
            last = each
            if each["num_tokens"] >= call["num_tokens"]:
                break
        if last is not None:
            return last["block_num"]
    return None


KINDS = {"zero_copy": st.booleans(), "quant_type": st.sampled_from(["none", "fp8_blockwise"])}
RULES = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["bf16", "bf16", "fp4"]),
        "num_tokens": st.integers(0, 6),
        "hidden_dim": st.integers(1, 3),
        **KINDS,
    },
    optional={"topk": st.integers(1, 3)},
)
CALLS = st.fixed_dictionaries(
    {"num_tokens": st.integers(0, 7), "hidden_dim": st.integers(1, 4), "topk": st.none() | st.integers(1, 3)}
    | {name: st.none() | values for name, values in KINDS.items()}
)


@given(st.lists(RULES, max_size=12), CALLS, st.sampled_from(["dispatch", "combine"]))
def test_any_rules_and_calls(drawn: list[dict[str, Any]], call: dict[str, Any], phase: str):
    rules = sorted((rule(**each) for each in drawn), key=order_of(phase))
    for place, each in enumerate(rules):
        each["block_num"] = place
    params = lookup(rules, BF16, **call)
    assert (params and params.block_num) == plain_lookup(rules, call)
