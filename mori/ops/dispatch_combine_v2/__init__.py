"""EPv2: dispatch and combine over an explicit communicator of `mori.cco`. Importing this loads no kernel backend."""

from __future__ import annotations

from .config import EpDispatchCombineConfig

__all__ = ["EpDispatchCombineConfig"]
