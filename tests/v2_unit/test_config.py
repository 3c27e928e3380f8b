"""The config of v2: fields, the sizes that follow, roundings by arch. What is refused is in test_restrictions.py."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

import mori
from mori import target
from mori.ops.dispatch_combine_v2 import EpDispatchCombineConfig
from mori.ops.dispatch_combine_v2.config import backend_of

from .configs import FIELDS, make_config

BF16, F32 = torch.bfloat16, torch.float32
FP8, FNUZ, FP4 = torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float4_e2m1fn_x2
ARCHS = ("gfx942", "gfx950", "gfx1250", "sm_90", "host")
NARROW = ("gfx1250", "sm_90")  # waves of 32

OPTIONAL = [
    ("data_type", BF16),
    ("dispatch_data_type", None),
    ("combine_data_type", None),
    ("scale_dim", 0),
    ("scale_type_size", 0),
    ("combine_mode", "gather"),
    ("quant_type", "none"),
    ("dispatch_block_num", None),
    ("combine_block_num", None),
    ("warp_num_per_block", None),
    ("combine_warp_num_per_block", None),
    ("schedule", None),
    ("enable_std_moe", False),
    ("max_total_recv_tokens", 0),
    ("gpu_per_node", None),
    ("num_qp_per_pe", 2),
    ("max_token_type_size", None),
    ("dispatch_rdma_block_num", None),
    ("combine_rdma_block_num", None),
    ("internode_kernel", "auto"),
    ("internode_auto_ll_max_tokens", 512),
    ("kernel_backend", None),
]


def test_fields_keep_their_order_and_defaults():
    fields = dataclasses.fields(EpDispatchCombineConfig)
    assert [field.name for field in fields[: len(FIELDS)]] == list(FIELDS)
    assert [(field.name, field.default) for field in fields[len(FIELDS) :]] == OPTIONAL


def test_the_package_is_found_without_naming_it_in_an_import():
    assert mori.ops.dispatch_combine_v2.EpDispatchCombineConfig is EpDispatchCombineConfig
    with pytest.raises(AttributeError, match="no attribute 'dispatch_combine_v3'"):
        _ = mori.ops.dispatch_combine_v3


def test_what_was_left_open_is_filled_in():
    config = make_config(dispatch_data_type=FP8, combine_data_type=BF16)
    assert (config.gpu_per_node, config.nodes, config.is_internode) == (8, 1, False)
    assert config.max_token_type_size == 2
    assert make_config(quant_type="fp8_direct_cast").combine_mode == "scatter"


@pytest.mark.parametrize("arch", ARCHS)
def test_only_between_nodes_the_tokens_are_rounded_up_to_the_wave_of_the_arch(arch: str):
    with target.assume(arch):
        assert make_config().max_num_inp_token_per_rank == 100
        config = make_config(gpu_per_node=4, max_num_inp_token_per_rank=65)
        tokens = 96 if arch in NARROW else 128
        assert config.max_num_inp_token_per_rank == tokens
        assert (config.nodes, config.is_internode, config.max_recv) == (2, True, 8 * tokens)


# dtypes of dispatch and combine: row bytes of each, element bytes of each, key of the hip and of the flydsl tables
DTYPES: dict[str, tuple[tuple[torch.dtype, torch.dtype], tuple[int, int, int, int], tuple[str, str]]] = {
    "bf16": ((BF16, BF16), (14336, 14336, 2, 2), ("bf16", "bf16")),
    "f32": ((F32, F32), (28672, 28672, 4, 4), ("bf16", "bf16")),
    "fp8": ((FP8, FP8), (7168, 7168, 1, 1), ("fp8", "fp8")),
    "fp8 to bf16": ((FP8, BF16), (7168, 14336, 1, 2), ("fp8", "fp8")),
    "fnuz to f32": ((FNUZ, F32), (7168, 28672, 1, 4), ("fp8", "fp8")),
    "fp4": ((FP4, FP4), (3584, 3584, 1, 1), ("fp4", "fp4")),
    "fp4 to bf16": ((FP4, BF16), (3584, 14336, 1, 2), ("fp4", "fp4_disp_bf16_comb")),
}


@pytest.mark.parametrize("name", DTYPES)
def test_sizes_follow_from_the_dtypes(name: str):
    (dispatch, combine), sizes, keys = DTYPES[name]
    config = make_config(dispatch_data_type=dispatch, combine_data_type=combine)
    got = config.token_nbytes, config.combine_token_nbytes, config.elem_size, config.combine_elem_size
    assert got == sizes
    assert (config.dispatch_dtype_str, config.dtype_str) == keys
    assert (config.is_fp8, config.is_fp4) == (keys[0] == "fp8", keys[0] == "fp4")
    assert config.is_asymmetric_dtype == (dispatch != combine)
    assert config.max_token_type_size == max(sizes[2:])


@pytest.mark.parametrize(
    "quant_type, scales, element_bytes",
    [("none", 0, 2), ("fp8_direct_cast", 0, 1), ("fp8_blockwise", 56, 1), ("fp4_blockwise", 0, 2)],
)
def test_wire_of_a_quantised_combine(quant_type: str, scales: int, element_bytes: int):
    config = make_config(quant_type=quant_type)
    assert (config.combine_scale_dim, config.wire_elem_size) == (scales, element_bytes)
    assert config.is_scatter == (quant_type != "none")
    assert (config.fp8_direct_cast, config.fp8_blockwise) == (
        quant_type == "fp8_direct_cast",
        quant_type == "fp8_blockwise",
    )


@pytest.mark.parametrize("cap, per_rank", [(0, 100), (-1, 100), (1, 1), (8, 1), (9, 2), (800, 100), (10**6, 100)])
def test_receive_cap(cap: int, per_rank: int):
    config = make_config(max_total_recv_tokens=cap)
    assert (config.effective_max_recv_per_rank, config.effective_max_recv) == (per_rank, 8 * per_rank)
    assert config.max_recv == 800


@pytest.mark.parametrize("arch", ARCHS)
def test_the_default_backend_depends_on_the_target_only(arch: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("MORI_V2_KERNEL_BACKEND", raising=False)
    with target.assume(arch):
        assert backend_of(make_config()) == ("flydsl" if arch.startswith("gfx") else "hip")
        monkeypatch.setenv("MORI_V2_KERNEL_BACKEND", "theirs")
        assert backend_of(make_config()) == "theirs"
        assert backend_of(make_config(kernel_backend="hip")) == "hip"


def test_a_target_is_assumed_for_a_while_and_needs_no_gpu(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MORI_TARGET", "host")
    with target.assume("gfx1250"), target.assume("sm_100a") as inner:
        assert (inner.name, inner.arch, inner.contract_wave) == ("cuda", "sm_100a", 32)
        assert target.current() == inner
    assert target.current().name == "host"
    with pytest.raises(ValueError, match="gfx90a"), target.assume("gfx90a"):
        pass


def test_configs_are_equal_by_their_fields():
    assert make_config() == make_config()
    other: dict[str, Any] = dataclasses.asdict(make_config()) | {"rank": 1}
    assert EpDispatchCombineConfig(**other) != make_config()
