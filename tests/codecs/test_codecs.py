"""Codecs against ml_dtypes, for every stored value and for every f32 value at which a rounding could go wrong."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests import reference
from tests.codecs import samples
from tests.codecs.conversions import HostConversions

FP8 = {"e4m3fn": torch.float8_e4m3fn, "e4m3fnuz": torch.float8_e4m3fnuz}
FP4 = torch.float4_e2m1fn_x2
CODES = np.arange(256, dtype=np.uint8)
WORDS = np.arange(1 << 16, dtype=np.uint16)
INFINITY = float("inf")


def f32(*values: float) -> np.ndarray:
    return np.array(values, dtype=np.float32)


def require_same_bits(found: np.ndarray, expected: np.ndarray, inputs: np.ndarray) -> None:
    kind = np.dtype(f"u{found.itemsize}")
    assert found.dtype == expected.dtype and found.shape == expected.shape
    wrong = np.nonzero(found.view(kind) != expected.view(kind))[0]
    assert len(wrong) == 0, "\n".join(
        f"{inputs[i]!r} ({inputs[i : i + 1].tobytes()[::-1].hex()}): {found[i]!r}, not {expected[i]!r}"
        for i in wrong[:10]
    )


@pytest.mark.parametrize("name", FP8)
def test_every_fp8_code_decodes(convert: HostConversions, name: str):
    require_same_bits(convert(f"decode {name}", CODES), reference.decode(CODES, FP8[name]), CODES)


@pytest.mark.parametrize("name", FP8)
def test_fp8_rounds_like_the_reference(convert: HostConversions, name: str):
    boundaries = samples.boundaries(np.abs(reference.decode(CODES, FP8[name])))
    for values in (samples.common(), boundaries):
        require_same_bits(convert(f"encode {name}", values), reference.encode(values, FP8[name]), values)


@pytest.mark.parametrize(
    "name, largest, code, tie, nan, minus_zero",
    [("e4m3fn", 448.0, 0x7E, 2.0**-10, 0x7F, 0x80), ("e4m3fnuz", 240.0, 0x7F, 2.0**-11, 0x80, 0x00)],
)
def test_fp8_at_its_ends(
    convert: HostConversions, name: str, largest: float, code: int, tie: float, nan: int, minus_zero: int
):
    encode = f"encode {name}"
    too_large = f32(largest, largest * 1.001, largest * 1.04, largest * 2, 1e38, INFINITY)
    assert convert(encode, too_large).tolist() == [code] * 6
    assert convert(encode, -too_large).tolist() == [code | 0x80] * 6
    assert convert(encode, f32(0.0, -0.0, -1e-45)).tolist() == [0, minus_zero, minus_zero]
    # Half of the smallest value is a tie that goes to zero; anything above it does not.
    assert convert(encode, f32(tie, np.nextafter(np.float32(tie), np.float32(1)), 3 * tie)).tolist() == [0, 1, 2]
    nans = np.array([0x7F800001, 0xFF800001, 0x7FC00000, 0xFFC00000, 0x7FFFFFFF, 0xFFFFFFFF], dtype=np.uint32)
    assert convert(encode, nans.view(np.float32)).tolist() == [nan] * 6


def test_every_pair_of_fp4_decodes(convert: HostConversions):
    expected = reference.decode(reference.unpack_pairs(CODES[:, None]), FP4).reshape(-1)
    require_same_bits(convert("decode e2m1fn", CODES), expected, np.repeat(CODES, 2))


def test_fp4_rounds_like_the_reference(convert: HostConversions):
    boundaries = samples.boundaries(np.abs(reference.decode(CODES[:16], FP4)))
    for values in (samples.common(), boundaries):
        # Each value in the low half of a byte, then in the high half.
        for shifted in (values, np.roll(values, 1)):
            expected = reference.pack_pairs(reference.encode(shifted, FP4).reshape(1, -1))[0]
            require_same_bits(convert("encode e2m1fn", shifted), expected, shifted[::2])


def test_fp4_at_its_ends(convert: HostConversions):
    def codes(*values: float) -> list[int]:
        return reference.unpack_pairs(convert("encode e2m1fn", f32(*values))[:, None]).reshape(-1).tolist()

    assert codes(6.0, 7.0, 8.0, 1e38, INFINITY, -INFINITY) == [7, 7, 7, 7, 7, 15]
    assert codes(0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -5.0) == [0, 2, 2, 4, 4, 6, 6, 14]
    assert codes(0.0, -0.0, 1e-45, -0.25, float("nan"), -float("nan")) == [0, 8, 0, 8, 8, 8]
    assert convert("encode e2m1fn", f32(0.5, -6.0)).tolist() == [0xF1]  # the even element in the low half


def test_every_bf16_decodes(convert: HostConversions):
    expected = (WORDS.astype(np.uint32) << 16).view(np.float32)
    require_same_bits(convert("decode bf16", WORDS), expected, WORDS)


def test_bf16_and_f32_round_like_the_reference(convert: HostConversions):
    for values in (samples.common(), samples.bf16_boundaries()):
        for name, dtype in (("bf16", torch.bfloat16), ("f32", torch.float32)):
            expected = reference.narrow(values, dtype).view(torch.int16 if name == "bf16" else torch.int32).numpy()
            found = convert(f"encode {name}", values)
            require_same_bits(found, expected.view(found.dtype), values)


def test_f32_decodes_as_it_is(convert: HostConversions):
    bits = samples.common().view(np.uint32)
    assert np.array_equal(convert("decode f32", bits).view(np.uint32), bits)
