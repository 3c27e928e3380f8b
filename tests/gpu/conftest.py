"""What all GPU tests share: the ranks, and a seed per test that ends up in the results file."""

from __future__ import annotations

import zlib
from collections.abc import Callable

import pytest

from tests.gpu.ranks import GpuPool, gpu_pool, world_size


@pytest.fixture
def gpus() -> GpuPool:
    """The shared ranks, one per GPU."""
    return gpu_pool()


@pytest.fixture
def world() -> int:
    return world_size()


@pytest.fixture
def seed(request: pytest.FixtureRequest, record_property: Callable[[str, object], None]) -> int:
    """A number that belongs to the test's name, so that every run draws the same data."""
    value = zlib.crc32(request.node.nodeid.encode()) & 0x7FFFFFFF
    record_property("seed", value)
    return value
