"""`EpDispatchCombineConfig`, the sizes that follow from it, and the rules it must obey before an op is built."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from .kernel_types import (
    QUANT_NAMES,
    SINGLE_NODE,
    EpDispatchCombineKernelType,
    EpDispatchCombineQuantType,
    normalize_kernel_type,
    normalize_quant_type,
)

INT32_MAX = 2**31 - 1
MAX_WORLD_SIZE = 512
# Count words carry token counts, and headers carry row bytes, in 24 bits.
MAX_24_BITS = 2**24 - 1


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


class ConfigRule(NamedTuple):
    """`message` is formatted with the fields of the config and with `largest`, the value of `remedy`."""

    holds: Callable[[EpDispatchCombineConfig], bool]
    message: str
    remedy: Callable[[EpDispatchCombineConfig], object] = lambda config: None


# field: (smallest, largest) legal value
RANGES: dict[str, tuple[int, int]] = {
    "world_size": (1, MAX_WORLD_SIZE),
    "rank": (0, MAX_WORLD_SIZE - 1),
    "hidden_dim": (1, MAX_24_BITS),
    "scale_dim": (0, MAX_24_BITS),
    "scale_type_size": (0, 16),
    "max_token_type_size": (1, 16),
    "max_num_inp_token_per_rank": (1, MAX_24_BITS),
    "num_experts_per_rank": (1, INT32_MAX),
    "num_experts_per_token": (1, INT32_MAX),
    "warp_num_per_block": (0, INT32_MAX),
    "block_num": (0, INT32_MAX),
    "max_total_recv_tokens": (-INT32_MAX, INT32_MAX),
    "gpu_per_node": (1, INT32_MAX),
    "rdma_block_num": (0, INT32_MAX),
    "num_qp_per_pe": (1, INT32_MAX),
}


def _gpu_per_node(config: EpDispatchCombineConfig) -> int:
    """A node that could hold more ranks than there are holds all of them: the default 8 serves every smaller world."""
    return min(config.gpu_per_node, config.world_size)


CONFIG_RULES: tuple[ConfigRule, ...] = (
    ConfigRule(
        lambda c: c.rank < c.world_size,
        "rank {rank} is outside 0..{largest} for world_size {world_size}",
        lambda c: c.world_size - 1,
    ),
    ConfigRule(
        lambda c: c.world_size % _gpu_per_node(c) == 0,
        "gpu_per_node {gpu_per_node} does not divide world_size {world_size}: "
        "set it to the number of ranks on one node ({largest} if they share one)",
        lambda c: c.world_size,
    ),
    ConfigRule(
        lambda c: c.hidden_dim * c.max_token_type_size <= MAX_24_BITS,
        "hidden_dim {hidden_dim} x max_token_type_size {max_token_type_size} exceeds the largest row, "
        f"{MAX_24_BITS} bytes: with this element size hidden_dim may be at most {{largest}}",
        lambda c: MAX_24_BITS // c.max_token_type_size,
    ),
    ConfigRule(
        lambda c: c.world_size * c.num_experts_per_rank <= INT32_MAX,
        "world_size {world_size} x num_experts_per_rank {num_experts_per_rank} exceeds what int32 expert ids can name: "
        "num_experts_per_rank may be at most {largest}",
        lambda c: INT32_MAX // c.world_size,
    ),
    # The null index is world_size * (world_size * M); it and every index below it must fit.
    ConfigRule(
        lambda c: c.world_size * c.world_size * c.max_num_inp_token_per_rank <= INT32_MAX,
        "world_size {world_size} with max_num_inp_token_per_rank {max_num_inp_token_per_rank} exceeds what int32 flat "
        "token indices can name: max_num_inp_token_per_rank may be at most {largest}",
        lambda c: INT32_MAX // (c.world_size * c.world_size),
    ),
)


def _require_one_node(limits: Limits) -> None:
    nodes = limits.world_size // limits.gpu_per_node
    if nodes > 1 and limits.kernel_type not in SINGLE_NODE:
        raise NotImplementedError(
            f"kernel_type {limits.kernel_type} over {nodes} nodes (world_size {limits.world_size}, gpu_per_node "
            f"{limits.gpu_per_node}) is not built in this version of mori, on one node it is: "
            f"gpu_per_node={limits.world_size} says that all ranks share a node"
        )


def check_config(config: EpDispatchCombineConfig) -> Limits:
    """The limits of a legal config.

    TypeError: a size that is no int. ValueError: a value out of range or a combination that does not fit, with both
    numbers. NotImplementedError: several nodes, which this version does not serve.
    """
    for field, (smallest, largest) in RANGES.items():
        value = getattr(config, field)
        if isinstance(value, bool) or not hasattr(value, "__index__"):
            raise TypeError(f"EpDispatchCombineConfig.{field} must be an int, got {value!r}")
        if not smallest <= value <= largest:
            raise ValueError(f"EpDispatchCombineConfig.{field} is {value}, must be in {smallest}..{largest}")
    for rule in CONFIG_RULES:
        if not rule.holds(config):
            text = rule.message.format(largest=rule.remedy(config), **vars(config))
            raise ValueError(f"EpDispatchCombineConfig: {text}")
    per_rank = receive_rows_per_rank(config.world_size, config.max_num_inp_token_per_rank, config.max_total_recv_tokens)
    scales_on = config.scale_dim > 0 and config.scale_type_size > 0
    limits = Limits(
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
        gpu_per_node=int(_gpu_per_node(config)),
        kernel_type=normalize_kernel_type(config.kernel_type),
        quant_type=normalize_quant_type(config.quant_type),
    )
    _require_one_node(limits)
    return limits


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
