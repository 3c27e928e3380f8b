"""A running block: its waves, LDS and barrier."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.amd.sim.caches import Port
from tests.amd.sim.errors import Refused
from tests.amd.sim.memory import Arena
from tests.amd.sim.wave import Wave

if TYPE_CHECKING:
    from tests.amd.sim.machine import Machine


class Barrier:
    """Counts its phases. A wave that has ended is not waited for."""

    def __init__(self, waves: int) -> None:
        self.phase = 0
        self._present = waves
        self._arrived = 0

    def signal(self, wave: Wave) -> None:
        if wave.barrier_phase > self.phase:
            raise Refused("a wave signals the barrier again before it has waited")
        wave.barrier_phase = self.phase + 1
        self._arrived += 1
        self._complete()

    def leave(self) -> None:
        self._present -= 1
        self._complete()

    def _complete(self) -> None:
        if self._arrived and self._arrived == self._present:
            self._arrived = 0
            self.phase += 1


class Block:
    def __init__(self, machine: Machine, name: str, lds_bytes: int, waves: int, port: Port) -> None:
        self.machine = machine
        self.name = name
        self.lds = Arena(f"the LDS of {name}", 0, lds_bytes)
        self.barrier = Barrier(waves)
        self.waves: list[Wave] = []
        self.port = port

    @property
    def finished(self) -> bool:
        return all(wave.drained for wave in self.waves)
