"""Explicit communicators: a unique id, `Communicator.init`, symmetric memory and windows."""

from __future__ import annotations

import importlib
from typing import Any

# What the package exports, and where it lives: loaded on first access, so that bootstrap needs no native module.
_HOMES = {
    "AllocatedMemory": "resources",
    "CCOResource": "resources",
    "Communicator": "communicator",
    "RegisteredWindow": "resources",
    "UniqueId": "unique_id",
    "communicator_of_window": "resources",
    "get_unique_id": "unique_id",
}

__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
