"""The kernels of an op for a GPU: compiled for its shape, because code without the cases that cannot occur is shorter,
and at a few tokens the time of a call is the fetching of instructions. Each is compiled when it is first needed."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Protocol

from mori import archs, env, jit

_SOURCES = {"cuda": Path("runtime/cuda_kernels.cu"), "hip": Path("runtime/hip_kernels.hip")}


class Fixed(Protocol):
    """What of an op's shape is a constant in its kernels."""

    @property
    def world_size(self) -> int: ...
    @property
    def topk(self) -> int: ...
    @property
    def experts_per_rank(self) -> int: ...
    @property
    def max_tokens(self) -> int: ...
    @property
    def may_stage(self) -> bool: ...


def spec(name: str, shape: Fixed, arch: str, traced: bool = False) -> jit.Spec:
    """What to compile for the kernel of that name. `traced`: with the code that records traces and delays tests."""
    target = archs.find(arch).target
    return jit.Spec(
        name=f"ep_{name}",
        source=_SOURCES[target],
        kernels=(f"mori_{name}",),
        constants={
            "MORI_KERNEL": name,
            **{f"MORI_SHAPE_{field.upper()}": value for field, value in asdict(shape).items() if field != "rank"},
            "MORI_TRACED": traced,
        },
        target=target,
        arch=arch,
    )


def kernel(name: str, shape: Fixed, arch: str) -> bytes:
    """A code object. Errors of mori.jit; see docs/jit.md."""
    return jit.compile(spec(name, shape, arch, traced=is_traced()))


def is_traced() -> bool:
    """ENABLE_PROFILER: kernels record traces, and can be made to pause for tests."""
    return bool(env.get("ENABLE_PROFILER"))
