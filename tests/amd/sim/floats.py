"""Float arithmetic that numpy does not have."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


def fused_multiply_add(a: Any, b: Any, c: Any) -> NDArray[np.float32]:
    """a * b + c of float32 arrays, rounded once.

    The product is exact in float64. The sum is rounded to odd there, which keeps what a second rounding needs to know.
    """
    a, b, c = (np.asarray(x, np.float32).astype(np.float64) for x in (a, b, c))
    product, c = np.broadcast_arrays(a * b, c)
    total = product + c
    # The part that the sum lost (two-sum).
    back = total - product
    lost = (product - (total - back)) + (c - back)
    bits = total.view(np.int64)
    inexact = np.isfinite(total) & (lost != 0) & (bits & 1 == 0)
    towards_zero = (lost < 0) == (total > 0)
    odd = bits + np.where(inexact, np.where(towards_zero, -1, 1), 0)
    return odd.view(np.float64).astype(np.float32)


def whole_number(values: Any, low: int, high: int) -> NDArray[np.float64]:
    """Towards zero, NaN to 0, bounded; exact in float64."""
    wide = np.asarray(values, np.float64)
    return np.where(np.isnan(wide), 0.0, np.clip(np.trunc(wide), low, high))


def median(a: Any, b: Any, c: Any) -> Any:
    """The middle one; with a NaN among them, the smallest of the others."""
    middle = np.maximum(np.minimum(a, b), np.minimum(np.maximum(a, b), c))
    return np.where(np.isnan(a) | np.isnan(b) | np.isnan(c), np.fmin(np.fmin(a, b), c), middle)
