"""Expert-parallel operators: two APIs, `dispatch_combine` (v1) and `dispatch_combine_v2`, over one engine (`engine`).

Each loads when one of its names is first used: v2 needs nothing of v1 or of mori.shmem.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import dispatch_combine_v2
    from .dispatch_combine import EpDispatchCombineConfig, EpDispatchCombineKernelType, EpDispatchCombineOp
    from .local_expert_count import launch_local_expert_count

__all__ = [
    "EpDispatchCombineConfig",
    "EpDispatchCombineKernelType",
    "EpDispatchCombineOp",
    "dispatch_combine_v2",
    "launch_local_expert_count",
]

_HOMES = {
    "EpDispatchCombineConfig": "dispatch_combine",
    "EpDispatchCombineKernelType": "dispatch_combine",
    "EpDispatchCombineOp": "dispatch_combine",
    "launch_local_expert_count": "local_expert_count",
}
_MODULES = ("dispatch_combine", "dispatch_combine_v2")


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"{__name__}.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
