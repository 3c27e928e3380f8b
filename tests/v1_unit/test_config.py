"""The config: fields that programs rely on, sizes that follow, and what is refused with which words."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

import mori
from mori.ops.config import agreed_fields, check_config

KernelType = mori.ops.EpDispatchCombineKernelType


def make_config(**changes: Any) -> mori.ops.EpDispatchCombineConfig:
    fields = {
        "data_type": torch.bfloat16,
        "rank": 0,
        "world_size": 8,
        "hidden_dim": 7168,
        "scale_dim": 0,
        "scale_type_size": 1,
        "max_token_type_size": 4,
        "max_num_inp_token_per_rank": 4096,
        "num_experts_per_rank": 32,
        "num_experts_per_token": 8,
    }
    return mori.ops.EpDispatchCombineConfig(**(fields | changes))


def test_fields_keep_their_order_and_defaults():
    fields = dataclasses.fields(mori.ops.EpDispatchCombineConfig)
    required = [field.name for field in fields if field.default is dataclasses.MISSING]
    assert required == [
        "data_type",
        "rank",
        "world_size",
        "hidden_dim",
        "scale_dim",
        "scale_type_size",
        "max_token_type_size",
        "max_num_inp_token_per_rank",
        "num_experts_per_rank",
        "num_experts_per_token",
    ]
    optional = [(field.name, field.default) for field in fields if field.default is not dataclasses.MISSING]
    assert optional == [
        ("warp_num_per_block", 8),
        ("block_num", 80),
        ("max_total_recv_tokens", 0),
        ("use_external_inp_buf", True),
        ("kernel_type", KernelType.IntraNode),
        ("gpu_per_node", 8),
        ("rdma_block_num", 0),
        ("num_qp_per_pe", 1),
        ("quant_type", "none"),
    ]


def test_the_config_is_mutable_and_unchecked():
    config = make_config(rank=99)
    config.hidden_dim = -1
    assert (config.rank, config.hidden_dim) == (99, -1)


@pytest.mark.parametrize(
    ("cap", "rows"),
    [(0, 8 * 4096), (-1, 8 * 4096), (1, 8), (8, 8), (9, 16), (8 * 4096, 8 * 4096), (10**6, 8 * 4096)],
)
def test_receive_cap_is_rounded_up_to_the_world_and_never_above_all_tokens(cap: int, rows: int):
    assert check_config(make_config(max_total_recv_tokens=cap)).receive_rows == rows
    native = mori.cpp.EpDispatchCombineConfig(world_size=8, max_num_inp_token_per_rank=4096, max_total_recv_tokens=cap)
    assert (native.max_num_tokens_to_recv(), native.max_num_tokens_to_recv_per_rank()) == (rows, rows // 8)


@pytest.mark.parametrize(("scale_dim", "scale_type_size", "columns"), [(56, 4, 56), (0, 4, 0), (56, 0, 0)])
def test_either_zero_switches_scales_off(scale_dim: int, scale_type_size: int, columns: int):
    limits = check_config(make_config(scale_dim=scale_dim, scale_type_size=scale_type_size))
    assert limits.scale_dim == columns


@pytest.mark.parametrize(("world_size", "given", "effective"), [(2, 8, 2), (3, 8, 3), (8, 4, 4), (8, 8, 8), (6, 3, 3)])
def test_single_node_types_clamp_gpu_per_node(world_size: int, given: int, effective: int):
    assert check_config(make_config(world_size=world_size, gpu_per_node=given)).gpu_per_node == effective


REFUSED: dict[str, tuple[dict[str, Any], type[Exception], tuple[str, ...]]] = {
    "rank": ({"rank": 8}, ValueError, ("rank 8", "0..7", "world_size 8")),
    "negative rank": ({"rank": -1}, ValueError, ("rank", "-1")),
    "no ranks": ({"world_size": 0}, ValueError, ("world_size", "0", "1..")),
    "too many ranks": ({"world_size": 513}, ValueError, ("world_size", "513", "512")),
    "no elements": ({"hidden_dim": 0}, ValueError, ("hidden_dim", "0")),
    "no tokens": ({"max_num_inp_token_per_rank": 0}, ValueError, ("max_num_inp_token_per_rank",)),
    "no experts": ({"num_experts_per_rank": 0}, ValueError, ("num_experts_per_rank",)),
    "no top-k": ({"num_experts_per_token": 0}, ValueError, ("num_experts_per_token",)),
    "negative scales": ({"scale_dim": -1}, ValueError, ("scale_dim", "-1")),
    "no int": ({"hidden_dim": 7168.0}, TypeError, ("hidden_dim", "7168.0")),
    "no number": ({"world_size": "8"}, TypeError, ("world_size", "'8'")),
    "group": ({"gpu_per_node": 3}, ValueError, ("gpu_per_node 3", "world_size 8")),
    # 8 * 8 * M must fit int32: 33554431 is the largest M, the 24 bits of a count end before.
    "many tokens": ({"max_num_inp_token_per_rank": 2**24}, ValueError, ("16777216", "16777215")),
    "flat index": (
        {"world_size": 16, "gpu_per_node": 16, "max_num_inp_token_per_rank": 8388608},
        ValueError,
        ("world_size 16", "8388608", "8388607"),
    ),
    "wide rows": ({"hidden_dim": 2**22}, ValueError, ("4194304", "4194303", "max_token_type_size 4")),
    "expert ids": ({"num_experts_per_rank": 2**28}, ValueError, ("268435456", "268435455")),
    "kernel type": ({"kernel_type": 9}, ValueError, ("kernel_type 9", "IntraNode (0)", "AsyncLL (4)")),
    "quant type": ({"quant_type": "fp9"}, ValueError, ("fp9", "none", "fp8_direct_cast", "fp4_blockwise")),
    "quant number": ({"quant_type": 1}, ValueError, ("quant_type 1", "fp8_direct_cast")),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_configs_say_both_numbers(name: str):
    changes, error, words = REFUSED[name]
    with pytest.raises(error) as caught:
        check_config(make_config(**changes))
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_the_largest_legal_flat_index_is_accepted():
    limits = check_config(make_config(world_size=16, gpu_per_node=16, max_num_inp_token_per_rank=8388607))
    assert 16 * 16 * limits.max_tokens < 2**31


@pytest.mark.parametrize("kernel_type", [member for member in KernelType if not member.name.startswith("IntraNode")])
def test_several_nodes_are_not_built_and_say_so(kernel_type: KernelType):
    config = make_config(world_size=4, gpu_per_node=2, kernel_type=kernel_type)
    with pytest.raises(NotImplementedError, match=f"{kernel_type.name} over 2 nodes.*gpu_per_node=4"):
        mori.ops.EpDispatchCombineOp(config)
    for whole in (4, 8):
        check_config(dataclasses.replace(config, gpu_per_node=whole))


def test_an_op_before_init_names_the_init_functions():
    with pytest.raises(mori.NotInitialized, match="shmem_torch_process_group_init or .*shmem_init_attr"):
        mori.ops.EpDispatchCombineOp(make_config())


def test_ranks_agree_on_all_that_shapes_memory_or_wire():
    """Launch sizes, rank and the per-call default of external input may differ; nothing else may."""
    config = make_config(scale_dim=4)
    free = {"data_type", "rank", "block_num", "warp_num_per_block", "rdma_block_num", "use_external_inp_buf"}
    agreed = agreed_fields(config, check_config(config))
    assert set(agreed) == {field.name for field in dataclasses.fields(config)} - free
    larger = dataclasses.replace(config, max_total_recv_tokens=4096)
    assert agreed_fields(larger, check_config(larger)) != agreed
    # Spellings of the same thing agree.
    same = dataclasses.replace(config, quant_type=mori.cpp.None_, max_total_recv_tokens=-1)
    assert agreed_fields(same, check_config(same)) == agreed
