"""Compiling the kernels of ops before there is a program that builds them, for GPUs that need not be there."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from itertools import product
from pathlib import Path
from typing import NamedTuple

from mori import archs, jit

from . import device_code

_TABLE = Path("kernels/table.hpp")


class Shape(NamedTuple):
    """What is fixed in the kernels of an op. `may_stage`: those of AsyncLL, or of MORI_EP_PATH other than direct."""

    world_size: int
    experts_per_rank: int
    topk: int
    max_tokens: int
    may_stage: bool


def shapes(world_size: int, experts_per_rank: int, topk: int, max_tokens: int) -> tuple[Shape, ...]:
    """Of all ops with these numbers."""
    return tuple(Shape(world_size, experts_per_rank, topk, max_tokens, may_stage) for may_stage in (False, True))


# One node of 8 GPUs with 256 experts, 8 per token: decoding and prefill.
SHIPPED = (*shapes(8, 32, 8, 128), *shapes(8, 32, 8, 4096))


def kernel_names() -> tuple[str, ...]:
    """All kernels, as csrc/kernels/table.hpp lists them."""
    text = (jit.source_root() / _TABLE).read_text(encoding="utf-8")
    return tuple(re.findall(r"^ +KERNEL\((\w+),", text, flags=re.MULTILINE))


def specs(of_shapes: Iterable[Shape], arch: str, kernels: Iterable[str] | None = None) -> list[jit.Spec]:
    """What there is to compile for an arch, without what it has no kernels for (`archs.runs_on`). ValueError for an
    unknown kernel or arch."""
    names = kernel_names()
    chosen = names if kernels is None else tuple(kernels)
    if unknown := set(chosen).difference(names):
        raise ValueError(f"no kernel {', '.join(sorted(unknown))}: there are {', '.join(names)}")
    made = [name for name in chosen if archs.runs_on(name, archs.find(arch))]
    return [device_code.spec(name, shape, arch) for shape, name in product(of_shapes, made)]


def compile_all(
    all_specs: Iterable[jit.Spec], workers: int, compiler: str | None = None
) -> Iterator[tuple[jit.Spec, Exception | None]]:
    """Fills the cache, `workers` at a time; each spec, as it is done, with what went wrong."""
    with ThreadPoolExecutor(workers) as pool:
        pending = {pool.submit(jit.compile, spec, compiler=compiler): spec for spec in all_specs}
        for done in as_completed(pending):
            error = done.exception()
            if error is not None and not isinstance(error, Exception):
                raise error
            yield pending.pop(done), error
