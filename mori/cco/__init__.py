"""Explicit communicators: a unique id, `Communicator.init`, symmetric memory, windows, what kernels need of them.

docs/cco.md is the guide. `device` compiles and launches kernels, `cco` is a thin interface of functions.
"""

from __future__ import annotations

import importlib
from typing import Any

# What the package exports, and where it lives: loaded on first access, so that bootstrap needs no native module.
_HOMES = {
    "AllocatedMemory": "resources",
    "CCODevCommRequirements": "requirements",
    "CCOResource": "resources",
    "Comm": "cco",
    "Communicator": "communicator",
    "DevComm": "cco",
    "DevCommHandle": "dev_comm",
    "DevCommRequirements": "cco",
    "GDA_CONNECTION_CROSSNODE": "requirements",
    "GDA_CONNECTION_FULL": "requirements",
    "GDA_CONNECTION_NONE": "requirements",
    "GDA_CONNECTION_RAIL": "requirements",
    "ImportedWindow": "windows",
    "RegisteredWindow": "windows",
    "UniqueId": "unique_id",
    "barrier_all": "cco",
    "comm_create": "cco",
    "comm_destroy": "cco",
    "communicator_of_window": "windows",
    "dev_comm_create": "cco",
    "dev_comm_destroy": "cco",
    "get_unique_id": "unique_id",
    "mem_alloc": "cco",
    "mem_free": "cco",
    "window_deregister": "cco",
    "window_register": "cco",
    "window_register_ptr": "cco",
}

__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
