"""Expert-parallel operators: the v1 API (`dispatch_combine`) over the one engine (`engine`)."""

from __future__ import annotations

from .dispatch_combine import EpDispatchCombineConfig, EpDispatchCombineKernelType, EpDispatchCombineOp
from .local_expert_count import launch_local_expert_count

__all__ = [
    "EpDispatchCombineConfig",
    "EpDispatchCombineKernelType",
    "EpDispatchCombineOp",
    "launch_local_expert_count",
]
