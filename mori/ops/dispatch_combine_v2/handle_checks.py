"""Whether a handle that an op did not make itself can be followed by it."""

from __future__ import annotations

import torch

from .config import EpDispatchCombineConfig
from .routing import EpDispatchRoutingHandle


def check_handle(handle: object, cfg: EpDispatchCombineConfig, send_map_words: int, device: torch.device) -> None:
    """TypeError for what is no handle, ValueError for one that an op of another shape made."""
    if not isinstance(handle, EpDispatchRoutingHandle):
        raise TypeError(
            f"routing must be the EpDispatchRoutingHandle of a dispatch with return_routing=True, got "
            f"{type(handle).__name__}"
        )
    most = cfg.max_num_inp_token_per_rank
    if not 0 <= handle.cur_rank_num_token <= most:
        raise ValueError(
            f"routing: cur_rank_num_token is {handle.cur_rank_num_token}, must be in 0..{most}: it is the token count "
            "of the dispatch that made the handle"
        )
    sizes = {
        "disp_dest_tok_id_map": most * cfg.num_experts_per_token,
        "inter_node_disp_send_map": send_map_words,
        "total_recv_token_num": 1,
    }
    for name, size in sizes.items():
        tensor = getattr(handle, name)
        if not isinstance(tensor, torch.Tensor) or tensor.dtype != torch.int32:
            raise TypeError(f"routing: {name} must be an int32 tensor, as the dispatch that made the handle gave it")
        if tensor.device != device or not tensor.is_contiguous():
            raise ValueError(f"routing: {name} must be a contiguous tensor on {device}, got one on {tensor.device}")
        if tensor.numel() != size:
            raise ValueError(
                f"routing: {name} has {tensor.numel()} elements, handles of this op have {size}: it comes from an op "
                "with another config"
            )
