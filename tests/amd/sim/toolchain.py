"""Compiles device code as mori.jit does with the clang of the package ziglang, and gets clang's listing of it as well.

The listing is assembly text in which the assembler has noted the bytes of every instruction. It is only ever used
together with the code object: `program.py` holds every byte of the one against the other.
"""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

from mori import jit
from mori.jit import hip_clang
from mori.jit.job import resolve

ARCHS = ("gfx942", "gfx950", "gfx1250")


class Compiled(NamedTuple):
    code_object: bytes
    listing: str
    assembly: str = ""
    """What the listing was made from, with all that the compiler noted in it."""
    warnings: str = ""


def compile_spec(spec: jit.Spec) -> Compiled:
    job = resolve(spec)
    compiler = hip_clang.find_ziglang(spec.arch)
    with tempfile.TemporaryDirectory(prefix="amd-sim-") as name:
        folder = Path(name)
        source, output = job.path or folder / f"{spec.name}.hip", folder / "output"
        if job.path is None:
            source.write_text(job.text, encoding="utf-8")
        options = ["-Wall", "-Wextra", "-save-temps=obj"]
        warnings = _run([*compiler.command(job, source, output, folder), *options], folder)
        (assembly,) = (file.read_text(encoding="utf-8") for file in folder.glob("*.s"))
        return Compiled(output.read_bytes(), annotate(assembly, spec.arch), assembly, warnings)


def compile_text(source: str, arch: str) -> Compiled:
    return compile_spec(jit.Spec(name="test_kernels", source=source, target="hip", arch=arch))


def annotate(assembly: str, arch: str) -> str:
    """The same assembly, every instruction followed by the bytes that it becomes."""
    with tempfile.TemporaryDirectory(prefix="amd-sim-") as name:
        folder = Path(name)
        given, listing = folder / "given.s", folder / "listing.s"
        given.write_text(assembly, encoding="utf-8")
        options = ["-triple", "amdgcn-amd-amdhsa", "-target-cpu", arch, "-filetype", "asm", "-show-encoding"]
        compiler = hip_clang.find_ziglang(arch)
        _run([*compiler.program, "-cc1as", *options, str(given), "-o", str(listing)], folder)
        return listing.read_text(encoding="utf-8")


def _run(command: list[str], folder: Path) -> str:
    """What it says."""
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}: exit status {done.returncode}\n{done.stderr}")
    return done.stderr
