"""Sizes, launch parameters and the names that programs written for other releases read from an op."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from .config import EpDispatchCombineConfig, Limits
from .kernel_types import QUANT_NAMES
from .launch import LaunchChooser
from .tuning_rules import Rule
from .validation import check_combine_indices

if TYPE_CHECKING:
    from .engine import EpPlan

_MOST_THREADS = 1024  # of a block, on every GPU


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
    _launches: LaunchChooser
    _plan: EpPlan
    _device: torch.device
    _fp8_blockwise_combine_scale_dim: int

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
        """(block_num, rdma_block_num, warp_per_block) of a call with M tokens of H elements of the config's data_type.

        A combine is taken to be zero copy unless the config has `use_external_inp_buf`. In AUTO mode a tuned rule
        decides, else the built-in table; in MANUAL mode each argument above 0, else the config.
        """
        return self._launches.at_capacity(is_dispatch, block_num, rdma_block_num, warp_per_block)

    @property
    def launch_config_mode(self) -> str:
        """ "MANUAL" or "AUTO"."""
        return self._launches.mode

    @property
    def auto_block_num(self) -> int | None:
        """block_num of calls without a rule in AUTO mode, None in MANUAL mode; so are the next two."""
        return self._launches.auto and self._launches.auto.block_num

    @property
    def auto_rdma_block_num(self) -> int | None:
        return self._launches.auto and self._launches.auto.rdma_block_num

    @property
    def auto_warp_per_block(self) -> int | None:
        return self._launches.auto and self._launches.auto.warp_per_block

    @property
    def _dispatch_rules(self) -> list[Rule] | None:
        """Tuned rules, sorted; None in MANUAL mode."""
        return self._launches.dispatch_rules

    @property
    def _combine_rules(self) -> list[Rule] | None:
        return self._launches.combine_rules

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

    @property
    def _handle_info(self) -> dict[str, int]:
        """Numbers of the device and of the op; kernel_type and quant_type as ints."""
        native = self._cpp_config
        on_gpu = self._device.type != "cpu"
        return {
            "multi_processor_count": (
                torch.cuda.get_device_properties(self._device).multi_processor_count
                if on_gpu
                else len(os.sched_getaffinity(0))
            ),
            "max_threads": _MOST_THREADS,
            "world_size": native.world_size,
            "hidden_dim": native.hidden_dim,
            "scale_dim": native.scale_dim,
            "scale_type_size": native.scale_type_size,
            "fp8_blockwise_combine_scale_dim": self._fp8_blockwise_combine_scale_dim,
            "fp8_blockwise_combine_scale_type_size": torch.float32.itemsize,
            "kernel_type": int(native.kernel_type),
            "quant_type": int(native.quant_type),
        }
