"""Block-wise quantisation: scales for every maximum, and whole rows against the reference."""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np
import pytest
import torch

from tests import quantised_reference as quantised
from tests import reference
from tests.codecs.conversions import FOLDER, HostConversions, library

FORMATS = {"e4m3fn": torch.float8_e4m3fn, "e4m3fnuz": torch.float8_e4m3fnuz, "e2m1fn": torch.float4_e2m1fn_x2}
WORDS = np.arange(1 << 16, dtype=np.uint16)


@pytest.fixture(scope="module")
def rows_through(folder: Path) -> ctypes.CDLL:
    return library((FOLDER / "block_rows.cpp").read_text(), folder / "block_rows.so", "baseline")


@pytest.mark.parametrize("name", FORMATS)
def test_the_scale_of_every_maximum(convert: HostConversions, name: str):
    found = convert(f"scale {name}", WORDS).reshape(-1, 3)
    values = np.abs((WORDS.astype(np.uint32) << 16).view(np.float32))
    largest = reference.SMALL_FORMATS[FORMATS[name]].largest
    always = name == "e2m1fn"
    scaled = values > (0 if always else largest)  # not so for NaN
    with np.errstate(all="ignore"):
        scale = np.where(scaled, values / largest, np.float32(1))
        factor = np.where(scaled, largest / values, np.float32(0 if always else 1))
    assert np.array_equal(found[:, 0], scale)
    assert np.array_equal(found[:, 1], factor)
    assert np.array_equal(found[:, 2], scaled | always)


def table(hidden: int) -> torch.Tensor:
    """bf16 rows: any bits; small values; mixed ranges; zeros of both signs; single values that stand out."""
    random = np.random.default_rng(hidden)
    any_bits = random.integers(0, 1 << 16, (40, hidden), dtype=np.uint16)
    normal = random.standard_normal((60, hidden)).astype(np.float32)
    normal[:20] *= np.float32(0.01)
    normal[20:40] *= np.exp(random.uniform(-20, 20, (20, hidden))).astype(np.float32)
    normal[40:45] *= 0
    for row, value in enumerate((448.0, 450.0, 240.0, 241.0, 1e-40, 3e38, np.inf, -np.inf, np.nan), start=45):
        normal[row, random.integers(hidden)] = value
    wide = torch.from_numpy(normal).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    return torch.from_numpy(np.concatenate([any_bits, wide]).view(np.int16)).view(torch.bfloat16)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("hidden, scale_dim", [(7168, 56), (512, 4), (100, 56), (7, 3), (5, 9), (1, 1), (33, 1)])
def test_rows_through_blocks(rows_through: ctypes.CDLL, name: str, hidden: int, scale_dim: int):
    rows = table(hidden)
    expected = quantised.quantise(rows, scale_dim, FORMATS[name])
    scales, codes = np.empty_like(expected.scales), np.empty_like(expected.codes)
    values = np.empty(codes.shape, dtype=np.float32)
    addresses = (ctypes.c_void_p(each.ctypes.data) for each in (scales, codes, values))
    block = quantised.block_length(hidden, scale_dim)
    getattr(rows_through, f"pass_{name}")(
        ctypes.c_void_p(rows.data_ptr()), len(rows), hidden, block, scale_dim, *addresses
    )
    assert np.array_equal(scales.view(np.uint32), expected.scales.view(np.uint32))
    assert np.array_equal(codes, expected.codes)
    received = quantised.dequantise(expected, FORMATS[name])
    is_nan = np.isnan(received)
    assert np.array_equal(np.isnan(values), is_nan)
    assert np.array_equal(values.view(np.uint32)[~is_nan], received.view(np.uint32)[~is_nan])
