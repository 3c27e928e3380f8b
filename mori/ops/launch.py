"""Which launch sizes a call gets: `(block_num, rdma_block_num, warp_per_block)`.

MANUAL (default): a per-call value above 0, else the config's. AUTO (`MORI_EP_LAUNCH_CONFIG_MODE=AUTO`): a tuned rule,
else the table below; per-call values are ignored. Sizes describe GPU grids; results never depend on them.
"""

from __future__ import annotations

import dataclasses
import logging
from typing import NamedTuple

import torch

from mori import env, target

from .config import EpDispatchCombineConfig, Limits
from .kernel_types import EpDispatchCombineKernelType as KernelType
from .tuning_config import TuningConfigManager, detect_gpu_model, quant_type_to_config_str
from .tuning_rules import Rule, lookup

# In serving, token counts vary call by call; a few thousand answers cover them.
_CAPACITY = 4096

_log = logging.getLogger(__name__)


class Launch(NamedTuple):
    block_num: int
    rdma_block_num: int
    warp_per_block: int


_TWO_LEVEL = Launch(block_num=96, rdma_block_num=64, warp_per_block=8)
_ONE_LEVEL = Launch(block_num=128, rdma_block_num=0, warp_per_block=16)
AUTO_LAUNCH: dict[KernelType, Launch] = {
    KernelType.IntraNode: _ONE_LEVEL,
    KernelType.IntraNodeLL: _ONE_LEVEL,
    KernelType.InterNode: _ONE_LEVEL,
    KernelType.InterNodeV1: _TWO_LEVEL,
    KernelType.InterNodeV1LL: _TWO_LEVEL,
    KernelType.AsyncLL: _ONE_LEVEL,
}


class LaunchChooser:
    """Chooses the launch sizes of every call of one op.

    mode: "MANUAL" or "AUTO". auto: what calls without a rule get in AUTO mode, None in MANUAL mode. dispatch_rules,
    combine_rules: the tuned rules, None in MANUAL mode and where they could not be looked for.
    ValueError for a malformed MORI_EP_LAUNCH_CONFIG_MODE.
    """

    def __init__(self, config: EpDispatchCombineConfig, limits: Limits) -> None:
        self._config = config
        self._limits = limits
        self.mode = str(env.get("MORI_EP_LAUNCH_CONFIG_MODE"))
        self.auto: Launch | None = None
        self.dispatch_rules: list[Rule] | None = None
        self.combine_rules: list[Rule] | None = None
        self._dispatch: _Tuned | None = None
        self._combine: _Tuned | None = None
        if self.mode == "AUTO":
            self.auto = AUTO_LAUNCH[limits.kernel_type]
            tuned = _load(limits)
            if tuned is not None:
                self.dispatch_rules, self.combine_rules = tuned.dispatch_rules, tuned.combine_rules
                quant_type = quant_type_to_config_str(limits.quant_type)
                if tuned.dispatch_rules:
                    self._dispatch = _Tuned(tuned.dispatch_rules, self.auto, limits.topk)
                if tuned.combine_rules:
                    self._combine = _Tuned(tuned.combine_rules, self.auto, limits.topk, quant_type)

    def dispatch(
        self, input: torch.Tensor, block_num: int = -1, rdma_block_num: int = -1, warp_per_block: int = -1
    ) -> Launch:
        """For a dispatch of `input`, (n, h)."""
        if self._dispatch is None:
            return self.untuned(block_num, rdma_block_num, warp_per_block)
        tokens, hidden = input.shape
        return self._dispatch.choose(input.dtype, tokens, hidden)

    def combine(
        self,
        input: torch.Tensor,
        tokens: int,
        zero_copy: bool,
        block_num: int = -1,
        rdma_block_num: int = -1,
        warp_per_block: int = -1,
    ) -> Launch:
        """For a combine of `input`, (rows, h), whose result has `tokens` rows: those of the last dispatch."""
        if self._combine is None:
            return self.untuned(block_num, rdma_block_num, warp_per_block)
        return self._combine.choose(input.dtype, tokens, input.shape[1], zero_copy)

    def untuned(self, block_num: int = -1, rdma_block_num: int = -1, warp_per_block: int = -1) -> Launch:
        """For a call that no rule is about."""
        if self.auto is not None:
            return self.auto
        config = self._config
        return Launch(
            block_num if block_num > 0 else config.block_num,
            rdma_block_num if rdma_block_num > 0 else config.rdma_block_num,
            warp_per_block if warp_per_block > 0 else config.warp_num_per_block,
        )

    def at_capacity(
        self, is_dispatch: bool, block_num: int = -1, rdma_block_num: int = -1, warp_per_block: int = -1
    ) -> Launch:
        """For the largest call that the config describes: M tokens of H elements of its data_type."""
        dtype, tokens, hidden = self._config.data_type, self._limits.max_tokens, self._limits.hidden_dim
        tuned = self._dispatch if is_dispatch else self._combine
        if tuned is None:
            return self.untuned(block_num, rdma_block_num, warp_per_block)
        return tuned.choose(dtype, tokens, hidden, None if is_dispatch else not self._config.use_external_inp_buf)


class _Tuned:
    """The rules of one phase, and the answers they gave: going through some hundred rules takes longer than a call."""

    def __init__(self, rules: list[Rule], otherwise: Launch, topk: int, quant_type: str | None = None) -> None:
        self._rules = rules
        self._otherwise = otherwise
        self._topk = topk
        self._quant_type = quant_type
        self._known: dict[tuple[torch.dtype, int, int, bool | None], Launch] = {}

    def choose(self, dtype: torch.dtype, tokens: int, hidden: int, zero_copy: bool | None = None) -> Launch:
        call = (dtype, tokens, hidden, zero_copy)
        launch = self._known.get(call)
        if launch is None:
            found = lookup(self._rules, *call, quant_type=self._quant_type, topk=self._topk)
            launch = self._otherwise if found is None else Launch(*dataclasses.astuple(found))
            if len(self._known) >= _CAPACITY:
                self._known.clear()
            self._known[call] = launch
        return launch


def _load(limits: Limits) -> TuningConfigManager | None:
    try:
        model, arch = detect_gpu_model(), target.current().arch
        return TuningConfigManager.get_instance(arch, limits.kernel_type, limits.world_size, model)
    except Exception as error:  # whatever is wrong with tuning, ops can be built without it
        _log.warning("no tuned launch sizes, calls get %s: %r", AUTO_LAUNCH[limits.kernel_type], error)
        return None
