"""The parameter matrices of the tests that releases come with, as data.

A matrix is a product of axes less the combinations that no release accepts (`legal`). Nothing is scaled but what counts
ranks: see the docstring of test_dispatch_combine.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, fields
from itertools import combinations, product

from benchmarks.intra_node.options import DTYPES

BLOCKWISE = ("fp8_blockwise", "fp4_blockwise")
# kernel type: block_num, rdma_block_num, warp_num_per_block
GEOMETRY = {
    "IntraNode": (64, 0, 4),
    "IntraNodeLL": (64, 0, 4),
    "InterNode": (16, 0, 16),
    "InterNodeV1": (96, 64, 8),
    "InterNodeV1LL": (256, 128, 8),
    "AsyncLL": (64, 0, 8),
}
ONE_NODE = ("IntraNode", "IntraNodeLL")


@dataclass(frozen=True)
class Point:
    kernel: str = "IntraNode"
    dtype: str = "bf16"
    combine_dtype: str = ""
    """Empty: that of dispatch."""
    hidden: int = 7168
    """Logical: fp4 rows have half as many elements."""
    scale_dim: int = 0
    scale_bytes: int = 4
    max_tokens: int = 128
    experts_per_rank: int = 32
    topk: int = 8
    external: bool = True
    quant_type: str = "none"
    sentinel: str | int = ""
    """Which columns are -1: every_other (odd ones), first_only (all but the first), a number (the last so many)."""

    @property
    def combines(self) -> str:
        return self.combine_dtype or self.dtype

    @property
    def id(self) -> str:
        """The fields that differ from their defaults."""
        changed = [
            str(value) if isinstance(value, str) else f"{field.name}={value}"
            for field, value in zip(fields(self), astuple(self), strict=True)
            if value != field.default
        ]
        return "-".join(changed) or "defaults"


def legal(point: Point) -> bool:
    """Quantised wires carry bf16 rows from an external buffer; blocks are for one node or AsyncLL, fp4 for one node."""
    if point.quant_type == "none":
        return True
    if point.combines != "bf16" or not point.external:
        return False
    if point.quant_type in BLOCKWISE and point.kernel in ("InterNode", "InterNodeV1", "InterNodeV1LL"):
        return False
    return point.quant_type != "fp4_blockwise" or point.kernel in ONE_NODE


def matrix(**axes: Sequence) -> tuple[Point, ...]:
    """The legal points of a product of axes, named after fields of `Point`."""
    points = (Point(**dict(zip(axes, values, strict=True))) for values in product(*axes.values()))
    return tuple(point for point in points if legal(point))


HIDDEN = (7168, 4096)
BOTH = (True, False)
SCALES = {"scale_dim": (0, 32), "scale_bytes": (1, 4)}
SENTINELS = ("every_other", "first_only", 1, 7)
TWO_LEVEL = ("InterNodeV1", "InterNodeV1LL")
ALL_QUANT = ("none", "fp8_direct_cast", *BLOCKWISE)
CROSS = {"dtype": tuple(DTYPES), "combine_dtype": ("bf16",), "hidden": HIDDEN}

MATRICES: dict[str, tuple[Point, ...]] = {
    "intra-node": matrix(
        dtype=tuple(DTYPES), hidden=HIDDEN, **SCALES, max_tokens=(1, 128), external=BOTH, quant_type=ALL_QUANT
    ),
    "intra-node, low latency": matrix(
        kernel=("IntraNodeLL",),
        dtype=tuple(DTYPES),
        hidden=HIDDEN,
        **SCALES,
        max_tokens=(1, 64),
        external=BOTH,
        quant_type=ALL_QUANT[:3],
    ),
    "intra-node, two dtypes": matrix(kernel=ONE_NODE, **CROSS, quant_type=ALL_QUANT[:2]),
    "sentinels": matrix(hidden=(4096,), max_tokens=(1, 32), sentinel=SENTINELS),
    "two levels": matrix(
        kernel=TWO_LEVEL,
        dtype=tuple(DTYPES),
        hidden=HIDDEN,
        scale_dim=(0, 56),
        scale_bytes=(1, 4),
        max_tokens=(32, 128),
    ),
    "two levels, two dtypes": matrix(kernel=TWO_LEVEL, **CROSS, quant_type=ALL_QUANT[:2]),
    "two levels, sentinels": matrix(
        kernel=("InterNodeV1",),
        hidden=(4096,),
        max_tokens=(1, 32),
        experts_per_rank=(4,),
        topk=(4,),
        sentinel=(*SENTINELS[:3], 3),
    ),
    "split": matrix(
        kernel=("AsyncLL",),
        dtype=tuple(DTYPES),
        hidden=HIDDEN,
        scale_dim=(0, 32),
        max_tokens=(1, 128),
        topk=(8, 9),
        quant_type=ALL_QUANT[:3],
    ),
    "split, two dtypes": matrix(kernel=("AsyncLL",), **CROSS, quant_type=ALL_QUANT[:2]),
    "split, lanes": matrix(kernel=("AsyncLL",), hidden=(4096,), experts_per_rank=(48,), topk=(8, 6, 9, 10, 12)),
}


def representative(points: Iterable[Point]) -> frozenset[Point]:
    """Few points that between them hold every pair of values that two axes take somewhere in `points`."""
    points = list(points)
    pairs = {point: _pairs(point) for point in points}
    missing = set().union(*pairs.values()) if points else set()
    chosen = set()
    while missing:
        best = max(points, key=lambda point: len(pairs[point] & missing))
        chosen.add(best)
        missing -= pairs[best]
    return frozenset(chosen)


def _pairs(point: Point) -> set[tuple]:
    values = [(field.name, value) for field, value in zip(fields(point), astuple(point), strict=True)]
    return set(combinations(values, 2))
