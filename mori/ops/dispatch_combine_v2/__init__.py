"""EPv2: dispatch and combine over an explicit communicator of `mori.cco`. Importing this loads no kernel backend."""

from __future__ import annotations

from .config import EpDispatchCombineConfig
from .dispatch_combine_op import EpDispatchCombineOp
from .routing import EpDispatchRoutingHandle

__all__ = ["EpDispatchCombineConfig", "EpDispatchCombineOp", "EpDispatchRoutingHandle"]
