"""Which kernels a code object holds, read from its symbol table: enough of ELF for 64-bit little-endian objects."""

from __future__ import annotations

import struct
from collections.abc import Iterator

_SYMBOL_TABLE = 2
_FUNCTION = 2
_OBJECT = 1
_CUDA_ENTRY = 0x10  # in st_other: can be launched, as opposed to a device function that was not inlined
_HIDDEN = 2  # in st_other: not offered to others
_AMD_MACHINE = 224
_AMD_DESCRIPTOR = ".kd"  # behind a kernel's name: the record that a launch starts from


def cuda_kernels(binary: bytes) -> set[str]:
    """Symbol names of the kernels in a cubin. ValueError if it is none."""
    return {name for name, kind, other in _symbols(binary) if kind == _FUNCTION and other & _CUDA_ENTRY}


def amd_kernels(binary: bytes) -> set[str]:
    """Names of the kernels in a code object for AMD GPUs. ValueError if it is none."""
    symbols = list(_symbols(binary))
    (machine,) = struct.unpack_from("<H", binary, 0x12)
    if machine != _AMD_MACHINE:
        raise ValueError(f"no code object for AMD GPUs: an ELF object for machine {machine}")
    described = (name for name, kind, _ in symbols if kind == _OBJECT and name.endswith(_AMD_DESCRIPTOR))
    return {name[: -len(_AMD_DESCRIPTOR)] for name in described}


def host_kernels(binary: bytes) -> set[str]:
    """Names of the functions that a shared object for CPUs offers. ValueError if it is none."""
    return {name for name, kind, other in _symbols(binary) if kind == _FUNCTION and other & _HIDDEN == 0}


def _symbols(binary: bytes) -> Iterator[tuple[str, int, int]]:
    """(name, type, st_other) of every symbol that is defined here."""
    if binary[:6] != b"\x7fELF\x02\x01":
        raise ValueError(f"no 64-bit ELF object: begins with {binary[:6]!r}")
    try:
        (table,) = struct.unpack_from("<Q", binary, 0x28)
        entry_bytes, count = struct.unpack_from("<HH", binary, 0x3A)
        sections = [struct.unpack_from("<IIQQQQIIQQ", binary, table + entry_bytes * i) for i in range(count)]
        for _, kind, _, _, offset, size, link, _, _, _ in sections:
            if kind != _SYMBOL_TABLE:
                continue
            strings = binary[sections[link][4] :][: sections[link][5]]
            for at in range(offset, offset + size, 24):
                name, info, other, section = struct.unpack_from("<IBBH", binary, at)
                if section:
                    yield strings[name : strings.index(b"\0", name)].decode(), info & 0xF, other
    except (struct.error, IndexError) as error:
        raise ValueError(f"damaged ELF object of {len(binary)} bytes: {error}") from None
