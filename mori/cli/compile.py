"""What `mori compile` does."""

from __future__ import annotations

import os
import stat
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path

from mori import env
from mori.archs import ARCHS

# Kernels of the host are part of the package.
ARCHS_TO_COMPILE = tuple(arch.name for arch in ARCHS.values() if arch.target != "host")


def compile_ahead(
    arch_names: Iterable[str],
    out: Path,
    configs: Iterable[str],
    kernels: list[str],
    compiler: str | None,
    jobs: int,
    say: Callable[[str], object],
) -> int:
    """Fills `out` like a cache; returns the number of kernels that could not be compiled.

    `configs` as in `ahead_of_time.parse_config`; none for those that are shipped. ValueError for configs, kernels or
    archs that make no sense, and where MORI_JIT_ARCH is set.
    """
    from mori.ops import ahead_of_time

    if env.get("MORI_JIT_ARCH"):
        raise ValueError(f"MORI_JIT_ARCH={env.get('MORI_JIT_ARCH')} would stand for every arch of --arch: unset it")
    parsed = [ahead_of_time.parse_config(text) for text in configs or ahead_of_time.SHIPPED]
    wanted = {
        arch: list(dict.fromkeys(spec for config in parsed for spec in ahead_of_time.specs(config, arch, kernels)))
        for arch in arch_names
    }
    env.put("MORI_JIT_CACHE_DIR", str(out.absolute()))
    begin_s = time.monotonic()
    failed: Counter[str] = Counter()
    everything = [spec for specs in wanted.values() for spec in specs]
    for spec, error in ahead_of_time.compile_all(everything, jobs, compiler):
        if error is not None:
            failed[spec.arch] += 1
            say(f"{spec.arch} {spec.name}: {error}")
    for arch, specs in wanted.items():
        different = len({spec.name for spec in specs})
        say(f"{arch}: {len(specs) - failed[arch]} of {len(specs)} code objects, {different} different kernels")
    _let_everybody_read(out)
    say(f"{len(everything) - failed.total()} code objects in {out} after {time.monotonic() - begin_s:.0f} s")
    return failed.total()


def _let_everybody_read(folder: Path) -> None:
    """A cache is private to who fills it; this one is meant for others, who may read it."""
    for path in (folder, *folder.iterdir()):
        more = stat.S_IRGRP | stat.S_IROTH | (stat.S_IXGRP | stat.S_IXOTH if path.is_dir() else 0)
        os.chmod(path, path.stat().st_mode | more)
