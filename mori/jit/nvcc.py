"""nvcc of a CUDA toolkit: the fallback where there is no NVRTC, or none that knows the arch."""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

from mori.jit.errors import CompileError
from mori.jit.job import Job
from mori.jit.toolchain import Unavailable, cuda_options, include_options

_COMPILE_LIMIT_S = 900
# Variables by which nvcc adds options, picks another host compiler or looks for headers elsewhere.
_VARIABLES = ("NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS", "NVCC_CCBIN", "CPATH", "CPLUS_INCLUDE_PATH")


class Nvcc:
    def __init__(self, path: str) -> None:
        self.path = path
        said = _output(path, "--version")
        release = re.search(r"release (\d+)\.(\d+), V([\d.]+)", said)
        if not release:
            raise Unavailable(f"{path} --version says no release: {said.strip()[:200]!r}")
        self.version = int(release[1]), int(release[2])
        settings = [f"{name}={os.environ[name]}" for name in _VARIABLES if os.environ.get(name)]
        self.identity = " ".join([f"nvcc {release[3]}", *settings])

    @functools.cached_property
    def archs(self) -> frozenset[str]:
        return frozenset(_output(self.path, "--list-gpu-code").split())

    def options(self, job: Job) -> list[str]:
        return ["--cubin", *cuda_options(job, self.version)]

    def compile(self, job: Job) -> bytes:
        with tempfile.TemporaryDirectory(prefix="mori-jit-") as folder:
            source, output = job.path, Path(folder, "output.cubin")
            if source is None:
                source = Path(folder, f"{job.spec.name}.cu")
                source.write_text(job.text, encoding="utf-8")
            command = [self.path, *self.options(job), *include_options(job), "-x", "cu", "-o", str(output), str(source)]
            try:
                # In the empty folder, so that nothing beside it is found by chance.
                done = subprocess.run(
                    command, cwd=folder, capture_output=True, text=True, errors="replace", timeout=_COMPILE_LIMIT_S
                )
                status, log = f"exit status {done.returncode}", done.stdout + done.stderr
            except subprocess.TimeoutExpired:
                status, log = f"not done after {_COMPILE_LIMIT_S} s", ""
            if not output.is_file() or status != "exit status 0":
                raise CompileError(
                    f"{self.identity} cannot compile {job.source_name} for {job.arch}: {status}",
                    source_name=job.source_name,
                    compiler=self.identity,
                    command=command,
                    log=log,
                )
            return output.read_bytes()


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


def _output(path: str, argument: str) -> str:
    try:
        return subprocess.run([path, argument], capture_output=True, text=True, timeout=60, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise Unavailable(f"{path} {argument} fails: {error}") from None
