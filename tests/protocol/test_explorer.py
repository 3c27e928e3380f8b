"""The protocol holds in every interleaving of the programs, and in none once a step is taken out."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from . import combine, dispatch, machine, turn
from .explorer import StateLimit, Violation, explore
from .machine import Machine
from .program import Program
from .programs import BY_NAME, CORRECT, FULL, MISUSE
from .steps import NAMES, SPARE_STEPS, STEPS, SpareStep, Step

MODEL_FILES = [Path(str(module.__file__)) for module in (machine, turn, dispatch, combine)]
# the methods of a turn that stand for a step of the protocol: their first argument is its name
NAMED_METHODS = {"send", "parity", "release", "acquire", "waited_for", "arrive", "performed_here"}
SPARE_PROGRAMS = (
    "DDX split",
    "SS and DS split",
    "DXXX",
    "DXXDX, rank 1 receives nothing at first",
    "DXDX, 3 uneven ranks",
    "SXXS",
    "dispatch meets second combine",
    "one of 3 ranks combines",
)
SPARE_DEATHS = (
    "rank 1 dies",
    "rank 1 dies, zero copy",
    "rank 1 dies, staged",
    "rank 2 of 3 dies, staged",
    "dispatch meets combine",
)


def by_name(value: object) -> str:
    return getattr(value, "name", str(value))


@pytest.mark.parametrize("program", CORRECT, ids=by_name)
def test_every_interleaving_is_correct(program: Program) -> None:
    result = explore(Machine(program))
    assert result.counter_example is None, f"\n{result.counter_example}"


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("program", FULL, ids=by_name)
def test_every_interleaving_of_more_ranks_and_blocks_is_correct(program: Program) -> None:
    result = explore(Machine(program), max_states=2_000_000)
    assert result.counter_example is None, f"\n{result.counter_example}"


@pytest.mark.parametrize("step", STEPS, ids=by_name)
def test_no_step_can_be_left_out(step: Step) -> None:
    result = explore(Machine(BY_NAME[step.fails], without=step.name))
    assert result.counter_example is not None, f"{step.fails!r} is still correct without {step.name}"
    assert step.how in result.counter_example.message


@pytest.mark.parametrize("step", SPARE_STEPS, ids=by_name)
def test_spare_steps_are_spare(step: SpareStep) -> None:
    """A reason in the table that stops being true is found here."""
    for name in SPARE_DEATHS if step.in_deaths else SPARE_PROGRAMS:
        result = explore(Machine(BY_NAME[name], without=step.name))
        assert result.counter_example is None, f"{step.name} is needed: {name}\n{result.counter_example}"


@pytest.mark.parametrize("program", MISUSE, ids=by_name)
def test_misuse_corrupts_rows(program: Program) -> None:
    counter_example = explore(Machine(program)).counter_example
    assert counter_example is not None
    assert "combine_in rows" in counter_example.message


def test_the_table_holds_every_step_of_the_model() -> None:
    used: set[str] = set()
    for path in MODEL_FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                if re.fullmatch(r"[a-z]+\.[a-z_]+", node.value) and not node.value.endswith(".py"):
                    used.add(node.value)
    assert used == set(NAMES)
    assert len(NAMES) == len(set(NAMES))


@pytest.mark.parametrize("path", MODEL_FILES[2:], ids=by_name)
def test_every_access_of_the_model_names_its_step(path: Path) -> None:
    calls = [
        node
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in NAMED_METHODS
    ]
    assert calls
    for call in calls:
        name = call.args[0]
        assert isinstance(name, ast.Constant) and name.value in NAMES, f"{path.name}:{call.lineno}"


def test_a_step_must_exist_to_be_left_out() -> None:
    with pytest.raises(ValueError, match=r"wait\.nothing"):
        Machine(BY_NAME["D"], without="wait.nothing")


class Corridor:
    """Two people walk past each other through doors 0..3; `trap` is a door that one must not open."""

    def __init__(self, trap: int | None = None, locked: int | None = None) -> None:
        self.trap, self.locked = trap, locked

    def initial(self) -> tuple[int, int]:
        return (0, 0)

    def steps(self, state: tuple[int, int]) -> list[tuple[str, tuple[int, int]]]:
        found = []
        for walker in (0, 1):
            door = state[walker] + 1
            if door == self.trap:
                raise Violation(f"door {door}", f"walker {walker} opens door {door}")
            if door <= 3 and door != self.locked:
                doors = (door, state[1]) if walker == 0 else (state[0], door)
                found.append((f"walker {walker} opens door {door}", doors))
        return found

    def complaint(self, state: tuple[int, int]) -> str | None:
        return None if state == (3, 3) else f"stuck at {state}"


def test_search_visits_every_state_once() -> None:
    result = explore(Corridor())
    assert (result.states, result.transitions, result.counter_example) == (16, 24, None)


def test_search_finds_a_shortest_violation() -> None:
    counter_example = explore(Corridor(trap=2)).counter_example
    assert counter_example is not None
    assert counter_example.trace == ("walker 0 opens door 1", "walker 0 opens door 2")
    assert str(counter_example).splitlines()[0] == "door 2"


def test_search_finds_a_deadlock() -> None:
    counter_example = explore(Corridor(locked=3)).counter_example
    assert counter_example is not None
    assert counter_example.message == "stuck at (2, 2)"
    assert len(counter_example.trace) == 4


def test_search_says_when_it_is_not_exhaustive() -> None:
    with pytest.raises(StateLimit, match="10 allowed"):
        explore(Corridor(), max_states=10)
