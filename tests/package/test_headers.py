"""Device code is compiled by several compilers, at run time, with nothing installed: so it has to stand alone."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.package.commands import ROOT, compile_cxx

CSRC = ROOT / "csrc"
FOLDERS = ("device", "include/mori", "kernels", "layout")
HEADERS = sorted(path for folder in FOLDERS for path in (CSRC / folder).glob("*.hpp"))
# A target's own header is written in the language of its compiler.
FOR_ANY_COMPILER = [path for path in HEADERS if not path.name.startswith(("target_cuda", "target_hip"))]
# Comes with the compiler, declares nothing but instructions.
INTRINSICS = {("device/target_host.hpp", "immintrin.h")}
NAMES = [str(header.relative_to(CSRC)) for header in FOR_ANY_COMPILER]


@pytest.mark.parametrize("name", NAMES)
def test_a_header_compiles_alone(name: str) -> None:
    result = compile_cxx(f'#include "{name}"\n', "-fsyntax-only")
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("name", NAMES)
def test_a_header_includes_only_its_own_kind(name: str) -> None:
    for line in (CSRC / name).read_text().splitlines():
        if found := re.match(r'\s*#\s*include\s+([<"])([^>"]+)[>"]', line):
            bracket, target = found.groups()
            if (name, target) in INTRINSICS:
                continue
            assert bracket == '"', f"{name}: {line}"
            resolved = ((CSRC / name).parent / target).resolve()
            assert resolved in HEADERS, f"{name}: {line}"


@pytest.mark.parametrize(
    "variant, flags", [("baseline", ()), ("avx2", ("-march=x86-64-v3",)), ("avx512", ("-march=x86-64-v4",))]
)
def test_simd_variants_share_no_inline_function(variant: str, flags: tuple[str, ...], tmp_path: Path) -> None:
    """The linker keeps one copy of a weak symbol; were it built for a newer CPU, an older one would die of it."""
    if flags and compile_cxx("int i;\n", *flags, "-fsyntax-only").returncode != 0:
        pytest.skip("this compiler builds for another architecture")
    output = tmp_path / "variant.o"
    source = '#include "runtime/host_variant.cpp"\n'
    result = compile_cxx(source, f"-DMORI_VARIANT={variant}", "-O3", *flags, "-c", "-o", str(output))
    assert result.returncode == 0, result.stderr
    listing = subprocess.run(["nm", "-C", "--defined-only", output], capture_output=True, text=True, check=True).stdout
    symbols = [line.split(" ", 2)[1:] for line in listing.splitlines()]
    assert symbols
    weak = [name for kind, name in symbols if kind in "WVu" and not name.startswith("DW.ref.")]  # a pointer, no code
    shared = [name for name in weak if f"{variant}::" not in name]
    assert shared == []
