"""What is compiled for an op of some shape, and that the compiler takes it."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from mori import archs, jit
from mori.ops import device_code
from mori.ops.engine import KERNELS, EpShape

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


NAME = "combine_bf16"


def test_the_shape_is_fixed_by_constants() -> None:
    spec = device_code.spec(NAME, SHAPE, "sm_90")
    constants = dict(spec.constants)  # type: ignore[arg-type]
    assert (constants.pop("MORI_KERNEL"), constants.pop("MORI_TRACED")) == (NAME, "0")
    shape = {name.removeprefix("MORI_SHAPE_").lower(): int(value) for name, value in constants.items()}
    assert shape == {name: int(value) for name, value in vars(SHAPE).items() if name != "rank"}
    assert (spec.target, spec.arch, spec.kernels) == ("cuda", "sm_90", ("mori_combine_bf16",))


def test_ranks_of_one_op_share_the_code() -> None:
    other = EpShape(**{**vars(SHAPE), "rank": 5})
    assert device_code.spec(NAME, SHAPE, "sm_90") == device_code.spec(NAME, other, "sm_90")


def test_every_constant_is_one_that_the_sources_know() -> None:
    root = Path(jit.source_root())
    text = "".join(file.read_text() for pattern in ("*.hpp", "*.cu") for file in root.rglob(pattern))
    for name, _ in device_code.spec(NAME, SHAPE, "sm_90").constants:  # type: ignore[misc]
        assert re.search(rf"\b{name}\b", text), name


@pytest.mark.parametrize("variable, expected", [("0", "0"), ("1", "1")])
def test_tracing_is_switched_on_by_the_variable(monkeypatch: pytest.MonkeyPatch, variable: str, expected: str) -> None:
    monkeypatch.setenv("ENABLE_PROFILER", variable)
    spec = device_code.spec(NAME, SHAPE, "sm_90", traced=device_code.is_traced())
    assert dict(spec.constants)["MORI_TRACED"] == expected  # type: ignore[arg-type]


@pytest.mark.parametrize("name", [name for name in KERNELS if archs.runs_on(name, archs.find("sm_90"))])
def test_every_kernel_compiles(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str) -> None:
    monkeypatch.setenv("MORI_JIT_CACHE_DIR", str(tmp_path))
    shape = replace(SHAPE, may_stage=True, block_scales=56)
    try:
        cubin = device_code.kernel(name, shape, "sm_90")
    except jit.CompilerNotFound as reason:
        pytest.skip(str(reason))
    assert cubin[:4] == b"\x7fELF"
    assert f"mori_{name}".encode() in cubin


def test_arithmetic_that_a_gpu_does_not_have_is_refused() -> None:
    with pytest.raises(TypeError, match="sm_90 cannot run combine_fp8_fnuz: it adds up fp8 of flavour ocp, and fp4"):
        device_code.kernel("combine_fp8_fnuz", SHAPE, "sm_90")
    with pytest.raises(TypeError, match="gfx942 cannot run combine_fp4: it adds up fp8 of flavour fnuz, and no fp4"):
        device_code.kernel("combine_fp4", SHAPE, "gfx942")
