"""The tables of docs/support-matrix.md: the rules as they are, and what they answer to questions people have."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from mori.archs import ARCHS
from mori.ops import restrictions
from mori.ops.restriction import RANGES, Restriction
from mori.support import Question, answer

_NOT_BUILT = "flydsl-not-built"  # a table about the rules of flydsl would hold nothing else
PATHS: dict[str, dict[str, Any]] = {
    "v1": {"api": "v1"},
    "v2, hip": {"api": "v2", "backend": "hip"},
    "v2, flydsl (rules only)": {"api": "v2", "backend": "flydsl"},
}
_ONLY_V1, _ONLY_V2 = ("v1",), ("v2, hip", "v2, flydsl (rules only)")

# What people look for: how a question differs from the plain one, and the paths that know the words.
FEATURES: tuple[tuple[str, dict[str, Any], tuple[str, ...]], ...] = (
    ("gather combine, bf16", {}, tuple(PATHS)),
    ("scatter combine", {"combine_mode": "scatter"}, _ONLY_V2),
    ("zero-copy combine", {"zero_copy": True}, _ONLY_V1),
    ('`quant_type="fp8_direct_cast"`', {"quant_type": "fp8_direct_cast"}, tuple(PATHS)),
    ('`quant_type="fp8_blockwise"`', {"quant_type": "fp8_blockwise"}, tuple(PATHS)),
    ('`quant_type="fp4_blockwise"`', {"quant_type": "fp4_blockwise"}, tuple(PATHS)),
    ('`quant_type="fp4_blockwise_fp32"`', {"quant_type": "fp4_blockwise_fp32"}, _ONLY_V2),
    ("scales, 56 of 4 bytes", {"scale_dim": 56}, tuple(PATHS)),
    ("scales, 3 of 1 byte", {"scale_dim": 3, "scale_type_size": 1}, tuple(PATHS)),
    ("rows of 14344 bytes", {"hidden_dim": 7172}, tuple(PATHS)),
    ("`max_total_recv_tokens` below the worst case", {"max_total_recv_tokens": 4096}, tuple(PATHS)),
    ("`enable_std_moe`", {"enable_std_moe": True}, _ONLY_V2),
    ("replay of a routing", {"features": ("replay",)}, _ONLY_V2),
    ("`local_expert_count`", {"features": ("local_expert_count",)}, _ONLY_V2),
    ("two nodes (v1: InterNodeV1)", {"gpu_per_node": 4, "kernel_type": "InterNodeV1"}, tuple(PATHS)),
)

# Dtypes of dispatch and of combine.
DTYPES = (
    ("bf16", "bf16"),
    ("f32", "f32"),
    ("fp8_ocp", "fp8_ocp"),
    ("fp8_fnuz", "fp8_fnuz"),
    ("fp4", "fp4"),
    ("fp8_ocp", "bf16"),
    ("fp8_fnuz", "bf16"),
    ("fp4", "bf16"),
    ("fp8_ocp", "f32"),
    ("bf16", "fp8_ocp"),
    ("bf16", "fp4"),
)


def _cell(**fields: Any) -> str:
    rules = [reason.rule for reason in answer(Question(**fields)).reasons if reason.rule != _NOT_BUILT]
    return ", ".join(f"`{rule}`" for rule in dict.fromkeys(rules)) or "yes"


def _table(heads: Sequence[str], rows: Iterable[Iterable[str]]) -> str:
    lines = [heads, ("---" for _ in heads), *rows]
    return "\n".join("|" + "|".join(_padded(cell) for cell in line) + "|" for line in lines)


def _padded(cell: str) -> str:
    return cell if cell == "---" else f" {cell} " if cell else " "


def features() -> str:
    """What each path answers, on an arch that converts everything."""
    rows = (
        [what, *(_cell(arch="gfx950", **path, **change) if name in asked else "" for name, path in PATHS.items())]
        for what, change, asked in FEATURES
    )
    return _table(["", *PATHS], rows)


def dtypes() -> str:
    """What each path answers to rows of each kind on each arch."""
    parts = []
    for name, path in PATHS.items():
        rows = (
            [f"{dispatch} to {combine}"]
            + [_cell(arch=arch, dispatch_dtype=dispatch, combine_dtype=combine, **path) for arch in ARCHS]
            for dispatch, combine in DTYPES
        )
        parts.append(f"**{name}**\n\n" + _table(["dispatch to combine", *ARCHS], rows))
    return "\n\n".join(parts)


def _is_range(row: Restriction) -> bool:
    return row.id.startswith(("v1-range-", "v1-int-", "v2-range-", "v2-int-"))


def rules() -> str:
    """Every row of the table but those that only bound a field."""
    heads = ["rule", "API, backend", "when", "what holds", "else", "why"]
    return _table(heads, _rule_lines())


def _rule_lines() -> Iterator[list[str]]:
    for row in restrictions.TABLE:
        if not _is_range(row):
            api = "v1, v2" if row.api == "both" else row.api
            who = ", ".join((api, *row.backends))
            yield [f"`{row.id}`", who, row.stage, row.statement, row.error.__name__, row.source]


def ranges() -> str:
    """Smallest and largest value of each field."""
    ids = {row.id for row in restrictions.TABLE}
    rows = (
        [f"`{field}`", str(smallest), str(largest), "v1, v2" if f"v2-range-{field}" in ids else "v1"]
        for field, (smallest, largest) in RANGES.items()
    )
    return _table(["field", "smallest", "largest", "API"], rows)


def lifted() -> str:
    return _table(["in releases", "here"], restrictions.LIFTED)


def not_built() -> str:
    return _table(["what", "the answer"], restrictions.NOT_BUILT)
