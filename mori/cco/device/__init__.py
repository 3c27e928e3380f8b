"""Kernels of users on symmetric memory: compiled for where a communicator lives, and launched there.

A kernel is C++ that includes `mori/cco.hpp` and is written once for all targets. docs/cco.md shows how.
"""

from __future__ import annotations

from mori.cco.device.kernels import Kernel, compile

__all__ = ["Kernel", "compile"]
