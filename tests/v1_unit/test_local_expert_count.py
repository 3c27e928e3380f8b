"""Counting received rows per local expert, and tensors over raw addresses."""

from __future__ import annotations

import pytest
import torch

import mori
from mori.ops.local_expert_count import count_local_experts
from mori.tensor_utils import from_gpu_ptr, gpu_tensor_view

# Rank 1 of 3 with 2 experts each owns ids 2 and 3. The last row is left over from an earlier call.
IDS = torch.tensor([[2, 3, 0], [3, 3, -1], [5, 6, 2], [2**30, -5, 1], [2, 2, 2]], dtype=torch.int32)


def native_config(**changes: int) -> mori.cpp.EpDispatchCombineConfig:
    fields = {"rank": 1, "num_experts_per_rank": 2, "num_experts_per_token": 3, "block_num": 1, "warp_num_per_block": 1}
    return mori.cpp.EpDispatchCombineConfig(**(fields | changes))


@pytest.mark.parametrize(("received", "expected"), [(0, [0, 0]), (1, [1, 1]), (2, [1, 3]), (4, [2, 3]), (5, [5, 3])])
def test_counts_local_ids_of_valid_rows(received: int, expected: list[int]):
    counts = torch.full((2,), 99, dtype=torch.int32)
    total = torch.tensor([received], dtype=torch.int32)
    count_local_experts(IDS, total, 1, counts)
    assert counts.tolist() == expected
    counts.fill_(99)
    mori.ops.launch_local_expert_count(native_config(), IDS.data_ptr(), total.data_ptr(), counts.data_ptr())
    assert counts.tolist() == expected


def test_launch_needs_a_grid_from_somewhere():
    counts, total = torch.zeros(2, dtype=torch.int32), torch.tensor([4], dtype=torch.int32)
    pointers = (IDS.data_ptr(), total.data_ptr(), counts.data_ptr())
    config = native_config(block_num=0, warp_num_per_block=0)
    with pytest.raises(RuntimeError, match="requires positive block and warp settings"):
        mori.ops.launch_local_expert_count(config, *pointers)
    mori.ops.launch_local_expert_count(config, *pointers, block_num=7, warp_per_block=2)
    assert counts.tolist() == [2, 3]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.float4_e2m1fn_x2, torch.int32])
def test_tensors_over_addresses_alias_them(dtype: torch.dtype):
    owner = torch.arange(48, dtype=torch.uint8)
    shape = (3, 16 // dtype.itemsize)
    view = from_gpu_ptr(owner.data_ptr(), shape, dtype)
    assert (view.shape, view.dtype, view.data_ptr()) == (shape, dtype, owner.data_ptr())
    owner[5] = 200
    assert view.view(torch.uint8).flatten()[5] == 200
    assert gpu_tensor_view(owner.data_ptr(), shape, dtype).data_ptr() == owner.data_ptr()


def test_a_null_pointer_is_refused_unless_there_is_nothing():
    assert from_gpu_ptr(0, (0, 4), torch.float32).shape == (0, 4)
    with pytest.raises(ValueError, match="null"):
        from_gpu_ptr(0, (1, 4), torch.float32)
