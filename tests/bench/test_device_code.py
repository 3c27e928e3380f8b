"""The kernels that benchmarks and GPU tests bring along compile; this needs a compiler but no GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import link_limit
from mori import jit
from mori.jit import elf
from tests.gpu import occupy


@pytest.mark.parametrize("source,symbol", [(link_limit.SOURCE, "copy_words"), (occupy.SOURCE, "occupy")])
def test_kernels_compile(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, source: str, symbol: str):
    monkeypatch.setenv("MORI_JIT_CACHE_DIR", str(tmp_path / "cache"))
    try:
        binary = jit.compile(jit.Spec(symbol, source=source, kernels=(symbol,), arch="sm_90"))
    except jit.CompilerNotFound as reason:
        pytest.skip(str(reason))
    assert elf.cuda_kernels(binary) == {symbol}
