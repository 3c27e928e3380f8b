"""Compilers that are programs: how they are asked and run."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

from mori.jit.errors import CompileError
from mori.jit.job import Job
from mori.jit.spec import TARGETS
from mori.jit.toolchain import Unavailable

_COMPILE_LIMIT_S = 900


def compile_by_program(job: Job, identity: str, command: Callable[[Path, Path, Path], list[str]]) -> bytes:
    """The output of `command(source, output, folder)`. The program runs in `folder`, which is empty, so that nothing
    beside it is found by chance. CompileError if there is no output."""
    with tempfile.TemporaryDirectory(prefix="mori-jit-") as name:
        folder = Path(name)
        source, output = job.path, folder / "output"
        if source is None:
            source = folder / f"{job.spec.name}{TARGETS[job.spec.target].suffix}"
            source.write_text(job.text, encoding="utf-8")
        line = command(source, output, folder)
        try:
            done = subprocess.run(
                line,
                cwd=folder,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=_COMPILE_LIMIT_S,
            )
            status, log = f"exit status {done.returncode}", done.stdout + done.stderr
        except subprocess.TimeoutExpired:
            status, log = f"not done after {_COMPILE_LIMIT_S} s", ""
        if not output.is_file() or status != "exit status 0":
            raise CompileError(
                f"{identity} cannot compile {job.source_name} for {job.arch}: {status}",
                source_name=job.source_name,
                compiler=identity,
                command=line,
                log=log,
            )
        return output.read_bytes()


def output_of(*command: str) -> str:
    """What a program says. Unavailable if it fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise Unavailable(f"{' '.join(command)} fails: {error}") from None


def settings(variables: Iterable[str]) -> list[str]:
    """Those of the variables that are set, as NAME=value: what they say changes the result."""
    return [f"{name}={os.environ[name]}" for name in variables if os.environ.get(name)]
