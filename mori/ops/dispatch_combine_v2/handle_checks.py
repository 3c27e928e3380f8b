"""Whether a handle that an op did not make itself can be followed by it."""

from __future__ import annotations

import torch

from ..handle_contents import check_handle_contents
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
    sizes = {
        "disp_dest_tok_id_map": most * cfg.num_experts_per_token,
        "inter_node_disp_send_map": send_map_words,
        "total_recv_token_num": 1,
    }
    check_handle_contents(handle, most, sizes, device)
