"""When operations reach memory, and which caches keep them from being seen."""

from __future__ import annotations

import random

import numpy as np
import pytest

from tests.amd.sim.caches import Arenas, Cache, Port
from tests.amd.sim.errors import Refused
from tests.amd.sim.in_flight import MOST_OUTSTANDING, InFlight, Operation, Space
from tests.amd.sim.memory import Arena, Memory

BASE = 0x1000
HERE = np.array([BASE], np.uint64)


class Log:
    """Operations note in which order they touch memory and are over."""

    def __init__(self, seed: int = 0) -> None:
        self.in_flight = InFlight(random.Random(seed))
        self.touched: list[str] = []
        self.over: list[str] = []

    def issue(self, name: str, counter: str = "vm", space: Space = Space.GLOBAL, first: int = 0, size: int = 4) -> None:
        self.in_flight.issue(
            Operation(
                counters={counter},
                space=space,
                extent=(first, first + size),
                touch=lambda: self.touched.append(name),
                deliver=lambda _: self.over.append(name),
                issued_at="here",
            )
        )


def orders(issue: object, seeds: int = 40) -> set[tuple[str, ...]]:
    found = set()
    for seed in range(seeds):
        log = Log(seed)
        issue(log)  # type: ignore[operator]
        for _ in range(4):
            log.in_flight.advance()
        log.in_flight.wait("vm", 0)
        found.add(tuple(log.touched))
    return found


def test_operations_that_have_nothing_to_do_with_one_another_overtake() -> None:
    def issue(log: Log) -> None:
        log.issue("a", first=0)
        log.issue("b", first=100)

    assert orders(issue) == {("a", "b"), ("b", "a")}


def test_operations_on_the_same_bytes_keep_their_order() -> None:
    def issue(log: Log) -> None:
        log.issue("a", first=0)
        log.issue("b", first=2)

    assert orders(issue) == {("a", "b")}


def test_a_release_stays_behind_and_an_acquire_ahead() -> None:
    def release(log: Log) -> None:
        log.issue("store", first=0)
        log.issue("release", space=Space.RELEASE)
        log.issue("flag", first=100)

    found = orders(release)
    assert all(order.index("store") < order.index("release") for order in found)
    assert any(order.index("flag") < order.index("release") for order in found)  # nobody waited

    def acquire(log: Log) -> None:
        log.issue("acquire", space=Space.ACQUIRE)
        log.issue("load", first=0)

    assert orders(acquire) == {("acquire", "load")}


def test_a_count_is_the_number_of_the_youngest_that_may_be_outstanding() -> None:
    log = Log()
    for number in range(5):
        log.issue(str(number), first=100 * number)
    log.in_flight.wait("vm", 2)
    assert log.over == ["0", "1", "2"]
    log.in_flight.wait("lgkm", 0)
    assert log.over == ["0", "1", "2"]


def test_a_full_counter_makes_the_oldest_finish() -> None:
    log = Log()
    for number in range(MOST_OUTSTANDING + 2):
        log.issue(str(number), first=100 * number)
    assert log.over == ["0", "1"]


def test_a_problem_names_the_instruction_that_caused_it() -> None:
    def touch() -> None:
        raise Refused("out of bounds")

    in_flight = InFlight(random.Random(0))
    in_flight.issue(Operation({"vm"}, Space.GLOBAL, (0, 4), touch, None, "kernel+0x40: flat_load"))
    with pytest.raises(Refused, match=r"out of bounds \(by kernel\+0x40: flat_load\)"):
        in_flight.wait("vm", 0)


class Machine:
    """Two devices; two blocks on the first, one on the second."""

    def __init__(self) -> None:
        self.memory = Memory()
        self.arena = self.memory.add(Arena("words", BASE, 1024))
        self.arena.write(0, np.zeros(1024, np.uint8))
        device, other = Cache(Arenas(), "agent"), Cache(Arenas(), "agent")
        self.first, self.second = Port(self.memory, device), Port(self.memory, device)
        self.remote = Port(self.memory, other)


