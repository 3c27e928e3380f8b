"""Executes single instructions, written as in a listing, on one wave."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.amd.sim.block import Block
from tests.amd.sim.caches import Arenas, Cache, Port
from tests.amd.sim.code_object import Kernel
from tests.amd.sim.machine import Machine
from tests.amd.sim.memory import Arena, Memory
from tests.amd.sim.operands import Kind, parse_operand
from tests.amd.sim.program import Instruction, parse
from tests.amd.sim.table import Target, bind
from tests.amd.sim.wave import WORD, Wave

LDS_BYTES, SCRATCH_BYTES, VGPRS = 1024, 64, 32
LANES = {"gfx942": 64, "gfx950": 64, "gfx1250": 32}


def _pair(index: int) -> str:
    return f"s[{index}:{index + 1}]"


class Bench:
    """Registers are set and read by name: `bench["v[2:3]"] = values` (64-bit values for two registers)."""

    def __init__(self, arch: str, seed: int = 0, executed: set[str] | None = None) -> None:
        """Texts that ran are noted in `executed`."""
        self.target = Target(arch, LANES[arch])
        self.memory = Memory()
        self.machine = Machine(self.memory, seed)
        self._executed = set() if executed is None else executed
        lanes = self.target.lanes
        self.block = Block(self.machine, "bench", LDS_BYTES, 1, Port(self.memory, Cache(Arenas(), "agent")))
        kernel = Kernel("bench", 0, LDS_BYTES, SCRATCH_BYTES, 0, (0, 0, 0), 0, VGPRS, 102, lanes, ())
        program = SimpleNamespace(base=0, instructions=[Instruction("bench", "")], place=lambda address: "here")
        code: Any = SimpleNamespace(program=program, index_of=lambda address: address)
        self.wave = Wave(self.block, 0, code, kernel, (1 << lanes) - 1)
        self.block.waves.append(self.wave)

    def __call__(self, *texts: str) -> Bench:
        """Executes. A text may stand for two, "gfx9 | gfx12". {vcc}, {exec} and {s4} are masks of the arch's width."""
        for both in texts:
            text = self.text(both)
            self._executed.add(text)
            with np.errstate(all="ignore"):
                bind(parse(text), self.target)(self.wave)
            assert self.wave.take_taint() == (0, 0), f"{text} leaves its taint to another instruction"
        return self

    def text(self, both: str) -> str:
        choices = both.split(" | ")
        chosen = choices[0 if self.target.is_gfx9 else -1]
        wide = self.target.lanes == 64
        chosen = re.sub(r"\{s(\d+)\}", lambda found: _pair(int(found[1])) if wide else f"s{found[1]}", chosen)
        return chosen.replace("{vcc}", "vcc" if wide else "vcc_lo").replace("{exec}", "exec" if wide else "exec_lo")

    def __setitem__(self, name: str, value: Any) -> None:
        operand, wave = parse_operand(self.text(name)), self.wave
        if operand.kind is Kind.EXEC:
            wave.set_exec(value)
        elif operand.kind is Kind.SGPR:
            for word in range(operand.count):
                wave.sgpr[operand.index + word] = int(value) >> 32 * word & WORD
        else:
            kind = {1: np.uint32, 2: np.uint64}[operand.count]
            values = np.broadcast_to(np.asarray(value), (wave.lanes,))
            bits = values.view(kind) if values.dtype.kind == "f" else values.astype(kind)
            (wave.write_vgpr if operand.count == 1 else wave.write_vgpr_pair)(operand.index, bits, wave.everyone)

    def __getitem__(self, name: str) -> Any:
        operand, wave = parse_operand(self.text(name)), self.wave
        if operand.kind is Kind.EXEC:
            return wave.exec
        if operand.kind is Kind.SCC:
            return wave.read_scc()
        if operand.kind is Kind.SGPR:
            return sum(wave.read_sgpr(operand.index + word) << 32 * word for word in range(operand.count))
        wave.check(operand.index, operand.count, wave.everyone)
        words = np.ascontiguousarray(wave.vgpr[:, operand.index : operand.index + operand.count])
        return words.view({1: np.uint32, 2: np.uint64}.get(operand.count, np.uint32)).squeeze(
            axis=1 if operand.count < 3 else ()
        )

    def floats(self, name: str) -> NDArray[np.float32]:
        return self[name].view(np.float32)

    def give(self, values: NDArray[Any], base: int = 0x1000_0000) -> Arena:
        arena = self.memory.add(Arena("given", base, values.nbytes))
        arena.write(0, values)
        return arena

    def reserve(self, size: int, base: int = 0x2000_0000) -> Arena:
        """Memory that nobody wrote."""
        return self.memory.add(Arena("reserved", base, size))

    def settle(self) -> None:
        """Everything reaches memory."""
        self.wave.in_flight.drain()
        self.block.port.write_back("system")
