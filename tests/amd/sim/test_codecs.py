"""The codecs as AMD code, with the conversion instructions that an arch has, against the reference."""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from mori import jit
from tests import reference
from tests.amd.sim.machine import Code, Launch, Machine
from tests.amd.sim.memory import Arena, Memory
from tests.amd.sim.program import Program
from tests.amd.sim.toolchain import compile_spec
from tests.codecs import samples
from tests.codecs.conversions import FOLDER, HEADER, NUMBERS, prepare

SOURCE = f"""
#include "device/target_hip.hpp"
#include "{HEADER.name}"
extern "C" __attribute__((global)) void convert(mori::u64 which, const void* from, void* to, mori::u64 count) {{
  conversions::convert(which, from, to, mori::HipTarget::thread(), count, mori::HipTarget::threads());
}}
"""
CODE_BASE, FROM_BASE, TO_BASE = 0x1_0000_0000, 0x10_0000_0000, 0x20_0000_0000
CODES = np.arange(256, dtype=np.uint8)
HALVES = np.arange(0, 1 << 16, 37, dtype=np.uint16)
FP4 = torch.float4_e2m1fn_x2
SMALL = {"e4m3fn": torch.float8_e4m3fn, "e4m3fnuz": torch.float8_e4m3fnuz}


@functools.cache
def code(arch: str) -> Code:
    spec = jit.Spec(name="codecs", source=SOURCE, include_dirs=(FOLDER, "."), target="hip", arch=arch)
    return Code(Program(compile_spec(spec), CODE_BASE))


def convert(arch: str, name: str, values: np.ndarray) -> np.ndarray:
    given, result, count = prepare(name, values)
    memory = Memory()
    memory.add(Arena("from", FROM_BASE, given.nbytes)).write(0, given)
    target = memory.add(Arena("to", TO_BASE, result.nbytes))
    arguments = struct.pack("<QQQQ", NUMBERS[name], FROM_BASE, TO_BASE, count)
    Machine(memory, seed=0).run([Launch(code(arch), "convert", 1, 128, arguments)])
    return target.read(0, result.nbytes).view(result.dtype)


def values_to_round(magnitudes: np.ndarray) -> np.ndarray:
    """Where rounding may go wrong, special values, and random ones; an even number."""
    special = samples.both_signs(np.array(samples.SPECIAL_BITS, np.uint32).view(np.float32))
    random = samples.common()[-(samples.RANDOM_COUNT) :][:600]
    return np.concatenate([samples.boundaries(magnitudes), special, random])


def decoded(name: str) -> np.ndarray:
    if name == "e2m1fn":
        return reference.decode(reference.unpack_pairs(CODES[:, None]), FP4).reshape(-1)
    return reference.decode(CODES, SMALL[name])


def encoded(name: str, values: np.ndarray) -> np.ndarray:
    if name == "e2m1fn":
        return reference.pack_pairs(reference.encode(values, FP4).reshape(1, -1))[0]
    return reference.encode(values, SMALL[name])


def same_bits(found: np.ndarray, expected: np.ndarray) -> bool:
    return found.shape == expected.shape and found.tobytes() == np.ascontiguousarray(expected).tobytes()


@pytest.mark.parametrize("name", ["e4m3fn", "e4m3fnuz", "e2m1fn"])
def test_small_formats(arch: str, name: str) -> None:
    assert same_bits(convert(arch, f"decode {name}", CODES), decoded(name))
    values = values_to_round(np.abs(decoded(name)))
    values = values[: len(values) // 2 * 2]
    assert same_bits(convert(arch, f"encode {name}", values), encoded(name, values))


@pytest.mark.parametrize("name, dtype", [("bf16", torch.bfloat16), ("f32", torch.float32)])
def test_wide_formats(arch: str, name: str, dtype: torch.dtype) -> None:
    values = np.concatenate([values_to_round(np.abs(decoded("e4m3fn"))), samples.bf16_boundaries()[::997]])
    narrow: Callable[..., Any] = reference.narrow
    expected = narrow(values, dtype).view(torch.int16 if name == "bf16" else torch.int32).numpy()
    assert same_bits(convert(arch, f"encode {name}", values), expected)
    if name == "bf16":
        assert same_bits(convert(arch, "decode bf16", HALVES), HALVES.astype(np.uint32) << 16)


@pytest.mark.parametrize("name, largest", [("e4m3fn", 448.0), ("e4m3fnuz", 240.0), ("e2m1fn", 6.0)])
def test_scales_of_blocks(arch: str, name: str, largest: float) -> None:
    """Scale, factor and whether there is one, of a block whose largest magnitude is a bf16: see quantised_reference."""
    maximum = (HALVES & 0x7FFF).astype(np.uint32) << 16
    values = np.where(maximum > 0x7F800000, 0, maximum).astype(np.uint32).view(np.float32)
    scaled = values > (0 if name == "e2m1fn" else np.float32(largest))
    with np.errstate(all="ignore"):
        scale = np.where(scaled, values / np.float32(largest), np.float32(1))
        factor = np.where(scaled, np.float32(largest) / values, np.float32(0 if name == "e2m1fn" else 1))
    found = convert(arch, f"scale {name}", HALVES).reshape(-1, 3)
    finite = np.isfinite(values)
    assert (found[finite, 2] == (scaled | (name == "e2m1fn"))[finite]).all()
    for column, expected in ((0, scale), (1, factor)):
        assert same_bits(found[finite & scaled, column], expected[finite & scaled])


@pytest.mark.parametrize(
    "arch, mnemonics",
    [
        ("gfx942", ["v_cvt_f32_fp8", "v_cvt_pk_fp8_f32"]),
        ("gfx950", ["v_cvt_f32_fp8", "v_cvt_pk_fp8_f32", "v_cvt_scalef32_pk_f32_fp4", "v_cvt_scalef32_pk_fp4_f32"]),
        ("gfx1250", ["v_cvt_f32_fp8", "v_cvt_pk_fp8_f32", "v_cvt_scale_pk8_f32_fp4", "v_cvt_scalef32_pk8_fp4_f32"]),
    ],
)
def test_what_an_arch_converts_by_instructions(arch: str, mnemonics: list[str]) -> None:
    used = {one.mnemonic for one in code(arch).program.instructions}
    assert used.issuperset(mnemonics)
