"""Every test here has an empty cache, no variables of the machine it runs on, and a compiler that needs nothing."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mori import jit
from mori.jit import cache, compilers
from tests.jit.fake_compiler import FakeCompiler


@pytest.fixture(autouse=True)
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in [name for name in os.environ if name.startswith("MORI_")]:
        monkeypatch.delenv(name)
    folder = tmp_path / "cache"
    monkeypatch.setenv("MORI_JIT_CACHE_DIR", str(folder))
    monkeypatch.setattr(cache, "_warned", set())
    jit.forget()
    return folder


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeCompiler:
    """The only compiler there is."""
    compiler = FakeCompiler(tmp_path / "calls")
    monkeypatch.setattr(compilers, "COMPILERS", [compiler.row()])
    return compiler
