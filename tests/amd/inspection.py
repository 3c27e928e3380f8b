"""Builds a kernel and inspects it: what a test compares, small enough to come from another process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from typing import NamedTuple

from tests.amd.build import Build, build_kernel
from tests.amd.checks import (
    CHECKS,
    Subject,
    changes_memory,
    is_invalidation,
    is_load,
    is_nontemporal,
    is_system_wide,
    is_write_back,
)
from tests.amd.sim.program import Instruction


class Report(NamedTuple):
    findings: list[str]
    resources: dict[str, int]


def inspect_kernel(kernel: str, arch: str) -> Report:
    return report(kernel, build_kernel(kernel, arch))


def report(kernel: str, built: Build) -> Report:
    subject = Subject(kernel, built.program)
    findings = [f"{check.__name__}: {finding}" for check in CHECKS for finding in check(subject)]
    return Report([*build_findings(built), *findings], resources_of(subject, built))


def build_findings(built: Build) -> Iterator[str]:
    if built.warnings:
        yield f"warnings: {built.warnings}"
    for kernel, fact in product(built.metadata, (".private_segment_fixed_size", ".vgpr_spill_count")):
        if kernel[fact] or kernel[".uses_dynamic_stack"]:
            yield f"scratch memory: {fact[1:]} is {kernel[fact]}, uses_dynamic_stack {kernel['.uses_dynamic_stack']}"


def resources_of(subject: Subject, built: Build) -> dict[str, int]:
    """The row of the table. `sgprs_in_lanes` were spilled into lanes of a vector register: no memory is involved.
    `lds_bytes` does not count what a launch adds."""

    (metadata,), (waves,) = built.metadata, built.waves_per_simd

    def count(*conditions: Callable[[Instruction], bool]) -> int:
        return len(subject.all(lambda one: all(condition(one) for condition in conditions)))

    return {
        "vgprs": metadata[".vgpr_count"],
        "sgprs": metadata[".sgpr_count"],
        "sgprs_in_lanes": metadata[".sgpr_spill_count"],
        "lds_bytes": metadata[".group_segment_fixed_size"],
        "waves_per_simd": waves,
        "write_backs": count(is_write_back),
        "invalidations": count(is_invalidation),
        "system_loads": count(is_load, is_system_wide),
        "system_stores": count(changes_memory, is_system_wide),
        "row_loads": count(is_load, is_nontemporal),
        "row_stores": count(changes_memory, is_nontemporal),
    }
