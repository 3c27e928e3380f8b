"""Numbers that callers pass: sizes, ranks, addresses. A float or a string among them must not get into an allocator."""

from __future__ import annotations

from operator import index
from typing import Any


def whole(value: Any, name: str) -> int:
    """`value` as an int, which integers of other libraries become. TypeError for anything else, bools included."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{name} must be an int, got {value!r}")
    return index(value)
