"""Sizes, launch parameters and the names that programs written for other releases read from an op."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist

from .config import EpDispatchCombineConfig, Limits
from .kernel_types import QUANT_NAMES
from .launch import Launch, resolve_launch
from .validation import check_combine_indices

if TYPE_CHECKING:
    from .engine import EpPlan


def _allgather_with_token_num_padding(input: torch.Tensor, max_token_num: int) -> list[torch.Tensor]:
    """Rows of all ranks of the default process group, each padded with zeros to `max_token_num` rows."""
    # As bytes: process groups do not know every element type.
    raw = input.contiguous().view(torch.uint8)
    padded = raw.new_zeros((max_token_num, *raw.shape[1:]))
    padded[: raw.shape[0]] = raw
    gathered = [torch.empty_like(padded) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, padded)
    return [rows.view(input.dtype) for rows in gathered]


class OpAttributes:
    """Everything of the op that follows from its config alone."""

    config: EpDispatchCombineConfig
    _limits: Limits
    _auto: Launch | None
    _plan: EpPlan

    # Tuned launch rules: none are shipped.
    _dispatch_rules: None = None
    _combine_rules: None = None
    _check_combine_indices = staticmethod(check_combine_indices)
    _allgather_with_token_num_padding = staticmethod(_allgather_with_token_num_padding)

    def max_num_tokens_to_send_per_rank(self) -> int:
        """M."""
        return self._limits.max_tokens

    def max_num_tokens_to_send(self) -> int:
        """W * M, also the stride of ranks in flat token indices."""
        return self._limits.world_size * self._limits.max_tokens

    def max_num_tokens_to_recv_per_rank(self) -> int:
        """R / W."""
        return self._limits.receive_rows // self._limits.world_size

    def max_num_tokens_to_recv(self) -> int:
        """R, the rows of every receive view: the receive cap rounded up to a multiple of W, at most W * M."""
        return self._limits.receive_rows

    def decode_send_flat_idx(self, flat_index: int | torch.Tensor) -> tuple[int, int]:
        """(rank, token) of a flat index, given as an int or a tensor of one element."""
        return divmod(int(flat_index), self.max_num_tokens_to_send())

    def get_launch_config(
        self, is_dispatch: bool = True, block_num: int = -1, rdma_block_num: int = -1, warp_per_block: int = -1
    ) -> tuple[int, int, int]:
        """(block_num, rdma_block_num, warp_per_block) that a call with these arguments would get."""
        return resolve_launch(self.config, self._auto, block_num, rdma_block_num, warp_per_block)

    @property
    def auto_block_num(self) -> int | None:
        """block_num of AUTO mode, None in MANUAL mode; so are the next two."""
        return None if self._auto is None else self._auto.block_num

    @property
    def auto_rdma_block_num(self) -> int | None:
        return None if self._auto is None else self._auto.rdma_block_num

    @property
    def auto_warp_per_block(self) -> int | None:
        return None if self._auto is None else self._auto.warp_per_block

    @property
    def _qt_str(self) -> str:
        return QUANT_NAMES[self._limits.quant_type]

    @property
    def _handle(self) -> EpPlan:
        return self._plan

    @property
    def _cpp_config(self) -> Any:
        from mori import cpp

        return cpp.native_config(self.config, self._limits)

    def dispatch_standard_moe(self, *arguments: Any, **options: Any) -> NoReturn:
        """Not built yet: raises NotImplementedError, as the next three do."""
        _refuse("dispatch_standard_moe", "dispatch")

    def combine_standard_moe(self, *arguments: Any, **options: Any) -> NoReturn:
        _refuse("combine_standard_moe", "combine")

    def convert_dispatch_output(self, *arguments: Any, **options: Any) -> NoReturn:
        _refuse("convert_dispatch_output", "the rows as dispatch returns them")

    def convert_combine_input(self, *arguments: Any, **options: Any) -> NoReturn:
        _refuse("convert_combine_input", "rows in the order of dispatch")


def _refuse(method: str, instead: str) -> NoReturn:
    raise NotImplementedError(f"{method}: standard-MoE layouts are not built in this version of mori; use {instead}")
