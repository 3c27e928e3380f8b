"""Kernels that tests compile stay in a folder of the test run."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="session", autouse=True)
def kernel_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("kernels")
    former = os.environ.get("MORI_JIT_CACHE_DIR")
    os.environ["MORI_JIT_CACHE_DIR"] = str(folder)
    yield folder
    if former is None:
        del os.environ["MORI_JIT_CACHE_DIR"]
    else:
        os.environ["MORI_JIT_CACHE_DIR"] = former
