"""The codecs as NVIDIA's compilers take them, without a GPU; tests/gpu/test_codecs.py runs what they make."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from mori import jit
from mori.jit import nvcc
from mori.jit.toolchain import EXACT_ARITHMETIC, Unavailable
from tests.codecs.conversions import DEVICE_SOURCE, FOLDER


def test_it_compiles(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("MORI_JIT_CACHE_DIR", str(tmp_path))
    try:
        code = jit.compile(jit.Spec("codecs", DEVICE_SOURCE, kernels=("convert",), include_dirs=(FOLDER, ".")))
    except jit.CompilerNotFound as reason:
        pytest.skip(str(reason))
    assert code[:4] == b"\x7fELF"


def test_fp8_is_converted_by_the_hardware(tmp_path: Path):
    try:
        compiler = nvcc.find("sm_90")
    except Unavailable as reason:
        pytest.skip(str(reason))
    source, output = tmp_path / "codecs.cu", tmp_path / "codecs.ptx"
    source.write_text(DEVICE_SOURCE)
    includes = [f"-I{FOLDER}", f"-I{jit.source_root()}"]
    options = ["--ptx", "-std=c++20", "-arch=sm_90", *EXACT_ARITHMETIC, *includes, "-o", str(output)]
    subprocess.run([compiler.path, *options, str(source)], check=True, timeout=120)
    text = output.read_text()
    for instruction in ("cvt.rn.satfinite.e4m3x2.f32", "cvt.rn.f16x2.e4m3x2", "cvt.rn.bf16.f32", "div.rn.f32"):
        assert instruction in text
    for inexact in ("fma.", "div.approx", "div.full", ".ftz"):
        assert inexact not in text
