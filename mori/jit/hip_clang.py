"""Programs that compile HIP: hipcc of a ROCm installation, and clang of the package ziglang, which needs no ROCm."""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import shutil
import subprocess
from pathlib import Path

from mori import env
from mori.jit.job import Job
from mori.jit.program import compile_by_program, output_of, settings
from mori.jit.toolchain import Unavailable, hip_options, include_options

# Variables that add options, or lead to other programs and headers.
_VARIABLES = (
    "HIPCC_COMPILE_FLAGS_APPEND",
    "HIPCC_LINK_FLAGS_APPEND",
    "HIP_CLANG_PATH",
    "HIP_DEVICE_LIB_PATH",
    "CCC_OVERRIDE_OPTIONS",
    "CPATH",
    "CPLUS_INCLUDE_PATH",
)
# One code object as such, no bundle; and no random number in it.
_ONE_CODE_OBJECT = ("-x", "hip", "--offload-device-only", "--no-gpu-bundle-output", "-fuse-cuid=none")
_WITHOUT_ROCM = ("-nogpuinc", "-nogpulib")


class HipClang:
    """`program` and its first arguments make a clang; `identity` stands for all that they are."""

    def __init__(self, program: tuple[str, ...], identity: str, fixed: tuple[str, ...] = ()) -> None:
        self.program = program
        self.identity = " ".join([identity, *settings(_VARIABLES)])
        self._fixed = fixed

    @functools.cache  # noqa: B019 - compilers are kept anyway
    def knows(self, arch: str) -> bool:
        """There is no list to ask for, so it has to compile nothing for the arch."""
        nothing = [f"--offload-arch={arch}", *_WITHOUT_ROCM, "-fsyntax-only", os.devnull]
        command = [*self.program, *_ONE_CODE_OBJECT, *nothing]
        return subprocess.run(command, capture_output=True, timeout=60).returncode == 0

    def options(self, job: Job) -> list[str]:
        return [*_ONE_CODE_OBJECT, *self._fixed, *hip_options(job)]

    def compile(self, job: Job) -> bytes:
        return compile_by_program(job, self.identity, functools.partial(self.command, job))

    def command(self, job: Job, source: Path, output: Path, folder: Path) -> list[str]:
        return [*self.program, *self.options(job), *include_options(job), "-o", str(output), str(source)]


class ZigClang(HipClang):
    def __init__(self, zig: str) -> None:
        super().__init__((zig, "clang"), f"ziglang {output_of(zig, 'version').strip()}", _WITHOUT_ROCM)

    def command(self, job: Job, source: Path, output: Path, folder: Path) -> list[str]:
        # clang calls its linker by the name lld and tells it which of its kinds to be; here that kind is a word to zig.
        linker = folder / "lld"
        linker.write_text(f'#!/bin/sh\n[ "$1" = -flavor ] && shift 2\nexec "{self.program[0]}" ld.lld "$@"\n')
        linker.chmod(0o700)
        return [*super().command(job, source, output, folder), f"-B{folder}"]


def find_hipcc(arch: str) -> HipClang:
    """MORI_JIT_HIPCC, else hipcc of ROCM_PATH, PATH or /opt/rocm. Unavailable if there is none that knows the arch."""
    home = os.environ.get("ROCM_PATH")
    named = env.get("MORI_JIT_HIPCC")
    places = [named] if named else [*([f"{home}/bin/hipcc"] if home else []), "hipcc", "/opt/rocm/bin/hipcc"]
    path = next(filter(None, map(shutil.which, places)), None)
    if path is None:
        raise Unavailable(f"no program {named} (MORI_JIT_HIPCC)" if named else "no hipcc in ROCM_PATH, PATH, /opt/rocm")
    return _that_knows(arch, _load_hipcc(path, *settings(_VARIABLES)), path)


def find_ziglang(arch: str) -> HipClang:
    """clang of the package ziglang. Unavailable if it is not installed, or does not know the arch."""
    package = importlib.util.find_spec("ziglang")
    zig = Path(package.origin).with_name("zig") if package and package.origin else None
    if zig is None or not zig.is_file():
        raise Unavailable("the package is not installed")
    return _that_knows(arch, _load_zig(str(zig), *settings(_VARIABLES)), str(zig))


def _that_knows(arch: str, compiler: HipClang, path: str) -> HipClang:
    if not compiler.knows(arch):
        raise Unavailable(f"{path}: {compiler.identity} does not know {arch}")
    return compiler


@functools.cache
def _load_hipcc(path: str, *_settings: str) -> HipClang:
    said = output_of(path, "--version")
    versions = re.findall(r"HIP version: \S+|clang version \S+", said)
    if not versions:
        raise Unavailable(f"{path} --version says no version: {said.strip()[:200]!r}")
    return HipClang((path,), " ".join(["hipcc", *versions]))


@functools.cache
def _load_zig(path: str, *_settings: str) -> HipClang:
    return ZigClang(path)
