"""hipRTC, AMD's compiler as a library: ROCm and torch's ROCm wheels bring it."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

from mori.jit.errors import CompileError
from mori.jit.job import Job, resolve
from mori.jit.runtime_compiler import RuntimeCompiler
from mori.jit.spec import Spec
from mori.jit.toolchain import Unavailable, hip_options, include_options

_NAMES = ("libhiprtc.so.7", "libhiprtc.so.6", "libhiprtc.so")


class HipRtc(RuntimeCompiler):
    prefix, product = "hiprtc", "Code"

    @functools.cache  # noqa: B019 - libraries are kept anyway
    def knows(self, arch: str) -> bool:
        """There is no list to ask for, so it has to compile nothing for the arch."""
        try:
            self.compile(resolve(Spec("nothing", "", target="hip", arch=arch)))
        except CompileError:
            return False
        return True

    def options(self, job: Job) -> list[str]:
        return hip_options(job)

    def includes(self, job: Job) -> list[str]:
        beside = [f"-I{job.path.parent}"] if job.path else []
        return [*beside, *include_options(job)]

    def name_of(self, job: Job) -> Path:
        # It puts the text into a folder of its own, under this name.
        return Path(job.path.name if job.path else f"{job.spec.name}.hip")


def find(arch: str) -> HipRtc:
    """The first library that loads and knows the arch. Unavailable says what was wrong with each."""
    reasons = []
    for candidate in _candidates():
        try:
            compiler = _load(candidate)
        except (OSError, AttributeError, CompileError) as error:
            if os.sep in candidate:  # a bare name is a question to the loader, no finding
                reasons.append(f"{candidate}: {error}")
            continue
        if compiler.knows(arch):
            return compiler
        reasons.append(f"{compiler.path}: {compiler.identity} does not know {arch}")
    raise Unavailable("; ".join(reasons) or "no libhiprtc.so in torch, the loader's path, ROCM_PATH, /opt/rocm*")


@functools.cache
def _load(candidate: str) -> HipRtc:
    return HipRtc(ctypes.CDLL(candidate))


def _candidates() -> Iterator[str]:
    """That of the installed torch first: its code objects suit the runtime that torch has loaded."""
    torch = importlib.util.find_spec("torch")
    if torch and torch.origin:
        yield from map(str, sorted(Path(torch.origin).parent.glob("lib/libhiprtc.so*")))
    yield from _NAMES
    home = os.environ.get("ROCM_PATH")
    for folder in [*([Path(home)] if home else []), Path("/opt/rocm"), *sorted(Path("/opt").glob("rocm-*"))]:
        yield from (str(file) for name in _NAMES if (file := folder / "lib" / name).is_file())
