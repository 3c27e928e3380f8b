"""The codecs, compiled once per instruction set that this CPU has."""

from __future__ import annotations

from pathlib import Path

import pytest

from mori import _core
from tests.codecs.conversions import VARIANTS, HostConversions


def requires_variant(name: str) -> None:
    try:
        _core.host_variant(name)
    except ValueError as reason:
        pytest.skip(str(reason))


@pytest.fixture(scope="session", params=VARIANTS)
def convert(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> HostConversions:
    requires_variant(request.param)
    return HostConversions(tmp_path_factory.mktemp("codecs"), request.param)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("codecs")