def store(port: Port, value: int, scope: str = "wave") -> None:
    port.store(HERE, np.array([[value]], np.uint8), scope)


def load(port: Port, scope: str = "wave") -> int:
    return int(port.load(HERE, 1, scope)[0, 0])


@pytest.mark.parametrize(
    "scope, neighbour, peer", [("wave", 0, 0), ("workgroup", 0, 0), ("agent", 5, 0), ("system", 5, 5)]
)
def test_a_store_is_seen_as_far_as_its_scope_reaches(scope: str, neighbour: int, peer: int) -> None:
    machine = Machine()
    store(machine.first, 5, scope)
    assert load(machine.first) == 5
    assert load(machine.second, "agent") == neighbour
    assert load(machine.remote, "system") == peer


@pytest.mark.parametrize("scope, neighbour, peer", [("workgroup", 0, 0), ("agent", 5, 0), ("system", 5, 5)])
def test_a_release_reaches_the_members_of_its_scope(scope: str, neighbour: int, peer: int) -> None:
    machine = Machine()
    store(machine.first, 5)
    machine.first.write_back(scope)
    assert load(machine.second, "agent") == neighbour
    assert load(machine.remote, "system") == peer


@pytest.mark.parametrize("scope, seen", [("workgroup", 0), ("agent", 0), ("system", 5)])
def test_a_stale_line_is_seen_until_an_acquire_drops_it(scope: str, seen: int) -> None:
    machine = Machine()
    assert load(machine.remote) == 0  # brings the whole line
    store(machine.first, 5, "system")
    assert load(machine.remote) == 0
    machine.remote.invalidate(scope)
    assert load(machine.remote) == seen
    assert load(machine.remote, "system") == 5


def test_an_acquire_keeps_what_was_written_here() -> None:
    machine = Machine()
    store(machine.first, 5)
    machine.first.invalidate("system")
    assert load(machine.first) == 5
    rng = random.Random(3)
    for _ in range(20):
        machine.first.disturb(rng)
        assert load(machine.first) == 5
    assert load(machine.remote, "system") == 5  # written back by chance


def test_an_access_past_a_cache_takes_along_what_lies_there() -> None:
    machine = Machine()
    store(machine.first, 5)
    assert load(machine.first, "system") == 5
    store(machine.first, 6, "system")
    assert load(machine.first) == 6


def test_atomics_of_several_blocks_add_up() -> None:
    machine = Machine()
    for port, scope in (
        (machine.first, "agent"),
        (machine.second, "agent"),
        (machine.first, "system"),
        (machine.remote, "system"),
    ):
        port.atomic(BASE, 4, scope, lambda old: old + 1)
    assert machine.arena.read(0, 4).view(np.uint32)[0] == 4


def test_what_is_undefined_stays_so_in_caches() -> None:
    machine = Machine()
    machine.memory.add(Arena("blank", 0x9000, 256))
    blank = np.array([0x9000], np.uint64)
    machine.first.store(blank + np.uint64(1), np.array([[1]], np.uint8), "wave")
    with pytest.raises(Refused, match="byte 0 of blank is read, but was never written"):
        machine.first.load(blank, 2, "wave")


def test_overlapping_memory_is_a_mistake() -> None:
    memory = Memory()
    memory.add(Arena("a", 100, 50))
    with pytest.raises(ValueError, match="b at 0x78 overlaps a"):
        memory.add(Arena("b", 120, 10))


def test_the_host_reads_and_writes_inside_only() -> None:
    arena = Arena("a", 100, 8)
    arena.write(0, np.array([7], np.uint32))
    assert arena.read(0, 4).view(np.uint32)[0] == 7
    with pytest.raises(Refused, match="byte 4 of a is read"):
        arena.read(0, 8)
    for access in (lambda: arena.read(5, 4), lambda: arena.write(-1, b"x")):
        with pytest.raises(IndexError, match="of a, which has 8"):
            access()
