"""A compiler that counts its calls in a file, so that calls of many processes add up. As a program it is one process.

Its language has one statement, `kernel NAME`; its code objects are the text that it was given. It knows every arch.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

from mori import jit
from mori.jit import compilers
from mori.jit.job import Job

MAGIC = b"fake code\n"


class FakeCompiler:
    """`gate`, if given, is a file: a compilation goes on when nobody holds an exclusive lock on it."""

    def __init__(self, counter: Path, gate: Path | None = None) -> None:
        self.identity = "fake 1.0"
        self.extra: list[str] = []
        self.during: Callable[[], object] = lambda: None
        self._counter, self._gate = counter, gate

    @property
    def calls(self) -> int:
        return self._counter.read_text().count("\n") if self._counter.exists() else 0

    def options(self, job: Job) -> list[str]:
        return [f"-arch={job.arch}", *job.spec.definitions, *job.flags, *self.extra]

    def compile(self, job: Job) -> bytes:
        with open(self._counter, "a") as file:
            file.write(f"{os.getpid()}\n")
        self.during()
        if self._gate:
            with open(self._gate) as gate:
                fcntl.flock(gate, fcntl.LOCK_SH)
        if "mistake" in job.text:
            raise jit.CompileError(
                f"{self.identity} cannot compile {job.source_name}",
                source_name=job.source_name,
                compiler=self.identity,
                command=self.options(job),
                log="line 1: there is a mistake",
            )
        return MAGIC + job.text.encode()

    def row(self) -> compilers.Row:
        return compilers.Row("fake", "cuda", lambda arch: self, kernels_in, "nothing")


def kernels_in(binary: bytes) -> set[str]:
    if not binary.startswith(MAGIC):
        raise ValueError("no fake code")
    return set(re.findall(r"kernel (\w+)", binary.decode()))


def main() -> None:
    """Arguments: counter, gate, user id to become (0: stay). Says "asking", compiles, prints the outcome as JSON."""
    counter, gate, user = sys.argv[1:]
    compilers.COMPILERS[:] = [FakeCompiler(Path(counter), Path(gate)).row()]
    if int(user):
        os.setuid(int(user))
    print("asking", flush=True)
    binary = jit.compile(jit.Spec("add", "kernel add", kernels=("add",)))
    print(json.dumps({"binary": binary.decode()}), flush=True)


if __name__ == "__main__":
    main()
