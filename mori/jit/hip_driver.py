"""`_hip`, the HIP runtime as a ctypes library. Importing this module raises ImportError where there is none."""

from __future__ import annotations

import ctypes

_NAMES = ("libamdhip64.so", "libamdhip64.so.7", "libamdhip64.so.6")


def _load() -> ctypes.CDLL:
    for name in _NAMES:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise ImportError(f"there is no HIP runtime: the loader finds none of {', '.join(_NAMES)}")


_hip = _load()
