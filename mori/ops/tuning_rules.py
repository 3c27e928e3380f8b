"""Tuned launch sizes as rules: what a rule holds, in which order rules stand, and which one a call gets.

A rule is a JSON object as it stands in a tuning file: the call that was measured (dtype, num_tokens, hidden_dim, for
combine also zero_copy and quant_type, topk if it matters) and the launch sizes that were best for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

Rule = dict[str, Any]

_LARGEST_COUNT = 2**31 - 1

_CONFIG_STR_BY_NAME = {
    "bfloat16": "bf16",
    "float8_e4m3fnuz": "fp8_e4m3_fnuz",
    "float8_e4m3fn": "fp8_e4m3",
    "float4_e2m1fn_x2": "fp4",
}
# How rules spell element types. float32 has no spelling, so it has no rules.
DTYPE_TO_CONFIG_STR: dict[torch.dtype, str] = {
    getattr(torch, name): text for name, text in _CONFIG_STR_BY_NAME.items() if hasattr(torch, name)
}
CONFIG_STR_TO_DTYPE = {text: dtype for dtype, text in DTYPE_TO_CONFIG_STR.items()}
CONFIG_STR_TO_SHORT_NAME = {"bf16": "bf16", "fp8_e4m3_fnuz": "fp8fnuz", "fp8_e4m3": "fp8ocp", "fp4": "fp4"}


@dataclass(frozen=True)
class LaunchParams:
    """What a rule gives a call."""

    block_num: int
    rdma_block_num: int
    warp_per_block: int


class Field(NamedTuple):
    name: str
    accepts: Callable[[Any], bool]
    expected: str


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _LARGEST_COUNT


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_bool(value: Any) -> bool:
    return isinstance(value, bool)


_COUNTS = ("num_tokens", "hidden_dim", "block_num", "rdma_block_num", "warp_per_block")
_OF_ANY_CALL = (
    Field("dtype", _is_text, "a string"),
    *(Field(name, _is_count, "a whole number") for name in _COUNTS),
)
_OF_COMBINE = (Field("zero_copy", _is_bool, "true or false"), Field("quant_type", _is_text, "a string"))

# What a rule must hold to serve a phase. What else it holds is for readers, but for `topk`: absent means any.
REQUIRED: dict[str, tuple[Field, ...]] = {"dispatch": _OF_ANY_CALL, "combine": (*_OF_ANY_CALL, *_OF_COMBINE)}
_TOPK = Field("topk", lambda value: value is None or _is_count(value), "a whole number")

# Two rules that are equal in these are about the same call: the later one replaces the earlier.
_CALL_FIELDS = ("dtype", "num_tokens", "hidden_dim", "topk")
CALL_FIELDS = {"dispatch": _CALL_FIELDS, "combine": (*_CALL_FIELDS, *(field.name for field in _OF_COMBINE))}


def check_phase(phase: str) -> str:
    """`phase` itself; ValueError unless it is "dispatch" or "combine"."""
    if phase not in REQUIRED:
        raise ValueError(f"phase {phase!r} is unknown, expected one of {', '.join(REQUIRED)}")
    return phase


def fault_of(rule: Any, phase: str) -> str | None:
    """Why `rule` cannot serve the phase, None if it can."""
    if not isinstance(rule, dict):
        return f"a rule is an object, not {rule!r}"
    for field in (*REQUIRED[phase], _TOPK):
        if field.name not in rule and field is not _TOPK:
            return f"it lacks {field.name}"
        if not field.accepts(rule.get(field.name)):
            return f"its {field.name} is {rule[field.name]!r}, not {field.expected}"
    return None


def order_of(phase: str) -> Callable[[Rule], tuple[Any, ...]]:
    """Sort key of rules: ascending (dtype, hidden_dim, topk or 0, for combine zero_copy and quant_type, num_tokens)."""

    def key(rule: Rule) -> tuple[Any, ...]:
        # A file may hold rules of both phases; those of dispatch need not have these.
        kind = (bool(rule.get("zero_copy")), str(rule.get("quant_type", ""))) if phase == "combine" else ()
        return rule["dtype"], rule["hidden_dim"], rule.get("topk") or 0, *kind, rule["num_tokens"]

    return key


def lookup(
    sorted_rules: Sequence[Rule],
    dtype: torch.dtype | None,
    num_tokens: int,
    hidden_dim: int,
    zero_copy: bool | None = None,
    quant_type: str | None = None,
    topk: int | None = None,
) -> LaunchParams | None:
    """Launch sizes for a call with `num_tokens` rows of `hidden_dim` elements (of the tensor) of `dtype`.

    Among the rules of this dtype, zero_copy and quant_type (None: any) those of the same hidden_dim and topk are
    looked at first, then those of the same hidden_dim, of the same topk, and all; a rule without topk is never of the
    same topk. The first such group that is not empty decides: its first rule for at least `num_tokens` tokens, else
    its last one. None if there is no rule at all, or if rules cannot name the dtype.
    """
    spelled = DTYPE_TO_CONFIG_STR.get(dtype) if dtype is not None else None
    if spelled is None:
        return None
    given = {"dtype": spelled, "zero_copy": zero_copy, "quant_type": quant_type}
    candidates = _matching(sorted_rules, {name: value for name, value in given.items() if value is not None})
    hidden: dict[str, Any] = {"hidden_dim": hidden_dim}
    strict_to_loose = [hidden, {}] if topk is None else [hidden | {"topk": topk}, hidden, {"topk": topk}, {}]
    for wanted in strict_to_loose:
        group = _matching(candidates, wanted)
        if group:
            rule = next((each for each in group if each["num_tokens"] >= num_tokens), group[-1])
            return LaunchParams(rule["block_num"], rule["rdma_block_num"], rule["warp_per_block"])
    return None


def _matching(rules: Sequence[Rule], wanted: dict[str, Any]) -> list[Rule]:
    return [rule for rule in rules if wanted.items() <= rule.items()]
