"""Operands: from their text in a listing to functions that read or write them in a wave."""

from __future__ import annotations

import functools
import re
import struct
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import numpy as np

from tests.amd.sim.errors import Refused, Unknown
from tests.amd.sim.wave import M0, TTMP, VCC, WORD, Wave, partly

# Where flat addresses reach a block's LDS and a lane's scratch memory: the upper halves of such addresses.
SHARED_APERTURE, PRIVATE_APERTURE = 0x0001_0000 << 32, 0x0002_0000 << 32

Read = Callable[[Wave], Any]
Write = Callable[[Wave, Any], None]


class Type(Enum):
    """Name, words per lane, numpy type."""

    U32 = ("u32", 1, np.uint32)
    I32 = ("i32", 1, np.int32)
    F32 = ("f32", 1, np.float32)
    U64 = ("u64", 2, np.uint64)
    I64 = ("i64", 2, np.int64)
    F64 = ("f64", 2, np.float64)

    def __init__(self, label: str, words: int, dtype: Any) -> None:
        self.label = label
        self.words = words
        self.dtype = dtype

    @property
    def is_float(self) -> bool:
        return self.label.startswith("f")


class Kind(Enum):
    SGPR = "sgpr"
    VGPR = "vgpr"
    EXEC = "exec"
    SCC = "scc"
    CONSTANT = "constant"
    NULL = "null"


@dataclass(frozen=True)
class Operand:
    kind: Kind
    index: int = 0
    count: int = 1
    """Of registers. EXEC: 2 for both halves, else 1 and `index` says which."""
    value: Any = 0
    negative: bool = False
    absolute: bool = False
    signed: bool = False
    """Of an SDWA operand: its part is sign-extended."""


NAMED = {
    "vcc": Operand(Kind.SGPR, VCC, 2),
    "vcc_lo": Operand(Kind.SGPR, VCC),
    "vcc_hi": Operand(Kind.SGPR, VCC + 1),
    "m0": Operand(Kind.SGPR, M0),
    "exec": Operand(Kind.EXEC, 0, 2),
    "exec_lo": Operand(Kind.EXEC, 0),
    "exec_hi": Operand(Kind.EXEC, 1),
    "scc": Operand(Kind.SCC),
    "src_scc": Operand(Kind.SCC),
    "null": Operand(Kind.NULL),
    "src_shared_base": Operand(Kind.CONSTANT, value=SHARED_APERTURE),
    "src_private_base": Operand(Kind.CONSTANT, value=PRIVATE_APERTURE),
    # gfx1250 makes a flat address of one in scratch memory by adding this, and the lane's number at bit 52.
    "src_flat_scratch_base_lo": Operand(Kind.CONSTANT, value=PRIVATE_APERTURE),
    "src_flat_scratch_base_hi": Operand(Kind.CONSTANT, value=PRIVATE_APERTURE >> 32),
}
REGISTERS = re.compile(r"(s|v|ttmp)(?:(\d+)|\[(\d+):(\d+)\])$")
WHOLE = re.compile(r"-?(0x[0-9a-f]+|\d+)$")
REAL = re.compile(r"-?\d+\.\d+$")
WRAPPED = re.compile(r"(abs|neg|sext)\((.*)\)$")


@functools.cache
def parse_operand(text: str) -> Operand:
    if text in NAMED:
        return NAMED[text]
    if found := REGISTERS.match(text):
        first = int(found[2] or found[3])
        count = 1 if found[2] else int(found[4]) - first + 1
        if found[1] == "v":
            return Operand(Kind.VGPR, first, count)
        return Operand(Kind.SGPR, first + (TTMP if found[1] == "ttmp" else 0), count)
    if WHOLE.match(text):
        return Operand(Kind.CONSTANT, value=int(text, 0))
    if REAL.match(text):
        return Operand(Kind.CONSTANT, value=float(text))
    if wrapped := WRAPPED.match(text):
        inner = parse_operand(wrapped[2])
        return {
            "abs": replace(inner, absolute=True),
            "neg": replace(inner, negative=True),
            "sext": replace(inner, signed=True),
        }[wrapped[1]]
    if text.startswith("-"):
        return replace(parse_operand(text[1:]), negative=True)
    if text.startswith("|") and text.endswith("|"):
        return replace(parse_operand(text[1:-1]), absolute=True)
    raise Unknown(f"operand {text!r}")


def constant_bits(value: Any, words: int) -> int:
    """The bits of an inline constant or literal in an operand of 1 or 2 words."""
    if isinstance(value, float):
        form = "<f" if words == 1 else "<d"
        return int.from_bytes(struct.pack(form, value), "little")
    return int(value) & ((1 << 32 * words) - 1)


# Scalar operands: Python integers.


