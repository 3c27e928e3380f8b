"""The names that programs import, where they import them from, and what importing costs."""

from __future__ import annotations

import importlib
import json

import pytest
import torch

import mori
from tests.package.commands import python

FROM: dict[str, tuple[str, ...]] = {
    "mori": ("__version__", "cpp", "ops", "shmem"),
    "mori.ops": (
        "EpDispatchCombineKernelType",
        "EpDispatchCombineConfig",
        "EpDispatchCombineOp",
        "launch_local_expert_count",
    ),
    "mori.ops.dispatch_combine": (
        "EpDispatchCombineConfig",
        "EpDispatchCombineKernelType",
        "EpDispatchCombineOp",
        "EpDispatchCombineQuantType",
        "EpDispatchRoutingHandle",
        "TOPK_IDX_DTYPE",
        "_DTYPE_SUFFIX",
        "_QUANT_TYPE_MAP",
        "_is_gfx125x",
        "_normalize_quant_type",
        "warmup_jit_kernels",
    ),
    "mori.ops.tuning_config": (
        "CONFIG_STR_TO_DTYPE",
        "CONFIG_STR_TO_SHORT_NAME",
        "DTYPE_TO_CONFIG_STR",
        "LaunchParams",
        "TuningConfigManager",
        "build_config_filename",
        "config_path_for",
        "detect_gpu_model",
        "dtype_to_config_str",
        "kernel_type_to_config_str",
        "quant_type_to_config_str",
    ),
    "mori.tensor_utils": ("GpuTensorView", "dtype_to_int", "from_gpu_ptr", "gpu_tensor_view"),
    "mori.jit.config": ("detect_gpu_arch",),
    "mori.cpp": (
        "EpDispatchCombineConfig",
        "EpDispatchCombineKernelType",
        "EpDispatchCombineQuantType",
        "get_cur_device_wall_clock_freq_mhz",
    ),
    "mori.shmem": (
        "MORI_SHMEM_INIT_WITH_MPI_COMM",
        "MORI_SHMEM_INIT_WITH_UNIQUEID",
        "MoriShmemBuffer",
        "mori_shmem_create_tensor",
        "mori_shmem_create_tensor_list_intra_node",
        "mori_shmem_free_tensor",
        "shmem_barrier_all",
        "shmem_barrier_on_stream",
        "shmem_buffer_deregister",
        "shmem_buffer_register",
        "shmem_ext_malloc_with_flags",
        "shmem_finalize",
        "shmem_free",
        "shmem_get_unique_id",
        "shmem_init_attr",
        "shmem_malloc",
        "shmem_malloc_align",
        "shmem_module_init",
        "shmem_mype",
        "shmem_npes",
        "shmem_num_qp_per_pe",
        "shmem_ptr_p2p",
        "shmem_torch_process_group_init",
        "symm_mori_shmem_tensor",
    ),
}
OUT_OF_SCOPE = ("allocator", "ccl", "ir", "jax")
HEAVY = {"torch", "numpy", "mori._core", "mori.ops", "mori.shmem", "mori.cco", "mori.cpp"}


@pytest.mark.parametrize("module,name", [(module, name) for module, names in FROM.items() for name in names])
def test_name(module: str, name: str):
    found = importlib.import_module(module)
    assert hasattr(found, name), f"from {module} import {name}"


@pytest.mark.parametrize("name", OUT_OF_SCOPE)
def test_what_is_out_of_scope_says_so(name: str):
    with pytest.raises(AttributeError, match=f"'{name}': .{{20}}"):
        getattr(mori, name)


STEPS = ("import mori", "mori.__version__", "mori.cpp", "mori.ops", "mori.shmem")


def test_importing_is_cheap_and_sub_packages_load_when_they_are_named():
    after = "print(json.dumps(sorted(sys.modules)))"
    result = python("-c", "; ".join(["import json, sys", *(f"{step}; {after}" for step in STEPS)]))
    assert result.returncode == 0, result.stderr
    loaded = dict(zip(STEPS, map(set, map(json.loads, result.stdout.splitlines())), strict=True))
    assert not loaded["import mori"] & HEAVY
    assert not loaded["mori.__version__"] & HEAVY
    for name in FROM["mori"][1:]:
        assert f"mori.{name}" in loaded[f"mori.{name}"]


def test_ops_names_are_one_object_wherever_they_come_from():
    from mori import cpp
    from mori.ops import dispatch_combine

    for name in ("EpDispatchCombineConfig", "EpDispatchCombineKernelType", "EpDispatchCombineOp"):
        assert getattr(mori.ops, name) is getattr(dispatch_combine, name)
    for name in ("EpDispatchCombineKernelType", "EpDispatchCombineQuantType"):
        assert getattr(cpp, name) is getattr(dispatch_combine, name)


def test_private_tables_that_tests_of_clients_read():
    from mori.ops import dispatch_combine as v1

    assert v1.TOPK_IDX_DTYPE is torch.int32
    assert v1._DTYPE_SUFFIX == {
        torch.float32: "f32",
        torch.bfloat16: "bf16",
        torch.float8_e4m3fn: "fp8_ocp",
        torch.float8_e4m3fnuz: "fp8_fnuz",
        torch.float4_e2m1fn_x2: "fp4",
    }
    assert sorted(v1._QUANT_TYPE_MAP) == ["fp4_blockwise", "fp8_blockwise", "fp8_direct_cast", "none"]
    assert v1._QUANT_TYPE_MAP["fp4_blockwise"].name == "Fp4BlockwiseQuant"


def test_warm_up_in_the_parent_process():
    from mori.ops.dispatch_combine import _is_gfx125x, warmup_jit_kernels

    assert _is_gfx125x() is False
    for kernel_type in mori.ops.EpDispatchCombineKernelType:
        warmup_jit_kernels(kernel_type)  # nothing to compile on CPUs, compiled code in the cache on GPUs
    with pytest.raises(ValueError, match="99"):
        warmup_jit_kernels(99)  # type: ignore[arg-type]


def test_arch_detection(monkeypatch: pytest.MonkeyPatch):
    from mori.jit.config import detect_gpu_arch

    monkeypatch.setenv("MORI_GPU_ARCHS", "gfx942")
    assert detect_gpu_arch() == "gfx942"
    monkeypatch.setenv("MORI_GPU_ARCHS", "gfx900")
    with pytest.raises(RuntimeError, match="gfx900"):
        detect_gpu_arch()
