"""The conversions of conversions.hpp by name, on the host: compiled by the compiler and flags of the core."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import NamedTuple

import numpy as np

from mori import jit
from tests.package.commands import compile_cxx

FOLDER = Path(__file__).parent
HEADER = FOLDER / "conversions.hpp"
# What CMakeLists.txt compiles the host kernels with.
FLAGS = ("-O3", "-ffp-contract=off", "-fno-tree-loop-distribute-patterns", "-fPIC", "-shared")
VARIANTS = {
    "baseline": (),
    "avx2": ("-march=x86-64-v3",),
    "avx512": ("-march=x86-64-v4", "-mprefer-vector-width=512"),
}


HOST_SOURCE = f"""#include "{HEADER.name}"
extern "C" void convert(mori::u64 which, const void* from, void* to, mori::u64 count) {{
  conversions::convert(which, from, to, 0, count, 1);
}}
"""
DEVICE_SOURCE = f"""#include "{HEADER.name}"
extern "C" __global__ void convert(mori::u64 which, const void* from, void* to, mori::u64 count) {{
  const mori::u64 thread = mori::u64(blockIdx.x) * blockDim.x + threadIdx.x;
  conversions::convert(which, from, to, thread, count, mori::u64(gridDim.x) * blockDim.x);
}}
"""


class Conversion(NamedTuple):
    """Types of one element, and how many of them an element of `convert` takes and gives."""

    from_type: type[np.generic]
    from_count: int
    to_type: type[np.generic]
    to_count: int


CONVERSIONS = {
    "decode f32": Conversion(np.uint32, 1, np.float32, 1),
    "encode f32": Conversion(np.float32, 1, np.uint32, 1),
    "decode bf16": Conversion(np.uint16, 1, np.float32, 1),
    "encode bf16": Conversion(np.float32, 1, np.uint16, 1),
    "decode e4m3fn": Conversion(np.uint8, 1, np.float32, 1),
    "encode e4m3fn": Conversion(np.float32, 1, np.uint8, 1),
    "decode e4m3fnuz": Conversion(np.uint8, 1, np.float32, 1),
    "encode e4m3fnuz": Conversion(np.float32, 1, np.uint8, 1),
    "decode e2m1fn": Conversion(np.uint8, 1, np.float32, 2),
    "encode e2m1fn": Conversion(np.float32, 2, np.uint8, 1),
    "scale e4m3fn": Conversion(np.uint16, 1, np.float32, 3),
    "scale e4m3fnuz": Conversion(np.uint16, 1, np.float32, 3),
    "scale e2m1fn": Conversion(np.uint16, 1, np.float32, 3),
}
NUMBERS = {name: number for number, name in enumerate(CONVERSIONS)}


def prepare(name: str, source: np.ndarray) -> tuple[np.ndarray, np.ndarray, int]:
    """A copy of the source as `convert` takes it, an array for its result, and the count of elements."""
    conversion = CONVERSIONS[name]
    assert source.dtype == conversion.from_type and source.ndim == 1
    count, rest = divmod(len(source), conversion.from_count)
    assert rest == 0
    return np.array(source, order="C"), np.empty(count * conversion.to_count, conversion.to_type), count


def library(source: str, output: Path, variant: str) -> ctypes.CDLL:
    """C++ text compiled for one of VARIANTS."""
    result = compile_cxx(source, *FLAGS, *VARIANTS[variant], f"-I{FOLDER}", f"-I{jit.source_root()}", "-o", str(output))
    assert result.returncode == 0, result.stderr
    return ctypes.CDLL(str(output))


class HostConversions:
    """Callable: `conversions("encode e4m3fn", values)`."""

    def __init__(self, folder: Path, variant: str = "baseline") -> None:
        self._convert = library(HOST_SOURCE, folder / f"conversions_{variant}.so", variant).convert
        self._convert.argtypes = [ctypes.c_uint64, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint64]
        self._convert.restype = None

    def __call__(self, name: str, source: np.ndarray) -> np.ndarray:
        given, result, count = prepare(name, source)
        self._convert(NUMBERS[name], given.ctypes.data, result.ctypes.data, count)
        return result
