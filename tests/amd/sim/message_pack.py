"""Reads MessagePack, the form of a code object's metadata."""

from __future__ import annotations

import struct
from typing import Any

FIXED = {
    0xCA: ">f",
    0xCB: ">d",
    0xCC: ">B",
    0xCD: ">H",
    0xCE: ">I",
    0xCF: ">Q",
    0xD0: ">b",
    0xD1: ">h",
    0xD2: ">i",
    0xD3: ">q",
}
LENGTHS = {
    0xC4: (">B", "bytes"),
    0xC5: (">H", "bytes"),
    0xC6: (">I", "bytes"),
    0xD9: (">B", "text"),
    0xDA: (">H", "text"),
    0xDB: (">I", "text"),
    0xDC: (">H", "list"),
    0xDD: (">I", "list"),
    0xDE: (">H", "map"),
    0xDF: (">I", "map"),
}
CONSTANTS = {0xC0: None, 0xC2: False, 0xC3: True}


def unpack(packed: bytes) -> Any:
    value, end = _value(packed, 0)
    if end != len(packed):
        raise ValueError(f"{len(packed) - end} bytes follow the value")
    return value


def _value(packed: bytes, at: int) -> tuple[Any, int]:
    first, at = packed[at], at + 1
    if first < 0x80:
        return first, at
    if first >= 0xE0:
        return first - 0x100, at
    if first < 0x90:
        return _several(packed, at, "map", first & 0xF)
    if first < 0xA0:
        return _several(packed, at, "list", first & 0xF)
    if first < 0xC0:
        return _several(packed, at, "text", first & 0x1F)
    if first in CONSTANTS:
        return CONSTANTS[first], at
    if first in FIXED:
        (value,) = struct.unpack_from(FIXED[first], packed, at)
        return value, at + struct.calcsize(FIXED[first])
    if first in LENGTHS:
        form, kind = LENGTHS[first]
        (count,) = struct.unpack_from(form, packed, at)
        return _several(packed, at + struct.calcsize(form), kind, count)
    raise ValueError(f"MessagePack type {first:#x} is not read here")


def _several(packed: bytes, at: int, kind: str, count: int) -> tuple[Any, int]:
    if kind in ("bytes", "text"):
        raw = packed[at : at + count]
        return raw.decode() if kind == "text" else raw, at + count
    items = []
    for _ in range(count * (2 if kind == "map" else 1)):
        item, at = _value(packed, at)
        items.append(item)
    return dict(zip(items[::2], items[1::2], strict=True)) if kind == "map" else items, at
