"""Builds kernels as mori.jit does, and gets clang's listing of them in the same run."""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from mori import archs, jit
from mori.jit import hip_clang
from mori.jit.job import resolve
from mori.ops import ahead_of_time, device_code
from mori.ops.engine import EpShape
from tests.amd.sim.program import Program
from tests.amd.sim.toolchain import Compiled, annotate

ARCHS = ("gfx942", "gfx950", "gfx1250")
# One shape stands for all: others change constants. It has what every kernel needs.
SHAPE = EpShape(
    world_size=8,
    rank=0,
    max_tokens=128,
    hidden_dim=7168,
    max_element_bytes=2,
    scale_dim=56,
    scale_element_bytes=4,
    experts_per_rank=32,
    topk=8,
    max_recv_tokens=1024,
    block_scales=56,
)
KERNELS = ahead_of_time.kernel_names()
BUILDS = [(kernel, arch) for arch in ARCHS for kernel in KERNELS if archs.runs_on(kernel, archs.find(arch))]


class Build(NamedTuple):
    """`metadata` and `assembly` are the compiler's own words."""

    program: Program
    metadata: list[dict[str, Any]]
    assembly: str
    warnings: str

    @property
    def waves_per_simd(self) -> list[int]:
        """By kernel, as the registers allow."""
        return [int(number) for number in re.findall(r"^; Occupancy: (\d+)$", self.assembly, flags=re.MULTILINE)]


def build_kernel(kernel: str, arch: str) -> Build:
    return build(device_code.spec(kernel, SHAPE, arch))


def build(spec: jit.Spec) -> Build:
    job = resolve(spec)
    compiler = hip_clang.find_ziglang(spec.arch)
    with tempfile.TemporaryDirectory(prefix="amd-build-") as name:
        folder = Path(name)
        source, output = job.path or folder / f"{spec.name}.hip", folder / "output"
        if job.path is None:
            source.write_text(job.text, encoding="utf-8")
        command = [*compiler.command(job, source, output, folder), "-Wall", "-Wextra", "-save-temps=obj"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        (assembly,) = (file.read_text(encoding="utf-8") for file in folder.glob("*.s"))
        binary = output.read_bytes()
    program = Program(Compiled(spec.arch, binary, annotate(assembly, spec.arch)), base=0)
    return Build(program, program.code_object.metadata["amdhsa.kernels"], assembly, done.stderr)
