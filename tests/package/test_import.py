"""import mori: cheap, lazy, and clear about what is not there."""

from __future__ import annotations

import importlib.metadata
import json

import pytest

import mori
from tests.package.commands import python


def test_importing_loads_nothing_heavy() -> None:
    result = python("-c", "import json, sys, mori; print(json.dumps(sorted(sys.modules)))")
    assert result.returncode == 0, result.stderr
    loaded = set(json.loads(result.stdout))
    assert not loaded & {"torch", "numpy", "typer", "rich", "mori._core", "mori.ops", "mori.shmem", "mori.cco"}
    assert len(loaded) < 120, sorted(loaded)


def test_the_command_line_help_loads_no_torch() -> None:
    result = python("-X", "importtime", "-m", "mori", "--help")
    assert result.returncode == 0, result.stderr
    assert "demo" in result.stdout
    assert not any(line.split("|")[-1].strip() == "torch" for line in result.stderr.splitlines())


@pytest.mark.parametrize("name", mori.__all__)
def test_every_public_name_resolves(name: str) -> None:
    assert getattr(mori, name) is not None
    assert name in dir(mori)


def test_exceptions_are_those_of_the_errors_module() -> None:
    assert mori.PeerLost is mori.errors.PeerLost
    defined = {name for name, kind in vars(mori.errors).items() if getattr(kind, "__module__", "") == "mori.errors"}
    assert defined == set(mori._EXCEPTIONS)


def test_version_is_that_of_the_distribution() -> None:
    assert mori.__version__ == importlib.metadata.version("mori-ep")


def test_io_says_that_it_is_out_of_scope() -> None:
    with pytest.raises(ImportError, match="out of scope.*BUILD_IO"):
        _ = mori.io


def test_absent_names_say_why() -> None:
    with pytest.raises(AttributeError, match="no JAX binding"):
        _ = mori.jax
    with pytest.raises(AttributeError, match="'nonsense'"):
        _ = mori.nonsense


def test_an_unknown_variable_warns_with_the_nearest_name() -> None:
    result = python("-c", "import mori", MORI_SHMEM_HEAP_SIZ="1G")
    assert result.returncode == 0
    assert "MORI_SHMEM_HEAP_SIZ is not known" in result.stderr
    assert "MORI_SHMEM_HEAP_SIZE?" in result.stderr
