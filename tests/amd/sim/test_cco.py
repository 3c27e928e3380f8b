"""The barrier of the device header on simulated devices: what a thread, wave or block wrote before it is what the other
ranks read behind it, whatever the order in which waves run and memory operations arrive."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from mori import _core, jit
from tests.amd.sim.errors import SimulationError
from tests.amd.sim.machine import Code, Launch, Machine
from tests.amd.sim.memory import Arena, Memory
from tests.amd.sim.program import Program
from tests.amd.sim.toolchain import ARCHS, compile_spec
from tests.cco.members import SOURCE, BarrierArguments
from tests.package.commands import ROOT

BASE, STRIDE, SLICE_BYTES = 0x10_0000_0000, 0x1_0000_0000, 0x10000
TWIN = 0x50_0000_0000
WINDOWS, COMM, DATA, MARKS, SLAB = 0x1000, 0x2000, 0x4000, 0x8000, 0xC000
RANKS, BLOCKS, WAVES, LAUNCHES, SEEDS = 2, 2, 2, 2, 2
ROUNDS = 3  # a second launch finds in neither place what it waits for: a stale word is a wrong one
COOPS = ("ccoCoopThread", "ccoCoopWarp", "ccoCoopBlock")


def compiled(arch: str, coop: str, includes: tuple[str | Path, ...] = ("include", ".")) -> Code:
    spec = jit.Spec("barriers", SOURCE, ("barriers",), includes, {"COOP": coop}, target="hip", arch=arch)
    return Code(Program(compile_spec(spec), 0x1_0000_0000))


class Rank:
    def __init__(self, memory: Memory, rank: int, groups: int) -> None:
        self.arena = memory.add(Arena(f"the slice of rank {rank}", BASE + rank * STRIDE, SLICE_BYTES))
        twin = memory.add(Arena(f"the twin of rank {rank}", TWIN + rank * STRIDE, _core.COMM_CONTROL_BYTES))
        for arena in (self.arena, twin):
            arena.write(0, np.zeros(len(arena.bytes), np.uint8))
        self.groups = groups
        self.begin = BASE + rank * STRIDE
        for place, offset in enumerate((DATA, MARKS)):
            window = _core.cco_window(BASE + offset, STRIDE, 0x4000, rank, RANKS)
            self.arena.write(WINDOWS + place * len(window), window)
        self.arena.write(
            COMM,
            _core.cco_device_communicator(
                rank=rank,
                ranks=RANKS,
                base=BASE,
                stride=STRIDE,
                windows=0,
                control=twin.base,
                resource_offset=SLAB,
                resource_bytes=SLICE_BYTES - SLAB,
                barriers=(0, groups),
                hybrid_barriers=(0, 0),
            ),
        )

    def launch(self, code: Code, split: bool) -> Launch:
        windows = self.begin + WINDOWS
        arguments = BarrierArguments(
            self.begin + COMM, windows, windows + _core.CCO_WINDOW_BYTES, 0, ROUNDS, split, False
        )
        threads = WAVES * code.target.lanes
        return Launch(code, "barriers", BLOCKS, threads, bytes(arguments))

    def result(self) -> tuple[list[int], list[int]]:
        """What went wrong by group, and what the last waits returned; then the epochs."""
        marks = self.arena.read(MARKS, 8 * self.groups).view(np.uint32)
        return marks.tolist(), self.arena.read(SLAB, 4 * self.groups).view(np.uint32).tolist()


def run(code: Code, coop: str, seed: int, split: bool) -> None:
    per_block = {"ccoCoopThread": WAVES * code.target.lanes, "ccoCoopWarp": WAVES, "ccoCoopBlock": 1}
    groups = BLOCKS * per_block[coop]
    memory = Memory()
    ranks = [Rank(memory, rank, groups) for rank in range(RANKS)]
    Machine(memory, seed).run(*([rank.launch(code, split)] * LAUNCHES for rank in ranks))
    for rank in ranks:
        assert rank.result() == ([0, 0] * groups, [ROUNDS * LAUNCHES] * groups)


@pytest.mark.parametrize("coop", COOPS)
@pytest.mark.parametrize("arch", ARCHS)
def test_what_was_written_before_is_read_behind(arch: str, coop: str) -> None:
    code = compiled(arch, coop)
    for seed in range(SEEDS):
        run(code, coop, seed, split=bool(seed % 2))


MISSING = {
    "the release of every wave": ("    Target::release_wave();\n    coop.sync();\n    Target::release_system();\n", ""),
    "the acquire": ("Target::acquire_system();\n    return missing;", "return missing;"),
    "the wait": ("!missing && !arrived(word)", "false"),
}


@pytest.mark.parametrize("what", MISSING)
def test_what_is_left_out_shows(what: str, tmp_path: Path) -> None:
    """The header without one of the things that it is made of."""
    for folder in ("device", "include", "layout"):
        shutil.copytree(ROOT / "csrc" / folder, tmp_path / folder)
    header = tmp_path / "include" / "mori" / "cco.hpp"
    whole, (text, instead) = header.read_text(), MISSING[what]
    assert whole.count(text) == 1
    broken = whole.replace(text, instead)
    if what == "the acquire":
        broken = broken.replace("    Target::acquire_wave();\n", "")
    header.write_text(broken)
    code = compiled("gfx942", "ccoCoopBlock", (tmp_path / "include", tmp_path))
    with pytest.raises((AssertionError, SimulationError)):
        for seed in range(20):
            run(code, "ccoCoopBlock", seed, split=False)
