"""The compilers, in order of preference."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from mori.jit import elf, gxx, hip_clang, hiprtc, nvcc, nvrtc
from mori.jit.errors import CompilerNotFound
from mori.jit.toolchain import Compiler, Unavailable


class Row(NamedTuple):
    """`find(arch)` gives a compiler or raises Unavailable with the reason; it is called often and remembers.
    `kernels_in` lists what a result of this compiler holds. `install` completes "install ..."."""

    name: str
    target: str
    find: Callable[[str], Compiler]
    kernels_in: Callable[[bytes], set[str]]
    install: str


COMPILERS = [
    Row(
        "nvrtc",
        "cuda",
        nvrtc.find,
        elf.cuda_kernels,
        "a torch with CUDA, or the package nvidia-cuda-nvrtc (CUDA 13) or nvidia-cuda-nvrtc-cu12",
    ),
    Row("nvcc", "cuda", nvcc.find, elf.cuda_kernels, "a CUDA toolkit of release 12 or later, and set CUDA_HOME"),
    Row("hiprtc", "hip", hiprtc.find, elf.amd_kernels, "ROCm, or a torch with ROCm"),
    Row("hipcc", "hip", hip_clang.find_hipcc, elf.amd_kernels, "ROCm, and set ROCM_PATH"),
    Row("ziglang", "hip", hip_clang.find_ziglang, elf.amd_kernels, "the package ziglang, which needs no ROCm"),
    Row("g++", "host", gxx.find, elf.host_kernels, "a C++ compiler that knows C++20, or set CXX"),
]


def choose(target: str, arch: str, only: str | None = None) -> tuple[Row, Compiler]:
    """The first compiler that is there and knows the arch; `only` names the one row to look at.

    CompilerNotFound tells, per compiler, why not and what to install. ValueError for an unknown `only`.
    """
    rows = [row for row in COMPILERS if row.target == target and only in (None, row.name)]
    if not rows:
        known = ", ".join(row.name for row in COMPILERS if row.target == target)
        raise ValueError(f"compiler={only!r}: target {target} has {known or 'none'}")
    reasons = []
    for row in rows:
        try:
            return row, row.find(arch)
        except Unavailable as reason:
            reasons.append(f"  {row.name}: {reason}. Install {row.install}.")
    raise CompilerNotFound("\n".join([f"no compiler for {target} code of {arch}:", *reasons]))
