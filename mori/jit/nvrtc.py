"""NVRTC, NVIDIA's compiler as a library, through ctypes: no CUDA toolkit is needed, torch's CUDA wheels bring it."""

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
from mori.jit.toolchain import Unavailable, cuda_options, include_options

_MAJORS = (13, 12)  # those that can make cubins of sm_90 from C++20
# NVRTC looks for quoted headers in the folder of the program's name, for a bare name the current directory, whose
# contents are in no cache key. So text gets a name in a folder that cannot exist.
_NOWHERE = Path("/dev/null/mori-jit")


class Nvrtc:
    """One loaded library."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        library.nvrtcGetErrorString.restype = ctypes.c_char_p
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._check(library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)), "nvrtcVersion")
        self.version = major.value, minor.value
        self.path = _path_of(library)
        # The version that it reports stops short of the patch level; the size of the file tells those apart.
        self.identity = f"nvrtc {major.value}.{minor.value} ({os.path.getsize(self.path)} bytes)"

    @functools.cached_property
    def archs(self) -> tuple[int, ...]:
        """Numbers of the archs that it can compile for, 90 for sm_90."""
        count = ctypes.c_int()
        self._check(self._library.nvrtcGetNumSupportedArchs(ctypes.byref(count)), "nvrtcGetNumSupportedArchs")
        numbers = (ctypes.c_int * count.value)()
        self._check(self._library.nvrtcGetSupportedArchs(numbers), "nvrtcGetSupportedArchs")
        return tuple(numbers)

    def options(self, job: Job) -> list[str]:
        return cuda_options(job, self.version)

    def compile(self, job: Job) -> bytes:
        program = ctypes.c_void_p()
        name = job.path or _NOWHERE / f"{job.spec.name}.cu"
        text, label = job.text.encode(), os.fsencode(name)
        created = self._library.nvrtcCreateProgram(ctypes.byref(program), text, label, 0, None, None)
        self._check(created, "nvrtcCreateProgram")
        try:
            options = [*self.options(job), *include_options(job)]
            encoded = (ctypes.c_char_p * len(options))(*map(os.fsencode, options))
            status = self._library.nvrtcCompileProgram(program, len(options), encoded)
            if status:
                log = self._fetch("ProgramLog", program).rstrip(b"\0").decode(errors="replace")
                raise CompileError(
                    f"{self.identity} cannot compile {job.source_name} for {job.arch}: {self._meaning(status)}",
                    source_name=job.source_name,
                    compiler=self.identity,
                    command=options,
                    log=log,
                )
            return self._fetch("CUBIN", program)
        finally:
            self._library.nvrtcDestroyProgram(ctypes.byref(program))

    def _fetch(self, what: str, program: ctypes.c_void_p) -> bytes:
        size = ctypes.c_size_t()
        self._check(getattr(self._library, f"nvrtcGet{what}Size")(program, ctypes.byref(size)), f"nvrtcGet{what}Size")
        buffer = ctypes.create_string_buffer(size.value)
        self._check(getattr(self._library, f"nvrtcGet{what}")(program, buffer), f"nvrtcGet{what}")
        return buffer.raw

    def _meaning(self, status: int) -> str:
        return self._library.nvrtcGetErrorString(status).decode()

    def _check(self, status: int, call: str) -> None:
        if status:
            raise CompileError(f"{call} failed: {self._meaning(status)}", compiler="nvrtc")


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


def _path_of(library: ctypes.CDLL) -> str:
    """The file that the library was loaded from, which a bare name does not tell."""
    address = ctypes.cast(library.nvrtcVersion, ctypes.c_void_p).value or 0
    with open("/proc/self/maps", encoding="utf-8") as maps:
        for line in maps:
            low, high = (int(end, 16) for end in line.split(maxsplit=1)[0].split("-"))
            if low <= address < high:
                return line.split(maxsplit=5)[5].rstrip("\n")
    raise OSError("the loaded libnvrtc is backed by no file")
