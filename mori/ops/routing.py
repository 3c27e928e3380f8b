"""Routing handles: which way the rows of one dispatch went, kept by the caller to send and combine rows likewise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import torch

from mori import _core

from .handle_contents import check_handle_contents
from .kernel_types import EpDispatchCombineKernelType as KernelType

if TYPE_CHECKING:
    from .config import Limits

ROUTING_KERNEL_TYPES = frozenset({KernelType.IntraNode, KernelType.InterNodeV1})
_SUMMARY_FIELDS = 4  # csrc/layout/ep_layout.hpp, RoutingSummary


@dataclass
class EpDispatchRoutingHandle:
    """What `dispatch(return_routing=True)` noted: five int32 tensors of the op's device, and this rank's token count.

    Owned by the caller; several may be alive, also across later dispatches. Save `tensors()` and the count (in an
    autograd context, say) and rebuild the handle with `from_tensors`. Contents are private but for:
    total_recv_token_num (1,): rows received, T. disp_tok_id_to_src_tok_id_local: flat source index of row i, for i < T.
    """

    disp_dest_tok_id_map: torch.Tensor
    inter_node_disp_dest_tok_id_map: torch.Tensor
    inter_node_disp_send_map: torch.Tensor
    total_recv_token_num: torch.Tensor
    disp_tok_id_to_src_tok_id_local: torch.Tensor
    cur_rank_num_token: int = 0

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The five tensors, in the order of the fields."""
        return tuple(getattr(self, each.name) for each in fields(self)[:-1])

    @classmethod
    def from_tensors(cls, tensors: Sequence[torch.Tensor], cur_rank_num_token: int = 0) -> EpDispatchRoutingHandle:
        """A handle over tensors that `tensors()` gave, or copies of them; `cur_rank_num_token` as it was."""
        if len(tensors) != len(fields(cls)) - 1:
            raise ValueError(f"a routing handle has {len(fields(cls)) - 1} tensors, got {len(tensors)}")
        return cls(*tensors, int(cur_rank_num_token))  # type: ignore[arg-type, call-arg]


def _sizes(limits: Limits) -> dict[str, int]:
    """Elements of each tensor. On one node the send map holds the row counts of all ranks."""
    world, tokens, topk = limits.world_size, limits.max_tokens, limits.topk
    nodes = world // limits.gpu_per_node
    rows = world * tokens * limits.experts_per_rank
    return {
        "disp_dest_tok_id_map": max(rows, tokens * topk),
        "inter_node_disp_dest_tok_id_map": nodes * tokens * topk,
        "inter_node_disp_send_map": max(nodes * tokens, _SUMMARY_FIELDS + world),
        "total_recv_token_num": 1,
        "disp_tok_id_to_src_tok_id_local": rows,
    }


def new_handle(limits: Limits, device: torch.device, tokens: int) -> EpDispatchRoutingHandle:
    """Zeros, to be filled by a dispatch of `tokens` tokens."""
    tensors = [torch.zeros(size, dtype=torch.int32, device=device) for size in _sizes(limits).values()]
    return EpDispatchRoutingHandle.from_tensors(tensors, tokens)


def check_handle(handle: object, limits: Limits, device: torch.device) -> None:
    """NotImplementedError for a kernel type without handles, TypeError for what is none, ValueError for one that an op
    of another shape made."""
    require_kernel_type(limits.kernel_type)
    if not isinstance(handle, EpDispatchRoutingHandle):
        raise TypeError(f"routing must be an EpDispatchRoutingHandle, got {type(handle).__name__}")
    check_handle_contents(handle, limits.max_tokens, _sizes(limits), device)
    # Sizes do not tell of receive caps. Of a GPU the host does not know the count without waiting.
    if device.type == "cpu" and int(handle.total_recv_token_num) > limits.receive_rows:
        raise ValueError(
            f"routing: the handle is one of {int(handle.total_recv_token_num)} received rows, this op holds "
            f"{limits.receive_rows}: it comes from an op with another max_total_recv_tokens"
        )


def require_kernel_type(kernel_type: KernelType) -> None:
    if kernel_type not in ROUTING_KERNEL_TYPES:
        names = ", ".join(sorted(member.name for member in ROUTING_KERNEL_TYPES))
        raise NotImplementedError(f"routing handles are offered by kernel types {names}, not by {kernel_type}")


def extras_of(handle: EpDispatchRoutingHandle | None, packed_rows: int = 0) -> _core.CallExtras:
    """What a call gets to know of the handle, and of rows in the places of their experts."""
    if handle is None:
        return _core.CallExtras(packed_rows=packed_rows)
    return _core.CallExtras(
        sender_map=handle.disp_dest_tok_id_map.data_ptr(),
        received_count=handle.total_recv_token_num.data_ptr(),
        summary=handle.inter_node_disp_send_map.data_ptr(),
        packed_rows=packed_rows,
    )
