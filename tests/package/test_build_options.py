"""The table of build options as CMake executes it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import cmake
import pytest

from tests.package.commands import ROOT

GUIDE = "BUILD_OPS BUILD_SHMEM BUILD_IO BUILD_PYBINDS ENABLE_PROFILER ENABLE_STANDARD_MOE_ADAPT".split() + (
    "ENABLE_DEBUG_PRINTF USE_ROCM USE_BNXT USE_IONIC".split()
)


def evaluate(*definitions: str, **environment: str) -> subprocess.CompletedProcess[str]:
    script = Path(__file__).with_name("print_options.cmake")
    return subprocess.run(
        [Path(cmake.CMAKE_BIN_DIR) / "cmake", *definitions, f"-DROOT={ROOT}", "-P", script],
        env={**{k: v for k, v in os.environ.items() if k not in GUIDE}, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("name", GUIDE)
@pytest.mark.parametrize("as_variable", [True, False])
def test_an_option_without_effect_gives_a_notice_and_is_recorded(name: str, as_variable: bool) -> None:
    result = evaluate(**{name: "off"}) if as_variable else evaluate(f"-D{name}=off")
    assert result.returncode == 0, result.stderr
    assert f"mori: {name}=OFF changes nothing in this build" in result.stderr
    assert f'given: {{"{name}": "OFF"}}' in result.stderr


def test_nothing_is_said_when_nothing_is_given() -> None:
    result = evaluate()
    assert result.returncode == 0, result.stderr
    assert "changes nothing" not in result.stderr
    assert "simd: ON werror: OFF" in result.stderr


def test_a_definition_wins_over_a_variable() -> None:
    assert "simd: OFF" in evaluate("-DMORI_HOST_SIMD=0", MORI_HOST_SIMD="1").stderr


def test_a_value_that_is_neither_on_nor_off_is_an_error() -> None:
    result = evaluate(BUILD_OPS="maybe")
    assert result.returncode != 0
    assert "BUILD_OPS=maybe is not valid: expected ON or OFF" in result.stderr
