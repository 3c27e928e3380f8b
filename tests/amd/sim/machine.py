"""Runs kernels: all waves of all blocks of all devices take turns, in an order that a seed decides.

Every device has a stream of launches, which run one after the other. A turn is a few instructions of one wave. Between
turns, memory operations under way proceed and caches write back or forget, as the seed has it.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.amd.sim import (
    atomics,
    control,
    conversions,
    lds_ops,
    scalar_alu,
    vector_alu,
    vector_masks,
    vector_moves,
    waits,
)
from tests.amd.sim.block import Block
from tests.amd.sim.caches import Arenas, Cache, Port
from tests.amd.sim.code_object import Kernel
from tests.amd.sim.errors import Refused, SimulationError
from tests.amd.sim.kernargs import kernarg_segment
from tests.amd.sim.memory import Arena, Memory
from tests.amd.sim.program import Program
from tests.amd.sim.table import Execute, Target, bind
from tests.amd.sim.wave import TTMP, WORD, Wave

# Importing them fills the table.
SEMANTICS = (atomics, control, conversions, lds_ops, scalar_alu, vector_alu, vector_masks, vector_moves, waits)

KERNARGS_BASE, KERNARGS_STRIDE = 0x7000_0000_0000, 0x10000
LONGEST_TURN = 24  # instructions
# Some waves fall behind others.
STALL_CHANCE, LATE_START_CHANCE, LONGEST_STALL = 1 / 16, 1 / 4, 64  # per turn, once, and in turns
DISTURBANCE_CHANCE = 1 / 32  # of a block's caches, per turn
MOST_BLOCKS = 1 << 31  # of a grid


class Code:
    """A program, and what executes its instructions; bound when first needed, and kept for other machines."""

    def __init__(self, program: Program) -> None:
        self.program = program
        lanes = {kernel.lanes for kernel in program.kernels.values()}
        if len(lanes) != 1:
            raise ValueError(f"kernels of {sorted(lanes)} lanes in one code object")
        self.target = Target(program.arch, lanes.pop())
        self.executes: list[Execute | None] = [None] * len(program.instructions)

    def index_of(self, address: int) -> int:
        if address not in self.program.index_of:
            raise Refused(f"a jump to {address:#x}, where no instruction begins")
        return self.program.index_of[address]

    def bound(self, index: int) -> Execute:
        execute = self.executes[index]
        if execute is None:
            execute = self.executes[index] = bind(self.program.instructions[index], self.target)
        return execute


@dataclass(frozen=True)
class Launch:
    code: Code
    kernel: str
    blocks: int
    threads: int
    """Per block."""
    arguments: bytes
    dynamic_lds_bytes: int = 0


Work = Launch | Callable[[], Any]
"""What a stream holds: launches, and functions of the host that are called in between."""


class Device:
    """A stream of work, and the cache that its kernels share."""

    def __init__(self, name: str, launches: Sequence[Work]) -> None:
        self.name = name
        self.cache = Cache(Arenas(), "agent")
        self.waiting = deque(launches)
        self.blocks_to_start: deque[int] = deque()
        self.running: list[Block] = []
        self.launch: Launch | None = None
        self.kernargs = 0
        self.launched = 0

    def next_launch(self) -> Launch | None:
        """Calls what is to be called before it. None at the end of the stream."""
        while self.waiting:
            work = self.waiting.popleft()
            if isinstance(work, Launch):
                return work
            work()
        return None


class Machine:
    def __init__(
        self,
        memory: Memory,
        seed: int,
        resident_blocks: int | None = None,
        clock: Callable[[], int] | None = None,
    ) -> None:
        """`resident_blocks`: so many blocks of a device run at a time, the others when those have ended. `clock` tells
        what all clocks show; by default that is the number of instructions executed so far."""
        self.memory = memory
        self.rng = random.Random(seed)
        self.resident_blocks = resident_blocks
        self.cycles = 0
        """Instructions that waves have executed."""
        self.clock = clock or (lambda: self.cycles)
        self._kernargs = 0

    def run(self, *streams: Sequence[Work], most_instructions: int = 5_000_000) -> int:
        """Until all launches are done; the number of instructions that the waves executed."""
        devices = [Device(f"device {number}", stream) for number, stream in enumerate(streams)]
        for code in dict.fromkeys(work.code for stream in streams for work in stream if isinstance(work, Launch)):
            self._load(code)
        start, waves = self.cycles, []
        with np.errstate(all="ignore"):
            while True:
                for device in devices:
                    waves += self._proceed(device)
                waves = [wave for wave in waves if not wave.drained]
                if not waves:
                    return self.cycles - start
                if self.cycles - start > most_instructions:
                    where = "\n".join(wave.place() for wave in waves)
                    raise SimulationError(f"not done after {most_instructions} instructions:\n{where}")
                self._take_turns(waves)

    def _take_turns(self, waves: list[Wave]) -> None:
        """Until something has ended, or for a while."""
        for _ in range(64):
            wave = self.rng.choice(waves)
            try:
                self._turn(wave)
            except SimulationError:
                raise
            except Exception as error:
                raise SimulationError(f"{wave.place()}: {type(error).__name__}: {error}") from error
            if wave.ended:
                return

    def _turn(self, wave: Wave) -> None:
        wave.in_flight.advance()
        if self.rng.random() < DISTURBANCE_CHANCE:
            wave.block.port.disturb(self.rng)
        if wave.ended:
            wave.in_flight.drain()
        if not wave.may_run():
            return
        if self.rng.random() < STALL_CHANCE:
            wave.sleep(self.rng.randrange(LONGEST_STALL))
            return
        code = wave.code
        for _ in range(self.rng.randrange(1, LONGEST_TURN)):
            index = wave.at = wave.pc
            wave.pc = index + 1
            (code.executes[index] or code.bound(index))(wave)
            self.cycles += 1
            if wave.pauses:
                return

    def _load(self, code: Code) -> None:
        program = code.program
        for address, contents, size in program.code_object.segments:
            arena = Arena(f"the code object at {program.base:#x}", program.base + address, size)
            arena.write(0, contents)
            self.memory.add(arena)

    # Launches.

    def _proceed(self, device: Device) -> list[Wave]:
        """Starts what may start; the new waves."""
        for block in [block for block in device.running if block.finished]:
            block.port.write_back("agent")
            device.running.remove(block)
        if not device.running and not device.blocks_to_start:
            if device.launch is not None:
                device.cache.write_back()
                device.launch = None
            launch = device.next_launch()
            if launch is None:
                return []
            device.cache.invalidate()
            self._launch(device, launch)
        started: list[Wave] = []
        while device.blocks_to_start and len(device.running) < (self.resident_blocks or MOST_BLOCKS):
            block = self._start_block(device, device.blocks_to_start.popleft())
            device.running.append(block)
            started += block.waves
        return started

    def _launch(self, device: Device, launch: Launch) -> None:
        kernel = launch.code.program.kernels[launch.kernel]
        segment = kernarg_segment(kernel, launch.arguments, launch.blocks, launch.threads, launch.dynamic_lds_bytes)
        device.kernargs = KERNARGS_BASE + KERNARGS_STRIDE * self._kernargs
        self._kernargs += 1
        arena = Arena(f"the arguments of {launch.kernel} on {device.name}", device.kernargs, len(segment))
        arena.write(0, segment)
        self.memory.add(arena)
        device.launch = launch
        device.launched += 1
        device.blocks_to_start = deque(range(launch.blocks))

    def _start_block(self, device: Device, number: int) -> Block:
        launch = device.launch
        assert launch is not None
        kernel = launch.code.program.kernels[launch.kernel]
        lanes, waves = kernel.lanes, -(-launch.threads // kernel.lanes)
        name = f"{device.name}, launch {device.launched}, {kernel.name}, block {number}"
        port = Port(self.memory, device.cache)
        block = Block(self, name, kernel.lds_bytes + launch.dynamic_lds_bytes, waves, port)
        for index in range(waves):
            enabled = (1 << min(lanes, launch.threads - index * lanes)) - 1
            wave = Wave(block, index, launch.code, kernel, enabled)
            _initial_registers(wave, kernel, launch.code.target, number, device.kernargs)
            if self.rng.random() < LATE_START_CHANCE:
                wave.sleep(self.rng.randrange(LONGEST_STALL))
            block.waves.append(wave)
        return block


def _initial_registers(wave: Wave, kernel: Kernel, target: Target, block: int, kernargs: int) -> None:
    """What the hardware sets before the first instruction. Other registers are undefined."""
    if kernel.flushes_denormals:
        raise Refused(f"{kernel.name} flushes denormals")
    at = 0
    for name, size in kernel.user_sgprs:
        if name == "kernarg_segment_ptr":
            wave.sgpr[at : at + 2] = [kernargs & WORD, kernargs >> 32]
        at += size
    if target.is_gfx9:
        at = kernel.user_sgpr_count
        for position, present in zip((block, 0, 0), kernel.group_id_sgprs, strict=True):
            if present:
                wave.sgpr[at] = position
                at += 1
    else:
        # Cluster, y and z, x of the block.
        wave.sgpr[TTMP + 6], wave.sgpr[TTMP + 7], wave.sgpr[TTMP + 9] = 0, 0, block
    threads = np.arange(wave.lanes, dtype=np.uint32) + np.uint32(wave.index * wave.lanes)
    wave.write_vgpr(0, threads, wave.everyone)
