"""Symbols of an object that is put together by hand, whole and damaged."""

from __future__ import annotations

import struct

import pytest

from mori.jit.elf import cuda_kernels

STRINGS = b"\0add\0helper\0table\0extern\0"


def symbol(name: bytes, kind: int, other: int, section: int = 1) -> bytes:
    return struct.pack("<IBBHQQ", STRINGS.index(b"\0" + name) + 1, 0x10 | kind, other, section, 0, 0)


def cubin() -> bytes:
    """A header, a symbol table, its strings, then the section table."""
    table = symbol(b"add", 2, 0x10) + symbol(b"helper", 2, 0) + symbol(b"table", 1, 0x10)
    table += symbol(b"extern", 2, 0x10, section=0)
    sections_at = 64 + len(table) + len(STRINGS)
    header = bytearray(64)
    header[:6] = b"\x7fELF\x02\x01"
    struct.pack_into("<Q", header, 0x28, sections_at)
    struct.pack_into("<HH", header, 0x3A, 64, 3)
    sections = bytes(64)
    sections += struct.pack("<IIQQQQIIQQ", 0, 2, 0, 0, 64, len(table), 2, 0, 8, 24)
    sections += struct.pack("<IIQQQQIIQQ", 0, 3, 0, 0, 64 + len(table), len(STRINGS), 0, 0, 1, 0)
    return bytes(header) + table + STRINGS + sections


def test_kernels_are_told_from_functions_data_and_what_is_elsewhere() -> None:
    assert cuda_kernels(cubin()) == {"add"}


def test_every_truncation_is_noticed() -> None:
    whole = cubin()
    for length in range(len(whole)):
        with pytest.raises(ValueError):
            cuda_kernels(whole[:length])


@pytest.mark.parametrize("binary", [b"", b"fake code", b"\x7fELF\x01\x01" + bytes(64)])
def test_other_files_are_refused(binary: bytes) -> None:
    with pytest.raises(ValueError, match="no 64-bit ELF object"):
        cuda_kernels(binary)
