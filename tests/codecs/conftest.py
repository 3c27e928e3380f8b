"""The codecs, compiled once per instruction set that this CPU has."""

from __future__ import annotations

from pathlib import Path

import pytest

from mori import _core
from tests.codecs.conversions import VARIANTS, HostConversions


def this_cpu_has(variant: str) -> bool:
    try:
        _core.host_variant(variant)
    except ValueError:
        return False
    return True


@pytest.fixture(scope="session", params=filter(this_cpu_has, VARIANTS))
def convert(request: pytest.FixtureRequest, folder: Path) -> HostConversions:
    return HostConversions(folder, request.param)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("codecs")
