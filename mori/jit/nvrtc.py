"""NVRTC, NVIDIA's compiler as a library: no CUDA toolkit is needed, torch's CUDA wheels bring it."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from mori.jit.errors import CompileError
from mori.jit.job import Job
from mori.jit.runtime_compiler import RuntimeCompiler
from mori.jit.toolchain import Unavailable, cuda_options, include_options

_MAJORS = (13, 12)  # those that can make cubins of sm_90 from C++20
# Text gets a name in a folder that cannot exist: for a bare name quoted headers would be looked for in the current
# directory, whose contents are in no cache key.
_NOWHERE = Path("/dev/null/mori-jit")


class Nvrtc(RuntimeCompiler):
    prefix, product = "nvrtc", "CUBIN"

    @functools.cached_property
    def archs(self) -> tuple[int, ...]:
        """Numbers of the archs that it can compile for, 90 for sm_90."""
        count = ctypes.c_int()
        self._call("GetNumSupportedArchs", ctypes.byref(count))
        numbers = (ctypes.c_int * count.value)()
        self._call("GetSupportedArchs", numbers)
        return tuple(numbers)

    def options(self, job: Job) -> list[str]:
        return cuda_options(job, self.version)

    def includes(self, job: Job) -> list[str]:
        return include_options(job)

    def name_of(self, job: Job) -> Path:
        return job.path or _NOWHERE / f"{job.spec.name}.cu"


def find(arch: str) -> Nvrtc:
    """The first library that loads and knows the arch. Unavailable says what was wrong with each."""
    reasons = []
    for candidate in _candidates():
        try:
            compiler = _load(candidate)
        except (OSError, AttributeError, CompileError) as error:
            if os.sep in candidate:  # a bare name is a question to the loader, no finding
                reasons.append(f"{candidate}: {error}")
            continue
        if int(re.sub(r"\D", "", arch)) in compiler.archs:
            return compiler
        reasons.append(f"{compiler.path}: {compiler.identity} does not know {arch}")
    raise Unavailable("; ".join(reasons) or "no libnvrtc.so in Python's packages, the loader's path, /usr/local/cuda*")


@functools.cache
def _load(candidate: str) -> Nvrtc:
    return Nvrtc(ctypes.CDLL(candidate))


def _candidates() -> Iterator[str]:
    """Packages first: the CUDA release of the installed torch (its code objects suit the driver that torch needs), then
    the newest; then what the loader finds; then toolkits."""
    suffixes = [f"libnvrtc.so.{major}" for major in sorted(_MAJORS, key=lambda major: major != torch_cuda_major())]
    namespace = importlib.util.find_spec("nvidia")
    packages = [Path(entry) for entry in (namespace and namespace.submodule_search_locations) or ()]
    for suffix in suffixes:
        for package in packages:
            yield from map(str, sorted(package.glob(f"*/lib/{suffix}"), reverse=True))
    yield from suffixes
    home = os.environ.get("CUDA_HOME")
    toolkits = [Path(home)] if home else []
    toolkits += [Path("/usr/local/cuda"), *sorted(Path("/usr/local").glob("cuda-*"), reverse=True)]
    for toolkit in toolkits:
        yield from (str(file) for suffix in suffixes if (file := toolkit / "lib64" / suffix).is_file())


def torch_cuda_major() -> int | None:
    """13 for a torch built with CUDA 13.0, None without such a torch. Read from its files: importing takes seconds."""
    if "torch" in sys.modules:
        release = getattr(sys.modules["torch"].version, "cuda", None) or ""
    else:
        found = importlib.util.find_spec("torch")
        file = Path(found.origin).with_name("version.py") if found and found.origin else None
        text = file.read_text(encoding="utf-8") if file and file.is_file() else ""
        match = re.search(r"^cuda\b.*=\s*['\"]([\d.]+)", text, flags=re.MULTILINE)
        release = match[1] if match else ""
    return int(release.split(".")[0]) if release else None
