"""The C++ compiler of the machine: code for CPUs, as a shared object."""

from __future__ import annotations

import functools
import os
import shutil
from pathlib import Path

from mori.jit.job import Job
from mori.jit.program import compile_by_program, output_of, settings
from mori.jit.toolchain import Unavailable, host_options, include_options

# Variables that add options or lead to other headers.
_VARIABLES = ("CPATH", "CPLUS_INCLUDE_PATH")


class Gxx:
    def __init__(self, path: str) -> None:
        self.path = path
        version = output_of(path, "--version").partition("\n")[0]
        self.identity = " ".join([version, *settings(_VARIABLES)])

    def options(self, job: Job) -> list[str]:
        return host_options(job)

    def compile(self, job: Job) -> bytes:
        def command(source: Path, output: Path, _: Path) -> list[str]:
            return [self.path, *self.options(job), *include_options(job), "-x", "c++", "-o", str(output), str(source)]

        return compile_by_program(job, self.identity, command)


def find(arch: str) -> Gxx:
    """CXX, else g++, else clang++. Unavailable if there is none."""
    named = os.environ.get("CXX")
    path = next(filter(None, map(shutil.which, [named] if named else ["g++", "clang++"])), None)
    if path is None:
        raise Unavailable(f"no program {named} (CXX)" if named else "no g++ or clang++ in PATH")
    return _load(path, *settings(_VARIABLES))


@functools.cache
def _load(path: str, *_settings: str) -> Gxx:
    return Gxx(path)
