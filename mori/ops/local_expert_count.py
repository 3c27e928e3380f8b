"""How many received rows each local expert has to work on."""

from __future__ import annotations

from typing import Any

import torch

from mori import tensor_utils


def count_local_experts(ids: torch.Tensor, received: torch.Tensor, rank: int, counts: torch.Tensor) -> None:
    """Set counts[e] to how often local expert e of `rank` occurs in the first `received` rows of `ids`.

    ids: (rows, K) int32 global expert ids; received: (1,) int32; counts: (E,) int32, overwritten. All on one device;
    nothing is read on the host. An id that occurs twice in a row counts twice; ids of other ranks and -1 count nowhere.
    """
    experts = counts.shape[0]
    local = ids.to(torch.int64) - rank * experts
    valid_rows = torch.arange(ids.shape[0], device=ids.device) < received
    counted = (local >= 0) & (local < experts) & valid_rows[:, None]
    # Rows beyond `received` hold earlier iterations' ids: their place is clamped, their increment is 0.
    counts.zero_()
    counts.scatter_add_(0, local.clamp(0, experts - 1).flatten(), counted.flatten().to(torch.int32))


def launch_local_expert_count(
    config: Any,
    indices_ptr: int,
    total_recv_token_num_ptr: int,
    local_expert_count_ptr: int,
    block_num: int = -1,
    warp_per_block: int = -1,
    stream: int = 0,
) -> None:
    """As `count_local_experts`, on raw addresses: of the current GPU's memory on GPU targets, else of the host's.

    config: any object with rank, num_experts_per_rank, num_experts_per_token, warp_num_per_block and block_num.
    indices_ptr: (count, K) int32; total_recv_token_num_ptr: int32 count; local_expert_count_ptr: (E,) int32, set.
    block_num, warp_per_block: 0 or less means the config's. The result does not depend on them.
    stream: handle of the stream to work on, 0: the default one. On GPUs the count is read on the host: this waits.
    RuntimeError when they are 0 or less in both places.
    """
    blocks = block_num if block_num > 0 else config.block_num
    warps = warp_per_block if warp_per_block > 0 else config.warp_num_per_block
    if blocks <= 0 or warps <= 0:
        raise RuntimeError(
            f"launch_local_expert_count requires positive block and warp settings, got {blocks} and {warps}: "
            "pass block_num and warp_per_block or set them in the config"
        )
    with tensor_utils.on_stream(stream):
        _count_at(config, indices_ptr, total_recv_token_num_ptr, local_expert_count_ptr)


def _count_at(config: Any, indices_ptr: int, total_recv_token_num_ptr: int, local_expert_count_ptr: int) -> None:
    received = tensor_utils.from_gpu_ptr(total_recv_token_num_ptr, (1,), torch.int32)
    shape = (max(int(received), 0), config.num_experts_per_token)
    ids = tensor_utils.from_gpu_ptr(indices_ptr, shape, torch.int32)
    counts = tensor_utils.from_gpu_ptr(local_expert_count_ptr, (config.num_experts_per_rank,), torch.int32)
    count_local_experts(ids, received, config.rank, counts)
