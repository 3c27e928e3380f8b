"""Compiles HIP sources with the clang of the package ziglang: a code object, and clang's own listing of it.

The listing is assembly text in which the assembler has noted the bytes of every instruction. It is only ever used
together with the code object: `program.py` holds every byte of the one against the other.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

ARCHS = ("gfx942", "gfx950", "gfx1250")
FLAGS = (
    *("-x", "hip", "--offload-device-only", "--no-gpu-bundle-output", "-nogpuinc", "-nogpulib", "-fuse-cuid=none"),
    *("-O3", "-std=c++20", "-ffp-contract=off"),
)
LINKER = f"""#!/bin/sh
shift 2  # clang names the flavour of a linker that is several at once
exec '{sys.executable}' -m ziglang ld.lld "$@"
"""


class Compiled(NamedTuple):
    arch: str
    code_object: bytes
    listing: str


def compile_hip(source: str, arch: str, flags: Sequence[str] = ()) -> Compiled:
    """`source` is the text of a HIP file; `flags` are added to those of every build."""
    with tempfile.TemporaryDirectory(prefix="amd-sim-") as folder:
        kernels, binary = Path(folder, "kernels.hip"), Path(folder, "kernels.hsaco")
        kernels.write_text(source, encoding="utf-8")
        linker = Path(folder, "lld")
        linker.write_text(LINKER, encoding="utf-8")
        linker.chmod(0o755)
        options = [*FLAGS, f"--offload-arch={arch}", "-save-temps=obj", *flags]
        _zig(folder, "clang", *options, str(kernels), "-o", str(binary))
        (assembly,) = Path(folder).glob("*.s")
        return Compiled(arch, binary.read_bytes(), annotate(assembly.read_text(encoding="utf-8"), arch))


def annotate(assembly: str, arch: str) -> str:
    """The same assembly, every instruction followed by the bytes that it becomes."""
    with tempfile.TemporaryDirectory(prefix="amd-sim-") as folder:
        given, listing = Path(folder, "given.s"), Path(folder, "listing.s")
        given.write_text(assembly, encoding="utf-8")
        options = ["-triple", "amdgcn-amd-amdhsa", "-target-cpu", arch, "-filetype", "asm", "-show-encoding"]
        _zig(folder, "clang", "-cc1as", *options, str(given), "-o", str(listing))
        return listing.read_text(encoding="utf-8")


def _zig(folder: str, *arguments: str) -> None:
    command = [sys.executable, "-m", "ziglang", *arguments]
    environment = {**os.environ, "PATH": os.pathsep.join([folder, os.environ.get("PATH", os.defpath)])}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}: exit status {done.returncode}\n{done.stderr}")
