"""What is compiled for an op of some shape, and that the compiler takes it."""

from __future__ import annotations

from pathlib import Path

import pytest

from mori import jit
from mori.ops import device_code
from mori.ops.engine import EpShape

SHAPE = EpShape(
    world_size=8,
    rank=3,
    max_tokens=128,
    hidden_dim=7168,
    max_element_bytes=2,
    scale_dim=0,
    scale_element_bytes=0,
    experts_per_rank=32,
    topk=6,
    max_recv_tokens=1024,
)


def test_the_shape_is_fixed_by_constants() -> None:
    spec = device_code.spec(SHAPE, "sm_90")
    assert dict(spec.constants) == {  # type: ignore[arg-type]
        "MORI_FIXED_WORLD_SIZE": "8",
        "MORI_FIXED_TOPK": "6",
        "MORI_FIXED_EXPERTS_PER_RANK": "32",
        "MORI_FIXED_MAX_TOKENS": "128",
        "MORI_MAY_STAGE": "0",
        "MORI_TRACED": "0",
    }
    assert (spec.target, spec.arch, spec.kernels) == (
        "cuda",
        "sm_90",
        ("mori_dispatch", "mori_combine_f32", "mori_combine_bf16"),
    )


def test_ranks_of_one_op_share_the_code() -> None:
    other = EpShape(**{**vars(SHAPE), "rank": 5})
    assert device_code.spec(SHAPE, "sm_90") == device_code.spec(other, "sm_90")


def test_every_constant_is_one_that_the_sources_know() -> None:
    text = "".join(file.read_text() for file in Path(jit.source_root()).rglob("*.hpp"))
    for name, _ in device_code.spec(SHAPE, "sm_90").constants:  # type: ignore[misc]
        assert f"#ifndef {name}\n" in text


@pytest.mark.parametrize("variable, expected", [("0", "0"), ("1", "1")])
def test_tracing_is_switched_on_by_the_variable(monkeypatch: pytest.MonkeyPatch, variable: str, expected: str) -> None:
    monkeypatch.setenv("ENABLE_PROFILER", variable)
    spec = device_code.spec(SHAPE, "sm_90", traced=device_code.is_traced())
    assert dict(spec.constants)["MORI_TRACED"] == expected  # type: ignore[arg-type]


def test_the_kernels_compile(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MORI_JIT_CACHE_DIR", str(tmp_path))
    try:
        cubin = device_code.kernels(SHAPE, "sm_90")
    except jit.CompilerNotFound as reason:
        pytest.skip(str(reason))
    assert cubin[:4] == b"\x7fELF"
    for kernel in device_code.spec(SHAPE, "sm_90").kernels:
        assert kernel.encode() in cubin
