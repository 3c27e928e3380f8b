"""One wave per arch to execute instructions on; in the end the assembler is asked whether all of them exist."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from tests.amd.sim.bench import Bench
from tests.amd.sim.toolchain import ARCHS, annotate


@pytest.fixture(scope="session")
def executed() -> Iterator[dict[str, set[str]]]:
    """Texts of instructions by arch. The teardown fails if one is not accepted by the assembler."""
    texts: dict[str, set[str]] = {arch: set() for arch in ARCHS}
    yield texts
    for arch, lines in texts.items():
        try:
            annotate("\n".join([*sorted(lines), ""]), arch)
        except RuntimeError as error:
            wrong = [sorted(lines)[int(number) - 1] for number in re.findall(r"given\.s:(\d+):\d+: error", str(error))]
            pytest.fail(f"{arch} has no {wrong}")


@pytest.fixture(params=ARCHS)
def arch(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def bench(arch: str, executed: dict[str, set[str]]) -> Bench:
    return Bench(arch, executed=executed[arch])


@pytest.fixture(params=("gfx942", "gfx950"))
def gfx9(request: pytest.FixtureRequest, executed: dict[str, set[str]]) -> Bench:
    return Bench(request.param, executed=executed[request.param])


@pytest.fixture
def gfx12(executed: dict[str, set[str]]) -> Bench:
    return Bench("gfx1250", executed=executed["gfx1250"])
