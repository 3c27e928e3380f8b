"""Values that a codec can get wrong."""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np

from tests.codecs.conversions import CONVERSIONS

RANDOM_COUNT = 1 << 22
SPECIAL_BITS = (
    0x00000000,  # zero
    0x00000001,  # smallest denormal
    0x007FFFFF,  # largest denormal
    0x00800000,  # smallest normal
    0x7F7FFFFF,  # largest finite
    0x7F800000,  # infinity
    0x7F800001,  # signalling NaN
    0x7FBFFFFF,
    0x7FC00000,  # canonical NaN
    0x7FFFFFFF,
)


def both_signs(values: np.ndarray) -> np.ndarray:
    bits = values.view(np.uint32)
    return np.concatenate([bits, bits ^ np.uint32(1 << 31)]).view(np.float32)


def with_neighbours(values: np.ndarray) -> np.ndarray:
    """Positive float32 values, each with the one below and the one above."""
    bits = values.view(np.uint32)
    return np.concatenate([np.maximum(bits, 1) - 1, bits, bits + np.uint32(1)]).view(np.float32)


def boundaries(magnitudes: np.ndarray) -> np.ndarray:
    """Every magnitude of a format, every tie between two of them and where it would go on above the largest; with
    neighbours and both signs."""
    ordered = np.unique(magnitudes[np.isfinite(magnitudes)])
    last_step = ordered[-1] - ordered[-2]
    beyond = ordered[-1] + last_step * np.arange(5, dtype=np.float32) / np.float32(2)
    ties = ordered[:-1] + (ordered[1:] - ordered[:-1]) / np.float32(2)
    return both_signs(with_neighbours(np.concatenate([ordered, ties, beyond]).astype(np.float32)))


def bf16_boundaries() -> np.ndarray:
    upper = np.arange(1 << 16, dtype=np.uint32) << 16
    lower = np.array([0x0000, 0x0001, 0x7FFF, 0x8000, 0x8001, 0xFFFF], dtype=np.uint32)
    return (upper[:, None] | lower).reshape(-1).view(np.float32)


@functools.cache
def common() -> np.ndarray:
    """What every encoder is given: all values of bf16 and f16, special ones, and random bit patterns.

    Half of the random ones have exponents from 2^-16 to 2^16, where fp8 and fp4 have their values.
    """
    words = np.arange(1 << 16, dtype=np.uint32)
    bf16 = (words << 16).view(np.float32)
    f16 = words.astype(np.uint16).view(np.float16).astype(np.float32)
    random = np.random.default_rng(20).integers(0, 1 << 32, RANDOM_COUNT, dtype=np.uint32)
    exponents = np.uint32(111) + (random[::2] >> np.uint32(23) & np.uint32(31))
    random[::2] = (random[::2] & np.uint32(0x807FFFFF)) | exponents << np.uint32(23)
    special = both_signs(np.array(SPECIAL_BITS, dtype=np.uint32).view(np.float32))
    values = np.concatenate([bf16, f16, special, random.view(np.float32)])
    values.flags.writeable = False
    return values


def inputs(name: str, convert: Callable[[str, np.ndarray], np.ndarray]) -> np.ndarray:
    """What to give to a conversion of conversions.py: every stored value, or `common` and the format's boundaries."""
    kind, form = name.split()
    if name == "decode f32":
        return common().view(np.uint32)
    if kind != "encode":
        return np.arange(1 << 8 * np.dtype(CONVERSIONS[name].from_type).itemsize, dtype=CONVERSIONS[name].from_type)
    if form in ("f32", "bf16"):
        return np.concatenate([common(), bf16_boundaries()])
    codes = inputs(f"decode {form}", convert)
    return np.concatenate([common(), boundaries(np.abs(convert(f"decode {form}", codes)))])
