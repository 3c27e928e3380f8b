"""The state of one wave: registers, and which of them may be read.

A vector register is a column of `vgpr`, so that the words of a wide value lie side by side. `blocked[i]` has a bit for
every lane of v[i] that holds no value yet, because nobody wrote one or because a load is still under way (`awaited`
counts those). Reading the latter is refused. Compilers do compute with undefined values, of which they then use no
part, so what is computed from one is undefined too; refused is what lets it matter: an address, a comparison, a store.
An SGPR that is not an integer is `Partly` defined, or AWAITED while a load is under way. Compilers keep masks of lanes
in SGPRs of which only the bits of some lanes were ever written, so those are known bit by bit.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tests.amd.sim.errors import Refused, UndefinedScalar
from tests.amd.sim.in_flight import InFlight

if TYPE_CHECKING:
    from tests.amd.sim.block import Block
    from tests.amd.sim.code_object import Kernel
    from tests.amd.sim.machine import Code

VCC, TTMP, M0, SGPRS = 106, 108, 124, 128
WORD = 0xFFFFFFFF


class Partly(NamedTuple):
    """A word with bits that nobody wrote; those are 0 in `value`."""

    value: int
    unknown: int


UNDEFINED = Partly(0, WORD)
AWAITED = "AWAITED"
NEVER_WRITTEN = "was never written"
STILL_LOADED = "is being loaded: a wait is missing"


def partly(value: int, unknown: int) -> int | Partly:
    return Partly(value & ~unknown, unknown) if unknown else value


@functools.lru_cache(maxsize=4096)
def lanes_of(mask: int, lanes: int) -> NDArray[np.bool_]:
    """The bits of a mask as one bool per lane. Not to be written to: it is shared."""
    raw = np.frombuffer(mask.to_bytes(lanes // 8, "little"), np.uint8)
    bits = np.unpackbits(raw, bitorder="little").astype(bool)
    bits.flags.writeable = False
    return bits


def mask_of(lanes: NDArray[np.bool_]) -> int:
    return int.from_bytes(np.packbits(lanes, bitorder="little").tobytes(), "little")


class Wave:
    def __init__(self, block: Block, index: int, code: Code, kernel: Kernel, enabled: int) -> None:
        self.block = block
        self.index = index
        self.code = code
        self.lanes = lanes = kernel.lanes
        vgprs, scratch_bytes = kernel.vgprs, kernel.scratch_bytes
        self.everyone = (1 << lanes) - 1
        self.sgpr: list[Any] = [UNDEFINED] * SGPRS
        self.vgpr = np.zeros((lanes, vgprs), np.uint32)
        self.blocked = [self.everyone] * vgprs
        self.awaited: dict[int, int] = {}
        self.tainted_low = self.tainted_high = 0
        self._taint_reason = ""
        self.scc: Any = UNDEFINED
        self.scratch = np.zeros((lanes, scratch_bytes), np.uint8)
        self.scratch_defined = np.zeros((lanes, scratch_bytes), bool)
        self.in_flight = InFlight(block.machine.rng)
        self.pc = code.index_of(kernel.entry + code.program.base)
        self.at = self.pc
        """The instruction in hand; `pc` is the one after it."""
        self.barrier_phase = 0
        self._awaits_barrier = False
        self._asleep = 0
        self.ended = False
        self.set_exec(enabled)

    # Control.

    @property
    def pauses(self) -> bool:
        """Something else has its turn before this wave goes on."""
        return self._awaits_barrier or self._asleep > 0 or self.ended

    @property
    def drained(self) -> bool:
        """Ended, with nothing on its way to memory."""
        return self.ended and len(self.in_flight) == 0

    def may_run(self) -> bool:
        """By the scheduler, once per turn: a sleep is a number of turns."""
        if self._awaits_barrier and self.block.barrier.phase >= self.barrier_phase:
            self._awaits_barrier = False
        if self._asleep > 0:
            self._asleep -= 1
        return not self.pauses

    def jump(self, address: int) -> None:
        self.pc = self.code.index_of(address)

    def await_barrier(self) -> None:
        self._awaits_barrier = self.block.barrier.phase < self.barrier_phase

    def sleep(self, turns: int) -> None:
        self._asleep = turns

    def finish(self) -> None:
        self.ended = True
        self.block.barrier.leave()

    def place(self) -> str:
        one = self.code.program.instructions[self.at]
        return f"{self.block.name}, wave {self.index}, {self.code.program.place(one.address)}: {one.text}"

    def set_exec(self, mask: int) -> None:
        self.exec = mask
        self.active = lanes_of(mask, self.lanes)

    # Scalar registers.

    def read_sgpr(self, index: int) -> int:
        value = self.sgpr[index]
        if value.__class__ is not int:
            raise self._no_value(index)
        return value

    def read_sgpr_pair(self, index: int) -> int:
        return self.read_sgpr(index) | self.read_sgpr(index + 1) << 32

    def known_bits(self, index: int) -> tuple[int, int]:
        """The word, and a mask of its undefined bits."""
        value = self.sgpr[index]
        if value is AWAITED:
            raise self._no_value(index)
        return value if isinstance(value, Partly) else (value, 0)

    def _no_value(self, index: int) -> Refused:
        if self.sgpr[index] is AWAITED:
            return Refused(f"{sgpr_name(index)} {STILL_LOADED}")
        return UndefinedScalar(f"{sgpr_name(index)} {NEVER_WRITTEN}")

    def write_sgpr(self, index: int, value: Any) -> None:
        """`value` is a word, or one that is partly defined."""
        if self.sgpr[index] is AWAITED:
            raise Refused(f"{sgpr_name(index)} is written while a load into it is under way")
        self.sgpr[index] = value

    def read_scc(self) -> int:
        if self.scc.__class__ is not int:
            raise Refused(f"SCC {NEVER_WRITTEN}")
        return self.scc

    # Vector registers.

    def check(self, index: int, count: int, mask: int) -> None:
        """Refuses to read lanes of v[index : index + count] that hold no value."""
        for register in range(index, index + count):
            if missing := self.blocked[register] & mask:
                raise Refused(self.missing(register, missing))

    def taint(self, register: int, mask: int, low: bool = True, high: bool = True) -> None:
        """Notes that the instruction in hand has read undefined lanes, for the low or the high word of its result."""
        if missing := self.blocked[register] & mask:
            if register in self.awaited:
                raise Refused(self.missing(register, missing))
            self.tainted_low |= missing * low
            self.tainted_high |= missing * high
            self._taint_reason = self.missing(register, missing)

    def take_taint(self) -> tuple[int, int]:
        found = self.tainted_low, self.tainted_high
        self.tainted_low = self.tainted_high = 0
        return found

    def refuse_taint(self) -> None:
        if any(self.take_taint()):
            raise Refused(self._taint_reason)

    def missing(self, register: int, lanes: int) -> str:
        lane = (lanes & -lanes).bit_length() - 1
        why = STILL_LOADED if register in self.awaited else NEVER_WRITTEN
        return f"lane {lane} of v{register} {why}"

    def begin_write(self, index: int, count: int, mask: int) -> None:
        for register in range(index, index + count):
            if register in self.awaited:
                raise Refused(f"v{register} is written while a load into it is under way")
            self.blocked[register] &= ~mask

    def write_vgpr(self, index: int, value: Any, mask: int) -> None:
        """One word per lane, or one for all lanes, into the lanes of `mask`."""
        self.begin_write(index, 1, mask)
        if mask == self.everyone:
            self.vgpr[:, index] = value
        else:
            np.copyto(self.vgpr[:, index], value, where=lanes_of(mask, self.lanes))

    def write_vgpr_pair(self, index: int, value: Any, mask: int) -> None:
        self.begin_write(index, 2, mask)
        pair = self.vgpr[:, index : index + 2].view(np.uint64)[:, 0]
        np.copyto(pair, value, where=lanes_of(mask, self.lanes))

    def await_vgprs(self, index: int, count: int, mask: int) -> None:
        for register in range(index, index + count):
            self.awaited[register] = self.awaited.get(register, 0) + 1
            self.blocked[register] |= mask

    def deliver_vgprs(self, index: int, words: NDArray[np.uint32], mask: int, undefined: NDArray[np.bool_]) -> None:
        """What a load brought: words [lanes in the mask, count], and which of them hold no value."""
        count = words.shape[1]
        lanes = np.flatnonzero(lanes_of(mask, self.lanes))
        self.vgpr[lanes, index : index + count] = words
        for word, register in enumerate(range(index, index + count)):
            self.awaited[register] -= 1
            if self.awaited[register] == 0:
                del self.awaited[register]
            self.blocked[register] &= ~mask
            if undefined.size and undefined[:, word].any():
                still = np.zeros(self.lanes, bool)
                still[lanes[undefined[:, word]]] = True
                self.blocked[register] |= mask_of(still)


def sgpr_name(index: int) -> str:
    if index in (VCC, VCC + 1):
        return f"vcc_{'hi' if index > VCC else 'lo'}"
    if index == M0:
        return "m0"
    return f"ttmp{index - TTMP}" if index >= TTMP else f"s{index}"
