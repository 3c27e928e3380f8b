"""The kernels of an op for a GPU: compiled for its shape, because code without the cases that cannot occur is shorter,
and at a few tokens the time of a call is the fetching of instructions. Each is compiled when it is first needed."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from mori import archs, env, jit

from . import restrictions

if TYPE_CHECKING:
    from .engine import EpShape

_SOURCES = {"cuda": Path("runtime/cuda_kernels.cu"), "hip": Path("runtime/hip_kernels.hip")}


def spec(name: str, shape: EpShape, arch: str, traced: bool = False) -> jit.Spec:
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


def kernel(name: str, shape: EpShape, arch: str) -> bytes:
    """A code object. TypeError for arithmetic that the arch does not have; errors of mori.jit, see docs/jit.md."""
    restrictions.require("v1", "call", restrictions.Case(None, archs.find(arch), kernel=name))
    return jit.compile(spec(name, shape, arch, traced=is_traced()))


def is_traced() -> bool:
    """ENABLE_PROFILER: kernels record traces, and can be made to pause for tests."""
    return bool(env.get("ENABLE_PROFILER"))
