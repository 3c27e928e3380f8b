"""Memory operations of a wave that are under way.

An operation touches memory at some moment between its issue and the wait that it is counted in, whenever the seed says
so; operations of a wave that may touch the same bytes keep their order, others do not. What a load brought is in the
registers after the wait only, so that a missing wait is found whatever the seed.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

from tests.amd.sim.errors import Refused

MOST_OUTSTANDING = 63  # of one counter; a wave stalls until the oldest is done


class Space(Enum):
    """Operations in different spaces, or far apart in one, may overtake each other."""

    GLOBAL = 0
    LDS = 1
    SCRATCH = 2
    CONSTANT = 3
    SEVERAL = 4
    RELEASE = 5
    """Stays behind what was issued before; what follows may overtake it, unless there is a wait."""
    ACQUIRE = 6
    """What is issued later stays behind it."""


@dataclass(eq=False)
class Operation:
    counters: set[str]
    """Those that count it and have not been waited for. It is over when none is left."""
    space: Space
    extent: tuple[int, int]
    """First byte that it may touch, and the one behind the last."""
    touch: Callable[[], Any]
    """Accesses memory; what comes out is handed to `deliver`."""
    deliver: Callable[[Any], None] | None
    issued_at: str
    touched: bool = False
    brought: Any = None

    def keeps_behind(self, earlier: Operation) -> bool:
        if self.space is Space.RELEASE or earlier.space is Space.ACQUIRE:
            return True
        if Space.SEVERAL in (self.space, earlier.space):
            return earlier.space is not Space.RELEASE
        return self.space is earlier.space and self.extent[0] < earlier.extent[1] and earlier.extent[0] < self.extent[1]


class InFlight:
    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._operations: list[Operation] = []
        self._untouched = 0

    def __len__(self) -> int:
        return len(self._operations)

    def issue(self, operation: Operation) -> None:
        self._operations.append(operation)
        self._untouched += 1
        for counter in tuple(operation.counters):
            self.wait(counter, MOST_OUTSTANDING)

    def wait(self, counter: str, most: int) -> None:
        """Until at most so many operations of the counter are outstanding."""
        counted = [one for one in self._operations if counter in one.counters]
        if len(counted) <= most:
            return
        if most > 0 and self._returns_in_any_order(counted) and most != MOST_OUTSTANDING:
            return
        done = counted[: len(counted) - most]
        for one in self._rng.sample(done, len(done)):
            self._touch(one)
        for one in done:
            one.counters.discard(counter)
            if one.counters:
                continue
            self._operations.remove(one)
            if one.deliver is not None:
                one.deliver(one.brought)

    def advance(self) -> None:
        """Some operations get to memory, or none."""
        while self._untouched and self._rng.random() < 0.5:
            waiting = [one for one in self._operations if not one.touched]
            self._touch(self._rng.choice(waiting))

    def drain(self) -> None:
        for one in self._operations:
            self._touch(one)
        self._operations.clear()

    @staticmethod
    def _returns_in_any_order(counted: list[Operation]) -> bool:
        """A count above 0 says nothing if scalar loads are among those counted."""
        return any(one.space is Space.CONSTANT for one in counted)

    def _touch(self, operation: Operation) -> None:
        if operation.touched:
            return
        for earlier in self._operations:
            if earlier is operation:
                break
            if not earlier.touched and operation.keeps_behind(earlier):
                self._touch(earlier)
        try:
            operation.brought = operation.touch()
        except Refused as refusal:
            raise Refused(f"{refusal} (by {operation.issued_at})") from None
        operation.touched = True
        self._untouched -= 1