def scalar_source(text: str, bits: int = 32) -> Read:
    operand = parse_operand(text)
    index, wide = operand.index, bits == 64
    if operand.negative or operand.absolute:
        raise Unknown(f"scalar operand {text!r}")
    if operand.kind is Kind.SGPR:
        if wide and operand.count != 2:
            raise Unknown(f"{text!r} as an operand of 64 bits")
        return (lambda wave: wave.read_sgpr_pair(index)) if wide else (lambda wave: wave.read_sgpr(index))
    if operand.kind is Kind.EXEC:
        if operand.count == 2 or wide:
            return lambda wave: wave.exec
        return lambda wave: wave.exec >> 32 * index & WORD
    if operand.kind is Kind.SCC:
        return lambda wave: wave.read_scc()
    if operand.kind is Kind.CONSTANT:
        bits_of_constant = constant_bits(operand.value, bits // 32)
        return lambda wave: bits_of_constant
    if operand.kind is Kind.NULL:
        return lambda wave: 0
    raise Unknown(f"scalar operand {text!r}")


KnownBits = Callable[[Wave], tuple[int, int]]


def known_bits(text: str, bits: int = 32) -> KnownBits:
    """Reads a value and a mask of its undefined bits, which are 0 in the value."""
    operand = parse_operand(text)
    if operand.kind is not Kind.SGPR:
        read = scalar_source(text, bits)
        return lambda wave: (read(wave), 0)
    index = operand.index
    if bits == 32:
        return lambda wave: wave.known_bits(index)

    def pair(wave: Wave) -> tuple[int, int]:
        (low, low_unknown), (high, high_unknown) = wave.known_bits(index), wave.known_bits(index + 1)
        return low | high << 32, low_unknown | high_unknown << 32

    return pair


def scalar_destination(text: str, bits: int = 32) -> Write:
    operand = parse_operand(text)
    index = operand.index
    if operand.kind is Kind.SGPR:
        if bits == 32:
            return lambda wave, value: wave.write_sgpr(index, value & WORD)

        def write(wave: Wave, value: int) -> None:
            wave.write_sgpr(index, value & WORD)
            wave.write_sgpr(index + 1, value >> 32 & WORD)

        return write
    if operand.kind is Kind.EXEC:
        return functools.partial(_write_exec, operand=operand)
    if operand.kind is Kind.NULL:
        return lambda wave, value: None
    raise Unknown(f"scalar destination {text!r}")


def _write_exec(wave: Wave, value: int, *, operand: Operand) -> None:
    if operand.count == 2:
        wave.set_exec(value & wave.everyone)
    elif operand.index == 0:
        wave.set_exec(wave.exec >> 32 << 32 | value & WORD)
    elif wave.lanes == 64:
        wave.set_exec(wave.exec & WORD | (value & WORD) << 32)


def known_bits_destination(text: str, bits: int = 32) -> Callable[[Wave, int, int], None]:
    """Writes a value some bits of which may be undefined."""
    operand, whole = parse_operand(text), scalar_destination(text, bits)

    def write(wave: Wave, value: int, unknown: int) -> None:
        if not unknown:
            whole(wave, value)
        elif operand.kind is not Kind.SGPR:
            raise Refused(f"an undefined value for {text}")
        else:
            for word in range(bits // 32):
                shift = 32 * word
                wave.write_sgpr(operand.index + word, partly(value >> shift & WORD, unknown >> shift & WORD))

    return write


# Vector operands: one numpy element per lane, or a single one for all.


def vector_source(text: str, kind: Type) -> Read:
    """Reads the lanes that are switched on; the others are whatever they are. Undefined lanes taint the instruction,
    so whoever reads has to take or refuse the taint."""
    operand = parse_operand(text)
    if operand.signed:
        raise Unknown(f"{text!r} outside SDWA")
    read = _vector_source(text, operand, kind)
    if not operand.negative and not operand.absolute:
        return read
    if not kind.is_float:
        raise Unknown(f"{text!r} as {kind.label}")
    if operand.absolute:
        return (lambda wave: -np.abs(read(wave))) if operand.negative else (lambda wave: np.abs(read(wave)))
    return lambda wave: -read(wave)


def _vector_source(text: str, operand: Operand, kind: Type) -> Read:
    index, dtype = operand.index, kind.dtype
    if operand.kind is Kind.VGPR:
        if operand.count != kind.words:
            raise Unknown(f"{text!r} as {kind.label}")
        if kind.words == 1:

            def word(wave: Wave) -> Any:
                if wave.blocked[index] & wave.exec:
                    wave.taint(index, wave.exec)
                return wave.vgpr[:, index].view(dtype)

            return word

        def pair(wave: Wave) -> Any:
            if (wave.blocked[index] | wave.blocked[index + 1]) & wave.exec:
                wave.taint(index, wave.exec, high=False)
                wave.taint(index + 1, wave.exec, low=False)
            return wave.vgpr[:, index : index + 2].view(dtype)[:, 0]

        return pair
    unsigned = np.uint32 if kind.words == 1 else np.uint64
    if operand.kind is Kind.CONSTANT:
        if kind is Type.F64 and isinstance(operand.value, int) and operand.value > 64:
            raise Unknown(f"literal {text!r} as f64")
        constant = unsigned(constant_bits(operand.value, kind.words)).view(dtype)
        return lambda wave: constant
    scalar = scalar_source(text, 32 * kind.words)
    return lambda wave: unsigned(scalar(wave)).view(dtype)


def lane_mask_source(text: str) -> KnownBits:
    """A bit per lane, of VCC, EXEC or SGPRs, and which of these are undefined."""
    operand = parse_operand(text)
    if operand.kind is Kind.CONSTANT:
        return lambda wave: (constant_bits(operand.value, 2) & wave.everyone, 0)
    return known_bits(text, 32 * operand.count)


def lane_mask_destination(text: str) -> Write:
    return scalar_destination(text, 32 * parse_operand(text).count)


def vgpr_of(text: str, count: int | None = None) -> int:
    """The number of the vector register, or of the first."""
    operand = parse_operand(text)
    if operand.kind is not Kind.VGPR or operand.negative or operand.absolute:
        raise Unknown(f"{text!r} where a vector register is needed")
    if count is not None and operand.count != count:
        raise Unknown(f"{text!r} where {count} vector registers are needed")
    return operand.index


def sgpr_of(text: str) -> tuple[int, int]:
    """Number of the first scalar register, and how many."""
    operand = parse_operand(text)
    if operand.kind is not Kind.SGPR:
        raise Unknown(f"{text!r} where scalar registers are needed")
    return operand.index, operand.count
