"""`python -m mori.jit`."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from mori import jit
from mori.jit.__main__ import app
from tests.jit.fake_compiler import FakeCompiler
from tests.package.commands import python


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == 0
    return result.output


def test_it_runs_as_a_module(cache_folder: Path) -> None:
    result = python("-m", "mori.jit", "path", MORI_JIT_CACHE_DIR=str(cache_folder))
    assert (result.stdout, result.stderr) == (f"{cache_folder}\n", "")
    assert not cache_folder.exists()


def test_entries_are_listed_and_cleared(fake: FakeCompiler, cache_folder: Path) -> None:
    assert run("list") == ""
    jit.compile(jit.Spec("add", "kernel add", arch="sm_100"))
    jit.compile(jit.Spec("sub", "kernel sub"))
    lines = run("list").splitlines()
    assert len(lines) == 2
    (add,) = [line for line in lines if "  add  sm_100  20  " in line]
    assert add.endswith("Z  fake 1.0")
    for binary in cache_folder.glob(f"{add[:12]}*.code"):
        os.truncate(binary, 0)
    assert f"{add[:12]}  damaged; it will be compiled anew" in run("list").splitlines()
    assert run("clear") == "removed 2 entries\n"
    assert list(cache_folder.iterdir()) == []


def test_an_unfit_folder_is_a_failure(cache_folder: Path) -> None:
    cache_folder.write_text("")
    with pytest.warns(jit.CacheWarning, match="no folder"):
        assert CliRunner().invoke(app, ["list"]).exit_code == 1
