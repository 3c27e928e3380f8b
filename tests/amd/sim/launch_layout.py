"""Launch structs as bytes, laid out as csrc/layout/launch.hpp has them: the offsets come from a C++ compiler."""

from __future__ import annotations

import ctypes
from functools import cached_property
from pathlib import Path

from mori.ops.engine import EpShape
from tests.package.commands import compile_cxx

SOURCE = Path(__file__).with_name("launch_layout.cpp")


class Field(ctypes.Structure):
    launch: bytes
    name: bytes
    offset: int
    bytes: int
    _fields_ = [
        ("launch", ctypes.c_char_p),
        ("name", ctypes.c_char_p),
        ("offset", ctypes.c_uint64),
        ("bytes", ctypes.c_uint64),
    ]


class LaunchLayout:
    def __init__(self, folder: Path) -> None:
        output = folder / "launch_layout.so"
        built = compile_cxx(SOURCE.read_text(encoding="utf-8"), "-fPIC", "-shared", "-o", str(output))
        if built.returncode != 0:
            raise RuntimeError(built.stderr)
        self._core = ctypes.CDLL(str(output))
        self._core.launch_fields.restype = ctypes.POINTER(Field)
        for name in ("launch_field_count", "launch_bytes", "division_by", "summary_offset", "live_offset"):
            self._core[name].restype = ctypes.c_uint64
        for name in ("control_bytes", "lds_bytes"):
            self._core[name].restype = ctypes.c_uint64

    @cached_property
    def fields(self) -> dict[str, dict[str, tuple[int, int]]]:
        """Per struct and name: offset and bytes."""
        found: dict[str, dict[str, tuple[int, int]]] = {"DispatchArgs": {}, "CombineArgs": {}}
        table = self._core.launch_fields()
        for field in (table[index] for index in range(self._core.launch_field_count())):
            found[field.launch.decode()][field.name.decode()] = field.offset, field.bytes
        return found

    def bytes_of(self, launch: str) -> int:
        return int(self._core.launch_bytes(launch == "CombineArgs"))

    def pack(self, launch: str, values: dict[str, int | bytes]) -> bytes:
        """All fields, no others."""
        fields = self.fields[launch]
        if fields.keys() != values.keys():
            raise KeyError(f"{launch}: {sorted(fields.keys() ^ values.keys())} are missing or unknown")
        packed = bytearray(self.bytes_of(launch))
        for name, (offset, size) in fields.items():
            value = values[name]
            raw = value if isinstance(value, bytes) else value.to_bytes(size, "little")
            if len(raw) != size:
                raise ValueError(f"{launch}.{name} has {size} bytes, not {len(raw)}")
            packed[offset : offset + size] = raw
        return bytes(packed)

    def divider(self, divisor: int) -> int:
        return int(self._core.division_by(divisor))

    def summary_offset(self, world_size: int) -> int:
        return int(self._core.summary_offset(world_size))

    def lds_bytes(self, shape: EpShape, warps: int, launch: str) -> int:
        return int(self._core.lds_bytes(shape.world_size, shape.topk, warps, launch == "CombineArgs"))

    @property
    def live_offset(self) -> int:
        return int(self._core.live_offset())

    @property
    def control_bytes(self) -> int:
        return int(self._core.control_bytes())
