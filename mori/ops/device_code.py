"""The kernels of an op for a GPU: compiled for its shape, because code without the cases that cannot occur is shorter,
and at a few tokens the time of a call is the fetching of instructions."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from mori import env, jit

if TYPE_CHECKING:
    from .engine import EpShape

_SOURCE = Path("runtime/cuda_kernels.cu")
_KERNELS = ("mori_dispatch", "mori_combine_f32", "mori_combine_bf16")


def spec(shape: EpShape, arch: str, traced: bool = False) -> jit.Spec:
    """What to compile. `traced`: with the code that records traces and makes test delays."""
    return jit.Spec(
        name="ep",
        source=_SOURCE,
        kernels=_KERNELS,
        constants={
            "MORI_FIXED_WORLD_SIZE": shape.world_size,
            "MORI_FIXED_TOPK": shape.topk,
            "MORI_FIXED_EXPERTS_PER_RANK": shape.experts_per_rank,
            "MORI_FIXED_MAX_TOKENS": shape.max_tokens,
            "MORI_MAY_STAGE": shape.may_stage,
            "MORI_TRACED": traced,
        },
        target="cuda",
        arch=arch,
    )


def kernels(shape: EpShape, arch: str) -> bytes:
    """A cubin. Errors of mori.jit; see docs/jit.md."""
    return jit.compile(spec(shape, arch, traced=is_traced()))


def is_traced() -> bool:
    """ENABLE_PROFILER: kernels record traces, and can be made to pause for tests."""
    return bool(env.get("ENABLE_PROFILER"))
