"""What a compiler is to the rest of this package, and what all compilers of a target are told."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from mori.jit.job import Job

# Results are bitwise those of the host: a product and a sum are rounded apart, divisions and roots by IEEE 754,
# denormals stay. Most are the compilers' defaults; said here so that they hold whatever a default becomes.
EXACT_ARITHMETIC = ("--fmad=false", "--ftz=false", "--prec-div=true", "--prec-sqrt=true")
EXACT_ARITHMETIC_HIP = (
    "-ffp-contract=off",
    "-fno-fast-math",
    "-fno-gpu-flush-denormals-to-zero",
    "-fhip-fp32-correctly-rounded-divide-sqrt",
)
# Kernels read the size of their grid where this version has it.
CODE_OBJECT_VERSION = "-mcode-object-version=5"


class Unavailable(Exception):
    """Why a compiler of the table cannot be used here."""


class Compiler(Protocol):
    @property
    def identity(self) -> str:
        """Name and exact version: two compilers of the same identity make the same code."""

    def options(self, job: Job) -> list[str]:
        """All options that shape the result; no path, since the contents of files are part of the job's hash."""

    def compile(self, job: Job) -> bytes:
        """The binary. CompileError with options and log when the source is refused."""


def cuda_options(job: Job, version: tuple[int, int]) -> list[str]:
    standard = "c++20" if version >= (12, 0) else "c++17"
    fixed = [f"--gpu-architecture={job.arch}", f"-std={standard}", *EXACT_ARITHMETIC]
    return [*fixed, *job.spec.definitions, *job.flags]


def hip_options(job: Job) -> list[str]:
    fixed = [f"--offload-arch={job.arch}", "-std=c++20", "-O3", *EXACT_ARITHMETIC_HIP, CODE_OBJECT_VERSION]
    return [*fixed, *job.spec.definitions, *job.flags]


def host_options(job: Job) -> list[str]:
    fixed = ["-shared", "-fPIC", "-std=c++20", "-O3", "-ffp-contract=off", "-fvisibility=hidden"]
    return [*fixed, *job.spec.definitions, *job.flags]


def include_options(job: Job) -> list[str]:
    return [f"-I{folder}" for folder in job.include_dirs]
