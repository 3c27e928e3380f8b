"""Tensors over the regions of an op: equal requests get the same tensor object."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from .engine import EpPlan


class ViewCache:
    """Full-size views by (region, shape, dtype). They own nothing, but keep the mapping of the memory alive.

    Disabled (MORI_EP_DISABLE_VIEW_CACHE), every request makes a new tensor object over the same memory.
    """

    def __init__(self, plan: EpPlan, device: torch.device, enabled: bool = True) -> None:
        self.enabled = enabled
        self._plan = plan
        self._device = device
        self._views: dict[tuple[str, tuple[int, ...], torch.dtype], torch.Tensor] = {}

    def get(self, region: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """The region's first bytes as a contiguous tensor: its row stride is the last dimension given here."""
        if not self.enabled:
            return self.fresh(region, shape, dtype)
        key = (region, shape, dtype)
        view = self._views.get(key)
        if view is None:
            view = self._views[key] = self.fresh(region, shape, dtype)
        return view

    def fresh(self, region: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """As `get`, always a new tensor object. A shape without elements aliases nothing."""
        if 0 in shape:
            return torch.empty(shape, dtype=dtype, device=self._device)
        return self._plan.view(region, shape, dtype)
