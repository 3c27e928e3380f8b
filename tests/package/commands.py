"""Running Python and compilers from tests."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def python(*arguments: str, timeout_s: float = 60, **environment: str) -> subprocess.CompletedProcess[str]:
    """A fresh interpreter, outside the checkout, so that what is imported is what is installed."""
    return subprocess.run(
        [sys.executable, *arguments],
        cwd="/",
        env={**without_mori_variables(), **environment},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def without_mori_variables() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("MORI_")}


def compiler() -> str:
    found = shutil.which(os.environ.get("CXX", "g++"))
    assert found, "no C++ compiler; it also built the extension: set CXX"
    return found


def compile_cxx(source: str, *flags: str) -> subprocess.CompletedProcess[str]:
    """Compiles the text with the flags that all of the core is compiled with."""
    return subprocess.run(
        [compiler(), "-std=c++20", "-Wall", "-Wextra", "-Werror", "-I", str(ROOT / "csrc"), *flags, "-x", "c++", "-"],
        input=source,
        capture_output=True,
        text=True,
        check=False,
    )
