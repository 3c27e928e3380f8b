"""Every kernel for every arch: compiles without a warning, keeps out of scratch memory, does what checks.py asks."""

from __future__ import annotations

import pytest

from tests.amd.build import ARCHS, BUILDS, KERNELS
from tests.amd.inspection import Report
from tests.amd.resources import committed, inspect_all


@pytest.fixture(scope="module")
def reports() -> dict[tuple[str, str], Report]:
    return inspect_all()


def test_every_kernel_is_built_for_some_arch() -> None:
    assert {kernel for kernel, _ in BUILDS} == set(KERNELS)
    assert {arch for _, arch in BUILDS} == set(ARCHS)


@pytest.mark.parametrize("kernel, arch", BUILDS)
def test_nothing_is_found(kernel: str, arch: str, reports: dict[tuple[str, str], Report]) -> None:
    assert reports[kernel, arch].findings == []


@pytest.mark.parametrize("kernel, arch", BUILDS)
def test_it_takes_what_the_table_says(kernel: str, arch: str, reports: dict[tuple[str, str], Report]) -> None:
    expected = committed().get(arch, {}).get(kernel)
    assert reports[kernel, arch].resources == expected, "python -m tests.amd.resources prints the table anew"


def test_the_table_has_no_other_kernels() -> None:
    listed = {(kernel, arch) for arch, kernels in committed().items() for kernel in kernels}
    assert listed == set(BUILDS)
