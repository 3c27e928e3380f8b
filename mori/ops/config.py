"""`EpDispatchCombineConfig`, the sizes that follow from it, and the rules it must obey before an op is built."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from mori import archs, target

from . import restrictions
from .kernel_types import (
    QUANT_NAMES,
    EpDispatchCombineKernelType,
    EpDispatchCombineQuantType,
    normalize_kernel_type,
    normalize_quant_type,
)
from .restrictions_v1 import ranks_of_a_node


@dataclass
class EpDispatchCombineConfig:
    """Everything an `EpDispatchCombineOp` is built from. Plain and mutable: the op checks it, this class does not.

    All ranks pass equal values, except for `rank`, `block_num`, `warp_num_per_block` and `rdma_block_num`.

    data_type: kept for callers; kernels take the dtype from the tensors of each call.
    rank, world_size: as in shmem (`shmem_mype()`, `shmem_npes()`).
    hidden_dim: most elements of a row (H). For fp4 pairs an element is a byte of two values.
    scale_dim, scale_type_size: scales per token (S) and bytes of one scale; 0 for either means no scales.
    max_token_type_size: bytes of the largest element of any row; a call needs `h * itemsize <= H * this`.
    max_num_inp_token_per_rank: most tokens a rank may dispatch (M).
    num_experts_per_rank, num_experts_per_token: E and top-k (K). Expert `e` lives on rank `e // E`.
    warp_num_per_block, block_num: launch sizes in MANUAL mode. Hints on CPUs; results never depend on them.
    max_total_recv_tokens: most rows a rank may receive in a call, rounded up to a multiple of world_size; 0: no cap.
    use_external_inp_buf: True: combine reads the tensor it is given. False: the caller fills the registered buffer.
    kernel_type: see `EpDispatchCombineKernelType`.
    gpu_per_node: ranks per node, a divisor of world_size; more than world_size means all.
    rdma_block_num: blocks for traffic between nodes.
    num_qp_per_pe: queue pairs per peer between nodes.
    quant_type: "none", "fp8_direct_cast", "fp8_blockwise", "fp4_blockwise" or an `EpDispatchCombineQuantType`.
    """

    data_type: torch.dtype
    rank: int
    world_size: int
    hidden_dim: int
    scale_dim: int
    scale_type_size: int
    max_token_type_size: int
    max_num_inp_token_per_rank: int
    num_experts_per_rank: int
    num_experts_per_token: int
    warp_num_per_block: int = 8
    block_num: int = 80
    max_total_recv_tokens: int = 0
    use_external_inp_buf: bool = True
    kernel_type: EpDispatchCombineKernelType = EpDispatchCombineKernelType.IntraNode
    gpu_per_node: int = 8
    rdma_block_num: int = 0
    num_qp_per_pe: int = 1
    quant_type: str | EpDispatchCombineQuantType = "none"


def receive_rows_per_rank(world_size: int, max_tokens: int, max_total_recv_tokens: int) -> int:
    """Share of the receive cap per source rank: M without a cap, else the cap split evenly, rounded up, at most M."""
    if max_total_recv_tokens <= 0:
        return max_tokens
    return min(-(-max_total_recv_tokens // world_size), max_tokens)


class Limits(NamedTuple):
    """A checked config as the numbers that calls are checked against."""

    rank: int
    world_size: int
    max_tokens: int  # M
    hidden_dim: int  # H
    max_row_bytes: int
    scale_dim: int  # S, 0 when scales are off for either reason
    scale_type_size: int
    experts_per_rank: int  # E
    topk: int  # K
    receive_rows: int  # R
    gpu_per_node: int
    kernel_type: EpDispatchCombineKernelType
    quant_type: EpDispatchCombineQuantType


def check_config(config: EpDispatchCombineConfig, arch: str | None = None) -> Limits:
    """The limits of a config that is legal on an arch, by default that of this process.

    TypeError: a size that is no int. ValueError: a value out of range or a combination that does not fit, with both
    numbers. NotImplementedError: several nodes, which this version does not serve.
    """
    case = restrictions.Case(config, archs.find(arch or target.current().arch))
    restrictions.require("v1", "construction", case, subject="EpDispatchCombineConfig: ")
    per_rank = receive_rows_per_rank(config.world_size, config.max_num_inp_token_per_rank, config.max_total_recv_tokens)
    scales_on = config.scale_dim > 0 and config.scale_type_size > 0
    return Limits(
        rank=int(config.rank),
        world_size=int(config.world_size),
        max_tokens=int(config.max_num_inp_token_per_rank),
        hidden_dim=int(config.hidden_dim),
        max_row_bytes=int(config.hidden_dim * config.max_token_type_size),
        scale_dim=int(config.scale_dim) if scales_on else 0,
        scale_type_size=int(config.scale_type_size) if scales_on else 0,
        experts_per_rank=int(config.num_experts_per_rank),
        topk=int(config.num_experts_per_token),
        receive_rows=int(config.world_size * per_rank),
        gpu_per_node=int(ranks_of_a_node(case)),
        kernel_type=normalize_kernel_type(config.kernel_type),
        quant_type=normalize_quant_type(config.quant_type),
    )


def agreed_fields(config: EpDispatchCombineConfig, limits: Limits) -> dict[str, int | str]:
    """What every rank must pass alike: all that shapes memory or the wire, by the config's own field names.

    `gpu_per_node` is compared after clamping; `rank` and launch sizes may differ.
    """
    return {
        "world_size": limits.world_size,
        "hidden_dim": limits.hidden_dim,
        "max_token_type_size": int(config.max_token_type_size),
        "scale_dim": limits.scale_dim,
        "scale_type_size": limits.scale_type_size,
        "max_num_inp_token_per_rank": limits.max_tokens,
        "num_experts_per_rank": limits.experts_per_rank,
        "num_experts_per_token": limits.topk,
        "max_total_recv_tokens": max(int(config.max_total_recv_tokens), 0),
        "kernel_type": limits.kernel_type.name,
        "gpu_per_node": limits.gpu_per_node,
        "num_qp_per_pe": int(config.num_qp_per_pe),
        "quant_type": QUANT_NAMES[limits.quant_type],
    }
