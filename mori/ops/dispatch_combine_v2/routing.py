"""Which way the rows of a dispatch went: what a combine needs to bring them back."""

from __future__ import annotations

from collections.abc import Sequence

import torch

# What `tensors()` gives, in this order.
TENSORS = (
    "disp_dest_tok_id_map",
    "inter_node_disp_dest_tok_id_map",
    "inter_node_disp_send_map",
    "total_recv_token_num",
    "disp_tok_id_to_src_tok_id_local",
)


class EpDispatchRoutingHandle:
    """Made by `dispatch(return_routing=True)`, taken by `combine(routing=)`. int32 tensors on the op's device.

    disp_dest_tok_id_map: (M*K,) where entry t*K + k of token t went: `rank * cap + row`, for the first k that names the
        rank; `world_size * cap` for every other k.
    inter_node_disp_dest_tok_id_map: empty on one node.
    inter_node_disp_send_map: what a backend notes for itself. On one node hip keeps the row counts of all ranks here.
    total_recv_token_num: (1,) rows received.
    disp_tok_id_to_src_tok_id_local: (cap,) where each received row comes from: `rank * M + token`. A copy of the live
        region, made when this is first read: read it before the next dispatch.
    cur_rank_num_token: tokens that this rank dispatched.

    Without `snapshot=True` the tensors are the op's own: the next dispatch that returns a handle overwrites the map and
    every dispatch overwrites the count. A snapshot owns copies of all five, and of the weights that were received.
    """

    __slots__ = (
        "_made_by",
        "_number",
        "_received_weights",
        "_source",
        "_source_view",
        "cur_rank_num_token",
        "disp_dest_tok_id_map",
        "inter_node_disp_dest_tok_id_map",
        "inter_node_disp_send_map",
        "total_recv_token_num",
    )

    def __init__(
        self,
        disp_dest_tok_id_map: torch.Tensor,
        inter_node_disp_dest_tok_id_map: torch.Tensor,
        inter_node_disp_send_map: torch.Tensor,
        total_recv_token_num: torch.Tensor,
        disp_tok_id_to_src_tok_id_local: torch.Tensor | None = None,
        cur_rank_num_token: int = 0,
        reverse_src_view: torch.Tensor | None = None,
    ) -> None:
        self.disp_dest_tok_id_map = disp_dest_tok_id_map
        self.inter_node_disp_dest_tok_id_map = inter_node_disp_dest_tok_id_map
        self.inter_node_disp_send_map = inter_node_disp_send_map
        self.total_recv_token_num = total_recv_token_num
        self.cur_rank_num_token = cur_rank_num_token
        self._source = disp_tok_id_to_src_tok_id_local
        self._source_view = reverse_src_view
        self._made_by: object = None  # the op whose own tensors these are
        self._number = 0  # of the dispatch, among those of that op that returned a handle
        self._received_weights: torch.Tensor | None = None  # of a snapshot

    @property
    def disp_tok_id_to_src_tok_id_local(self) -> torch.Tensor | None:
        if self._source is None and self._source_view is not None:
            self._source = self._source_view.clone()
        return self._source

    def tensors(self) -> tuple[torch.Tensor | None, ...]:
        """The five tensors in the order of the constructor; copies the source positions if nobody has yet."""
        return tuple(getattr(self, name) for name in TENSORS)

    @classmethod
    def from_tensors(
        cls, tensors: Sequence[torch.Tensor | None], cur_rank_num_token: int = 0
    ) -> EpDispatchRoutingHandle:
        """A handle over tensors that `tensors()` gave, or copies of them; `cur_rank_num_token` as it was.

        It knows nothing of received weights: a combine along it folds those of the op's last dispatch.
        """
        if len(tensors) != len(TENSORS):
            raise ValueError(f"a routing handle has {len(TENSORS)} tensors, got {len(tensors)}")
        return cls(*tensors, int(cur_rank_num_token))  # type: ignore[arg-type, call-arg]

    def snapshot(self, received_weights: torch.Tensor) -> EpDispatchRoutingHandle:
        """A handle that owns copies, made in the order of the current stream."""
        copies = [None if tensor is None else tensor.clone() for tensor in self.tensors()]
        copy = self.from_tensors(copies, self.cur_rank_num_token)
        copy._made_by, copy._number = self._made_by, self._number
        copy._received_weights = received_weights.clone()
        return copy

    @property
    def _is_snapshot(self) -> bool:
        return self._received_weights is not None

    def __repr__(self) -> str:
        return f"EpDispatchRoutingHandle({self.cur_rank_num_token} tokens{', snapshot' * self._is_snapshot})"
