"""nvcc of a CUDA toolkit: the fallback where there is no NVRTC, or none that knows the arch."""

from __future__ import annotations

import functools
import os
import re
import shutil
from pathlib import Path

from mori.jit.job import Job
from mori.jit.program import compile_by_program, output_of, settings
from mori.jit.toolchain import Unavailable, cuda_options, include_options

# Variables by which nvcc adds options, picks another host compiler or looks for headers elsewhere.
_VARIABLES = ("NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS", "NVCC_CCBIN", "CPATH", "CPLUS_INCLUDE_PATH")


class Nvcc:
    def __init__(self, path: str) -> None:
        self.path = path
        said = output_of(path, "--version")
        release = re.search(r"release (\d+)\.(\d+), V([\d.]+)", said)
        if not release:
            raise Unavailable(f"{path} --version says no release: {said.strip()[:200]!r}")
        self.version = int(release[1]), int(release[2])
        self.identity = " ".join([f"nvcc {release[3]}", *settings(_VARIABLES)])

    @functools.cached_property
    def archs(self) -> frozenset[str]:
        return frozenset(output_of(self.path, "--list-gpu-code").split())

    def options(self, job: Job) -> list[str]:
        return ["--cubin", *cuda_options(job, self.version)]

    def compile(self, job: Job) -> bytes:
        def command(source: Path, output: Path, _: Path) -> list[str]:
            return [self.path, *self.options(job), *include_options(job), "-x", "cu", "-o", str(output), str(source)]

        return compile_by_program(job, self.identity, command)


def find(arch: str) -> Nvcc:
    """nvcc of CUDA_HOME, else of PATH, else of /usr/local/cuda. Unavailable if there is none that knows the arch."""
    homes = [Path(home, "bin", "nvcc") for home in (os.environ.get("CUDA_HOME"),) if home]
    candidates = [
        shutil.which(homes[0]) if homes else None,
        shutil.which("nvcc"),
        shutil.which("/usr/local/cuda/bin/nvcc"),
    ]
    path = next(filter(None, candidates), None)
    if path is None:
        raise Unavailable("no nvcc in CUDA_HOME, PATH or /usr/local/cuda")
    compiler = _load(path, *(os.environ.get(name) for name in _VARIABLES))
    if arch not in compiler.archs:
        raise Unavailable(f"{path}: {compiler.identity} does not know {arch}")
    return compiler


@functools.cache
def _load(path: str, *_settings: str | None) -> Nvcc:
    return Nvcc(path)
