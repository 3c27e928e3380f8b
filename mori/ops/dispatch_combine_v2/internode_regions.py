"""The symmetric regions of an op between nodes, as arithmetic on its config."""

from __future__ import annotations

from typing import Protocol

from ..config import receive_rows_per_rank


class Sizes(Protocol):
    """The fields of a config that regions depend on."""

    world_size: int
    gpu_per_node: int
    hidden_dim: int
    max_num_inp_token_per_rank: int
    num_experts_per_rank: int
    num_experts_per_token: int
    max_token_type_size: int
    max_total_recv_tokens: int
    scale_dim: int
    scale_type_size: int
    num_qp_per_pe: int


_WORD, _LONG_WORD = 4, 8


def internode_regions(cfg: Sizes) -> list[tuple[str, int]]:
    """(name, bytes) in the order in which they lie in the arena; `out_scales` only if there are scales.

    ValueError if gpu_per_node does not divide world_size.
    """
    world_size, tokens, topk = cfg.world_size, cfg.max_num_inp_token_per_rank, cfg.num_experts_per_token
    if cfg.gpu_per_node <= 0 or world_size % cfg.gpu_per_node:
        raise ValueError(
            f"gpu_per_node {cfg.gpu_per_node} does not divide world_size {world_size}: "
            "set it to the number of ranks on one node"
        )
    nodes = world_size // cfg.gpu_per_node
    rows = world_size * receive_rows_per_rank(world_size, tokens, cfg.max_total_recv_tokens)
    row_bytes = cfg.hidden_dim * cfg.max_token_type_size
    scale_bytes = cfg.scale_dim * cfg.scale_type_size
    # What travels with a token: its row, ids and weights, scales, and where it comes from.
    record_bytes = row_bytes + 2 * _WORD * topk + scale_bytes + _WORD
    regions = [
        ("inter_dispatch_inp", nodes * tokens * record_bytes),
        ("inter_combine_inp", rows * record_bytes),
        ("inter_staging", 2 * nodes * tokens * record_bytes),
        ("inter_dispatch_out", rows * row_bytes),
        ("inter_combine_out", tokens * row_bytes),
        ("inter_dispatch_staging", tokens * record_bytes),
        ("inp_weights", rows * topk * _WORD),
        ("dispatch_out_weights", rows * topk * _WORD),
        ("combine_out_weights", tokens * topk * _WORD),
        ("out_indices", rows * topk * _WORD),
        ("recv_token_num", world_size * _WORD * 2 * cfg.num_qp_per_pe),
        ("node_recv_token_num", nodes * _LONG_WORD),
        ("disp_tok_offset", _WORD),
        ("disp_tok_id_to_src_tok_id", world_size * tokens * cfg.num_experts_per_rank * _WORD),
        ("cross_device_barrier", world_size * _WORD * 2 * _LONG_WORD),
        ("inter_node_chunk_flag", nodes * tokens * _LONG_WORD),
    ]
    if scale_bytes:
        regions.append(("out_scales", rows * scale_bytes))
    return regions
