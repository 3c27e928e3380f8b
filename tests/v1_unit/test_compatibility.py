"""Names that programs written for other releases import, and what they may expect of them here."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

import mori
from mori import jit, target, tensor_utils
from mori.ops import device_code, dispatch_combine, kernels
from mori.ops.config import check_config
from mori.ops.construction import shape_of
from mori.ops.dispatch_combine import warmup_jit_kernels
from mori.tensor_utils import GpuTensorView

from .test_config import KernelType, make_config

# ---- native names


def test_native_enums_export_their_values():
    for kind in (mori.cpp.EpDispatchCombineKernelType, mori.cpp.EpDispatchCombineQuantType):
        for name, member in kind.__members__.items():
            assert getattr(mori.cpp, name) is member
            assert (member.name, int(member)) == (name, member.value)


def test_every_field_of_the_native_config_is_optional_and_writable():
    native = mori.cpp.EpDispatchCombineConfig()
    for place, field in enumerate(dataclasses.fields(native), start=1):
        setattr(native, field.name, place)
    assert native.to_packed_array() == [1, *range(1, 20)]


def test_native_sizes_follow_the_cap():
    native = mori.cpp.EpDispatchCombineConfig(world_size=4, max_num_inp_token_per_rank=10)
    assert (native.max_num_tokens_to_send_per_rank(), native.max_num_tokens_to_send()) == (10, 40)
    for cap, per_rank in ((0, 10), (-1, 10), (1, 1), (9, 3), (1000, 10)):
        native.max_total_recv_tokens = cap
        assert (native.max_num_tokens_to_recv_per_rank(), native.max_num_tokens_to_recv()) == (per_rank, 4 * per_rank)


# ---- raw memory as tensors


def test_a_view_of_host_memory_goes_through_dlpack_only():
    memory = torch.arange(6, dtype=torch.float32)
    view = GpuTensorView(memory.data_ptr(), (2, 3), torch.float32)
    shared = torch.from_dlpack(view)
    shared[1, 2] = 50
    assert memory[5] == 50
    assert numpy.from_dlpack(view).shape == (2, 3)
    assert not hasattr(view, "__cuda_array_interface__")
    with pytest.raises(AttributeError, match="use DLPack"):
        _ = view.__cuda_array_interface__


@pytest.mark.parametrize(
    "dtype, typestr",
    [
        (torch.float32, "<f4"),
        (torch.int32, "<i4"),
        (torch.uint8, "|u1"),
        (torch.bfloat16, "<u2"),
        (torch.float8_e4m3fn, "|u1"),
    ],
)
def test_a_view_of_gpu_memory_has_the_array_interface(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, typestr: str
):
    # "meta" stands in for the memory of a GPU: all that matters is that it is not the host's.
    monkeypatch.setattr(tensor_utils, "from_gpu_ptr", lambda ptr, shape, dtype: torch.empty(shape, device="meta"))
    interface = GpuTensorView(4096, [2, 3], dtype).__cuda_array_interface__
    assert interface == {"shape": (2, 3), "typestr": typestr, "data": (4096, False), "version": 2}


# ---- compiling ahead


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[jit.Spec]:
    """What is compiled, on a machine that seems to have a GPU."""
    specs: list[jit.Spec] = []

    def compile(spec: jit.Spec) -> bytes:
        specs.append(spec)
        return b""

    monkeypatch.setattr(jit, "compile", compile)
    monkeypatch.setattr(target, "current", lambda: target.TARGETS["cuda"])
    return specs


def test_warm_up_compiles_what_ops_of_that_config_run(compiled: list[jit.Spec], monkeypatch: pytest.MonkeyPatch):
    for path in ("direct", "auto"):
        monkeypatch.setenv("MORI_EP_PATH", path)
        config = make_config(rank=3, num_experts_per_token=6)
        warmup_jit_kernels(KernelType.IntraNode, config)
        # Every rank of the op finds them.
        for rank in range(2):
            shape = shape_of(dataclasses.replace(config, rank=rank), check_config(config))
            assert compiled == [device_code.spec(name, shape, "sm_90") for name in ("dispatch", "combine_bf16")]
        assert dict(compiled[0].constants)["MORI_SHAPE_TOPK"] == "6"  # type: ignore[arg-type]
        compiled.clear()


@pytest.mark.parametrize("kernel_type", list(KernelType))
def test_without_a_config_there_is_nothing_to_compile(compiled: list[jit.Spec], kernel_type: KernelType):
    warmup_jit_kernels(kernel_type)
    assert compiled == []


def test_warm_up_refuses_what_no_op_can_have(compiled: list[jit.Spec]):
    with pytest.raises(ValueError, match="unknown kernel_type 17"):
        warmup_jit_kernels(17)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="hidden_dim"):
        warmup_jit_kernels(KernelType.IntraNode, make_config(hidden_dim=0))
    assert compiled == []


def test_warm_up_on_the_host_is_silent(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], recwarn: pytest.WarningsRecorder, tmp_path: Path
):
    monkeypatch.setenv("MORI_TARGET", "host")
    monkeypatch.setenv("MORI_JIT_CACHE_DIR", str(tmp_path / "cache"))

    def compile(spec: Any) -> bytes:
        raise AssertionError("nothing is to be compiled")

    monkeypatch.setattr(jit, "compile", compile)
    for kernel_type in KernelType:
        warmup_jit_kernels(kernel_type)
        warmup_jit_kernels(kernel_type, make_config())
    with pytest.raises(ValueError, match="unknown kernel_type"):
        warmup_jit_kernels("IntraNode")  # type: ignore[arg-type]
    assert capfd.readouterr() == ("", "") and not recwarn.list and not (tmp_path / "cache").exists()


def test_gfx125x_is_asked_of_the_op_module(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MORI_GPU_ARCHS", "gfx1250")
    assert dispatch_combine._is_gfx125x() is True


@pytest.mark.parametrize(
    ("changes", "columns", "weighted", "suffix"),
    [
        ({}, 7168, False, "_noweight_block128_vec8"),
        ({"num_experts_per_token": 9}, 7168, False, "_noweight_block128_vec8_top9"),
        ({"num_experts_per_token": 7}, 7168, False, ""),
        ({"world_size": 4}, 7168, False, ""),
        ({}, 7168, True, ""),
        ({}, 7000, False, ""),
        ({}, 3584, False, ""),
    ],
)
def test_blockwise_combines_are_called_what_releases_call_them(
    changes: dict[str, int], columns: int, weighted: bool, suffix: str
):
    sizes = {"world_size": 8, "gpu_per_node": 8, "hidden_dim": 7168, "num_experts_per_token": 8}
    limits = check_config(make_config(**(sizes | {"quant_type": "fp8_blockwise"} | changes)))
    name = kernels.released_name(limits, columns, 56, weighted)
    assert name == f"EpCombineIntraNodeKernel_bf16_nop2p_fp8_blockwise{suffix}"
