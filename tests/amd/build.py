"""The kernels as mori.jit builds them, taken apart, with what the compiler says of them."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from mori import archs, jit
from mori.ops import ahead_of_time, device_code
from mori.ops.engine import EpShape
from tests.amd.sim.program import Program
from tests.amd.sim.toolchain import ARCHS, compile_spec

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
    compiled = compile_spec(spec)
    program = Program(compiled, base=0)
    return Build(program, program.code_object.metadata["amdhsa.kernels"], compiled.assembly, compiled.warnings)
