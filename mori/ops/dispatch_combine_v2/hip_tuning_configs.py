"""Launch sizes of the hip backend on one node: rules that were measured, a phase at a time, and the default.

Buckets of one phase are (most tokens or None, blocks, warps), ascending, the last one without a bound. No rule is there
yet: only measured ones will be.
"""

from __future__ import annotations

from typing import Any

from .tuning_configs import KEYS, Schedule, _device_key

PhaseBuckets = tuple[tuple[int | None, int, int], ...]
Shape = tuple[int, int, int, int | None]  # world_size, hidden_dim, topk, experts per rank or None for any

# device key -> shape -> dtype of dispatch or None for any -> buckets
_DISPATCH: dict[str, dict[Shape, dict[str | None, PhaseBuckets]]] = {}
# device key -> shape -> quant_type or None for any -> buckets
_COMBINE: dict[str, dict[Shape, dict[str | None, PhaseBuckets]]] = {}

# A dispatch moves the same bytes whatever combine adds up.
_DTYPE_ALIASES = {"fp4_disp_bf16_comb": "fp4"}


def _hip_default() -> dict[str, Any]:
    return dict(zip(KEYS, (64, 64, 16, 8, None), strict=True))


def lookup(
    world_size: int,
    hidden_dim: int,
    topk: int,
    dtype: str = "bf16",
    experts_per_rank: int | None = None,
    quant_type: str = "none",
) -> dict[str, Any]:
    """The five launch fields of a config for this shape, by name. A schedule only if both phases were measured.

    Rules for exactly these experts per rank go before those for any, rules for the dtype or quant_type before those for
    any.
    """
    found = _hip_default()
    device = _device_key() or ""
    shapes: tuple[Shape, Shape] = (
        (world_size, hidden_dim, topk, experts_per_rank),
        (world_size, hidden_dim, topk, None),
    )
    dispatch = _buckets(_DISPATCH.get(device, {}), shapes, _DTYPE_ALIASES.get(dtype, dtype))
    combine = _buckets(_COMBINE.get(device, {}), shapes, quant_type)
    if dispatch and combine:
        found["schedule"] = _merge(dispatch, combine)
    return found


def _buckets(
    rules: dict[Shape, dict[str | None, PhaseBuckets]], shapes: tuple[Shape, ...], kind: str
) -> PhaseBuckets | None:
    for shape in shapes:
        row = rules.get(shape, {})
        if kind in row or None in row:
            return row.get(kind) or row[None]
    return None


def _merge(dispatch: PhaseBuckets, combine: PhaseBuckets) -> Schedule:
    """One schedule whose edges are those of both."""
    bounded = sorted({most for most, _, _ in (*dispatch, *combine) if most is not None})
    return tuple((most, *_at(dispatch, most), *_at(combine, most)) for most in (*bounded, None))


def _at(buckets: PhaseBuckets, tokens: int | None) -> tuple[int, int]:
    for most, blocks, warps in buckets:
        if most is None or (tokens is not None and tokens <= most):
            return blocks, warps
    return buckets[-1][1:]
