"""Exhaustive breadth-first search over the states of a small concurrent system.

The system says what its states are; this module only walks them.  Breadth first, so that the counter-example
handed back is a shortest one.
"""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Hashable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol, TypeVar

State = TypeVar("State", bound=Hashable)


class Violation(Exception):
    """A step that breaks a property of the system: `label` is the step, the message says what it broke."""

    def __init__(self, message: str, label: str = "") -> None:
        super().__init__(message)
        self.label = label


class System(Protocol[State]):
    def initial(self) -> State: ...

    def steps(self, state: State) -> Iterable[tuple[str, State]]:
        """Every step possible in `state` as (label, next state); raises Violation when one breaks a property."""
        ...

    def complaint(self, state: State) -> str | None:
        """What is wrong with stopping in `state`, which has no steps (a deadlock, a wrong outcome), or None."""
        ...


@dataclass(frozen=True)
class CounterExample:
    message: str
    trace: tuple[str, ...]

    def __str__(self) -> str:
        lines = (f"  {number:3} {label}" for number, label in enumerate(self.trace, 1))
        return "\n".join([self.message, *lines])


@dataclass(frozen=True)
class Result:
    states: int
    transitions: int
    counter_example: CounterExample | None


class StateLimit(Exception):
    """The search met more states than it was allowed to keep: use a smaller program or raise `max_states`."""


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """States hold no cycles, and there are many: the collector would walk all of them again and again."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@no_garbage_collection()
def explore(system: System[State], max_states: int = 400_000) -> Result:
    """Visits every reachable state once; stops at the first state or step that breaks a property."""
    start = system.initial()
    parents: dict[State, tuple[State, str] | None] = {start: None}
    queue = deque([start])
    transitions = 0

    def trace(state: State, *last: str) -> tuple[str, ...]:
        labels = list(last)
        while (link := parents[state]) is not None:
            state, label = link
            labels.append(label)
        return tuple(reversed(labels))

    def found(message: str, labels: tuple[str, ...]) -> Result:
        return Result(len(parents), transitions, CounterExample(message, labels))

    while queue:
        state = queue.popleft()
        moved = False
        try:
            for label, successor in system.steps(state):
                moved = True
                transitions += 1
                if successor not in parents:
                    parents[successor] = (state, label)
                    queue.append(successor)
        except Violation as violation:
            return found(str(violation), trace(state, violation.label))
        if not moved and (complaint := system.complaint(state)) is not None:
            return found(complaint, trace(state))
        if len(parents) > max_states:
            raise StateLimit(f"{len(parents)} states, {max_states} allowed: shorten the program or raise max_states")
    return Result(len(parents), transitions, None)
