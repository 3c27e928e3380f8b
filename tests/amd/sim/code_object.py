"""What a code object says of itself: bytes to be loaded, symbols, kernel descriptors, kernarg layout.

ELF and the kernel descriptor are described in LLVM's "User Guide for AMDGPU Backend".
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from tests.amd.sim.message_pack import unpack

LOADABLE, NOTE, SYMBOL_TABLE = 1, 4, 2
METADATA_NOTE = 32


class Symbol(NamedTuple):
    address: int
    bytes: int


class Argument(NamedTuple):
    kind: str
    offset: int
    bytes: int


@dataclass(frozen=True)
class Kernel:
    """A kernel descriptor, with what the metadata adds to it."""

    name: str
    entry: int
    lds_bytes: int
    scratch_bytes: int
    kernarg_bytes: int
    resources: tuple[int, int, int]
    """COMPUTE_PGM_RSRC1, 2 and 3."""
    properties: int
    vgprs: int
    sgprs: int
    lanes: int
    arguments: tuple[Argument, ...]

    @property
    def user_sgprs(self) -> tuple[tuple[str, int], ...]:
        """Names and sizes of what is in the first SGPRs, in order."""
        order = [
            ("private_segment_buffer", 4),
            ("dispatch_ptr", 2),
            ("queue_ptr", 2),
            ("kernarg_segment_ptr", 2),
            ("dispatch_id", 2),
            ("flat_scratch_init", 2),
            ("private_segment_size", 1),
        ]
        return tuple(entry for bit, entry in enumerate(order) if self.properties >> bit & 1)

    @property
    def argument_bytes(self) -> int:
        """Without what the compiler asks the launch to add."""
        own = [one for one in self.arguments if not one.kind.startswith("hidden_")]
        return max((one.offset + one.bytes for one in own), default=0)

    @property
    def user_sgpr_count(self) -> int:
        return self.resources[1] >> 1 & 31

    @property
    def group_id_sgprs(self) -> tuple[bool, bool, bool]:
        """Whether the block's x, y and z follow the user SGPRs."""
        return tuple(bool(self.resources[1] >> bit & 1) for bit in (7, 8, 9))  # type: ignore[return-value]

    @property
    def flushes_denormals(self) -> bool:
        """The mode of f32 or of f64 and f16 at the start."""
        return self.resources[0] >> 16 & 0xF != 0xF


class CodeObject:
    def __init__(self, binary: bytes) -> None:
        if binary[:6] != b"\x7fELF\x02\x01":
            raise ValueError(f"no 64-bit ELF object: begins with {binary[:6]!r}")
        self.binary = binary

    @cached_property
    def segments(self) -> list[tuple[int, bytes, int]]:
        """(address, contents, bytes in memory) of all that is loaded."""
        return [
            (address, self.binary[offset : offset + stored], size)
            for kind, _, offset, address, _, stored, size, _ in self._program_headers()
            if kind == LOADABLE
        ]

    @cached_property
    def symbols(self) -> dict[str, Symbol]:
        (table,) = struct.unpack_from("<Q", self.binary, 0x28)
        entry, count = struct.unpack_from("<HH", self.binary, 0x3A)
        sections = [struct.unpack_from("<IIQQQQIIQQ", self.binary, table + entry * i) for i in range(count)]
        found = {}
        for _, kind, _, _, offset, size, link, _, _, _ in sections:
            if kind != SYMBOL_TABLE:
                continue
            strings = sections[link][4]
            for at in range(offset, offset + size, 24):
                name, _, _, section, value, length = struct.unpack_from("<IBBHQQ", self.binary, at)
                if section and name:
                    end = self.binary.index(b"\0", strings + name)
                    found[self.binary[strings + name : end].decode()] = Symbol(value, length)
        return found

    @cached_property
    def metadata(self) -> dict[str, Any]:
        for kind, _, offset, _, _, stored, _, _ in self._program_headers():
            if kind != NOTE:
                continue
            name_bytes, bytes_, note = struct.unpack_from("<III", self.binary, offset)
            if note == METADATA_NOTE and name_bytes <= stored:
                at = offset + 12 + (name_bytes + 3) // 4 * 4
                return unpack(self.binary[at : at + bytes_])
        raise ValueError("the code object has no metadata")

    @cached_property
    def arch(self) -> str:
        return str(self.metadata["amdhsa.target"]).rpartition("--")[2].partition(":")[0]

    @cached_property
    def kernels(self) -> dict[str, Kernel]:
        return {said[".name"]: self._kernel(said) for said in self.metadata["amdhsa.kernels"]}

    def read(self, address: int, count: int) -> bytes:
        for start, contents, size in self.segments:
            if start <= address and address + count <= start + size:
                return contents[address - start :][:count].ljust(count, b"\0")
        raise ValueError(f"no {count} bytes at {address:#x} in the code object")

    def _program_headers(self) -> list[tuple[int, ...]]:
        (table,) = struct.unpack_from("<Q", self.binary, 0x20)
        entry, count = struct.unpack_from("<HH", self.binary, 0x36)
        return [struct.unpack_from("<IIQQQQQQ", self.binary, table + entry * i) for i in range(count)]

    def _kernel(self, said: dict[str, Any]) -> Kernel:
        descriptor = self.symbols[said[".symbol"]].address
        raw = self.read(descriptor, 64)
        lds, scratch, kernargs = struct.unpack_from("<III", raw, 0)
        (entry,) = struct.unpack_from("<q", raw, 16)
        third, first, second, properties = struct.unpack_from("<IIIH", raw, 44)
        return Kernel(
            name=said[".name"],
            entry=descriptor + entry,
            lds_bytes=lds,
            scratch_bytes=scratch,
            kernarg_bytes=kernargs,
            resources=(first, second, third),
            properties=properties,
            vgprs=said[".vgpr_count"] + said.get(".agpr_count", 0),
            sgprs=said[".sgpr_count"],
            lanes=said[".wavefront_size"],
            arguments=tuple(Argument(a[".value_kind"], a[".offset"], a[".size"]) for a in said.get(".args", ())),
        )
