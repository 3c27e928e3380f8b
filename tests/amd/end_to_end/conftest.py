"""The stand-in for the HIP runtime, built once; per arch a folder for code, and ranks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from tests.amd.end_to_end import rank
from tests.amd.end_to_end.pool import SimulatedPool, simulated_pool
from tests.amd.sim.toolchain import ARCHS
from tests.drivers.build import LIBRARIES, build


@pytest.fixture(scope="session")
def variables_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, str]]:
    """By arch: the environment of its ranks."""
    driver = tmp_path_factory.mktemp("driver")
    build(driver, apis=["hip"], executor=())
    return functools.cache(lambda arch: rank.variables(arch, driver / LIBRARIES["hip"], tmp_path_factory.mktemp(arch)))


# gfx950 has the instructions of gfx942, but for conversions, which the guide's example and tests/amd/sim execute.
CALLS_ON = [pytest.param(arch, marks=pytest.mark.full if arch == "gfx950" else ()) for arch in ARCHS]


@pytest.fixture(scope="session", params=CALLS_ON)
def arch(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="session")
def ranks(arch: str, variables_of: Callable[[str], dict[str, str]]) -> Iterator[SimulatedPool]:
    """Two processes that stay for all tests of the arch."""
    with ExitStack() as stack:
        yield stack.enter_context(simulated_pool(**variables_of(arch)))
