"""What routing handles of both APIs are held against before an op follows them."""

from __future__ import annotations

from typing import Any

import torch


def check_handle_contents(handle: Any, most_tokens: int, sizes: dict[str, int], device: torch.device) -> None:
    """`sizes`: elements of each tensor, by attribute. TypeError or ValueError for what no op of this shape made."""
    if not 0 <= handle.cur_rank_num_token <= most_tokens:
        raise ValueError(
            f"routing: cur_rank_num_token is {handle.cur_rank_num_token}, must be in 0..{most_tokens}: "
            "it is the token count of the dispatch that made the handle"
        )
    for name, size in sizes.items():
        tensor = getattr(handle, name)
        if not isinstance(tensor, torch.Tensor) or tensor.dtype != torch.int32:
            raise TypeError(f"routing: {name} must be an int32 tensor, as the dispatch that made the handle gave it")
        if tensor.device != device or not tensor.is_contiguous():
            raise ValueError(f"routing: {name} must be a contiguous tensor on {device}, got one on {tensor.device}")
        if tensor.numel() != size:
            raise ValueError(
                f"routing: {name} has {tensor.numel()} elements, handles of this op have {size}: "
                "it comes from an op with another config"
            )
