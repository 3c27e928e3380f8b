"""The state of one wave: registers, and which of them may be read.

A vector register is a column of `vgpr`, so that the words of a wide value lie side by side. `blocked[i]` has a bit for
every lane of v[i] that holds no value yet, because nobody wrote one or because a load is still under way (`awaited`
counts those). Moves pass an undefined lane on; whatever computes with one is refused. An SGPR that holds no value is
UNDEFINED, one whose load is under way AWAITED.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tests.amd.sim.errors import Refused
from tests.amd.sim.in_flight import InFlight

if TYPE_CHECKING:
    from tests.amd.sim.block import Block
    from tests.amd.sim.code_object import Kernel
    from tests.amd.sim.machine import Code

VCC, TTMP, M0, SGPRS = 106, 108, 124, 128
WORD = 0xFFFFFFFF


class NoValue:
    def __init__(self, why: str) -> None:
        self.why = why


UNDEFINED = NoValue("was never written")
AWAITED = NoValue("is being loaded: a wait is missing")


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
        self._asleep = min(turns, 4)

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
            raise Refused(f"{sgpr_name(index)} {value.why}")
        return value  # type: ignore[no-any-return]

    def read_sgpr_pair(self, index: int) -> int:
        return self.read_sgpr(index) | self.read_sgpr(index + 1) << 32

    def write_sgpr(self, index: int, value: Any) -> None:
        """`value` is a word, or UNDEFINED."""
        if self.sgpr[index] is AWAITED:
            raise Refused(f"{sgpr_name(index)} is written while a load into it is under way")
        self.sgpr[index] = value

    def read_scc(self) -> int:
        if self.scc.__class__ is not int:
            raise Refused(f"SCC {self.scc.why}")
        return self.scc  # type: ignore[no-any-return]

    # Vector registers.

    def check(self, index: int, count: int, mask: int) -> None:
        """Refuses to read lanes of v[index : index + count] that hold no value."""
        for register in range(index, index + count):
            if missing := self.blocked[register] & mask:
                raise Refused(self.missing(register, missing))

    def missing(self, register: int, lanes: int) -> str:
        lane = (lanes & -lanes).bit_length() - 1
        why = AWAITED.why if register in self.awaited else UNDEFINED.why
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
