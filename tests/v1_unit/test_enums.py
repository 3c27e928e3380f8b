"""Enums and native names that programs compare by identity, by value and by number."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

import mori
from mori import tensor_utils
from mori.ops.dispatch_combine import _DTYPE_SUFFIX, _QUANT_TYPE_MAP, TOPK_IDX_DTYPE, _normalize_quant_type

KernelType = mori.ops.EpDispatchCombineKernelType


def test_kernel_types_have_the_six_names_and_numbers():
    names = ["IntraNode", "InterNode", "InterNodeV1", "InterNodeV1LL", "AsyncLL", "IntraNodeLL"]
    assert [member.name for member in KernelType] == names
    assert [member.value for member in KernelType] == [0, 1, 2, 3, 4, 5]
    assert [int(member) for member in KernelType] == [0, 1, 2, 3, 4, 5]
    assert [str(member) for member in KernelType] == names


def test_members_are_singletons():
    member = KernelType.AsyncLL
    assert KernelType(4) is member
    assert mori.cpp.AsyncLL is member
    assert mori.cpp.EpDispatchCombineKernelType is KernelType
    assert copy.deepcopy(member) is member
    assert pickle.loads(pickle.dumps(member)) is member
    assert {member: 1}[KernelType.AsyncLL] == 1


def test_members_of_different_enums_are_not_equal():
    assert KernelType.InterNode != mori.cpp.Fp8DirectCast
    assert KernelType.InterNode != 1


def test_quant_types_map_from_four_strings():
    assert {name: int(member) for name, member in _QUANT_TYPE_MAP.items()} == {
        "none": 0,
        "fp8_direct_cast": 1,
        "fp8_blockwise": 2,
        "fp4_blockwise": 3,
    }


@pytest.mark.parametrize("given", ["none", " None ", "NONE", mori.cpp.None_])
def test_quant_type_is_accepted_in_any_spelling(given: object):
    assert _normalize_quant_type(given) is mori.cpp.None_


def test_native_config_packs_its_fields_in_order():
    native = mori.cpp.EpDispatchCombineConfig(
        rank=1, world_size=2, hidden_dim=3, kernel_type=KernelType.AsyncLL, quant_type=mori.cpp.Fp8BlockwiseQuant
    )
    assert native.to_packed_array() == [1, 1, 2, 3, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 4, 8, 0, 1, 2, 0]
    assert mori.cpp.EpDispatchCombineConfig().to_packed_array() == [1] + [0] * 12 + [1, 0, 8, 0, 1, 0, 0]


def test_dtype_tables():
    assert TOPK_IDX_DTYPE is torch.int32
    assert _DTYPE_SUFFIX[torch.bfloat16] == "bf16"
    assert _DTYPE_SUFFIX[torch.float8_e4m3fnuz] == "fp8_fnuz"
    assert torch.float16 not in _DTYPE_SUFFIX
    numbered = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.int32]
    assert [tensor_utils.dtype_to_int(dtype) for dtype in numbered] == [0, 1, 2, 3, 4]
    with pytest.raises(ValueError, match="float16"):
        tensor_utils.dtype_to_int(torch.float16)
