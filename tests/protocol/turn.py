"""The memory of all ranks, and what one block of one kernel may do to it.

A step of the explorer is one access to a word (or to the kernel's own counters) together with the row accesses next
to it.  Rows need no steps of their own because every unordered pair of row accesses is found by happens-before:

* `known` of a block is the set of row locations whose newest content it may read or overwrite.  Writing a location
  takes it out of everybody else's sets, out of what the writer has released, and out of every word in memory.
* A release copies `known` to `released`; a word stored afterwards carries `released` along.
* A wait collects what its words carry in `heard`; its acquire adds that to `known`.

So a store may become visible as late as its release, a load may run as early as its acquire, and a row touched outside
these bounds is torn, lost or stale in some execution: a violation here, whatever value the row happens to hold.
Count, block count and entered words are relaxed: they carry nothing.

Every word sent, waited for, fenced, checked or given a parity goes through a method that takes the step's name;
`without` removes that one step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from .explorer import Violation
from .program import Program

if TYPE_CHECKING:
    from .machine import Machine

State = tuple[Any, ...]

# areas of rows: dispatch out, combine in, weight rows of combine in, landing by parity (its slots are the sources)
OUT, ROWS, WEIGHTS, LANDING = 0, 1, 2, 3
# a kernel's own counters, which the closing of a call resets for the next: blocks that started (of a dispatch), blocks
# that arrived, chunks claimed; then whether a block gave up because of the abort word; and what the block that closed
# the call left behind, (complete, rows received, slots of the own rows)
STARTED, ARRIVED, CLAIMED, GAVE_UP, RECORD = range(5)
IDLE_KERNEL = (0, 0, 0, 0, None)
LOST, OUT_OF_STEP = 1, 100  # abort causes; LOST + rank is a dead rank

# a block that takes no step of this call any more, or of any call
BLOCK_DONE, RANK_ENDED = "done", "ended"

CALL_BITS, CARRIED_AT = 8, 24  # a word: what it carries | call number | value


class Layout:
    """Where each word and row lies in the flat state tuple.  Words that the program never sends take no room."""

    def __init__(self, program: Program) -> None:
        ranks, self.ranks, self.blocks = program.ranks, program.ranks, program.blocks
        combines = any(set(program.calls_of(rank)) - {"D"} for rank in program.live)
        self.locations = (5 if program.staged else 3) * ranks * ranks
        self.count = self.locations
        self.blocks_word = self.count + 2 * ranks**3
        self.entered = self.blocks_word + 2 * ranks**2
        self.header = self.entered + combines * 2 * ranks**2  # from here on words carry rows
        self.rows = self.header + 2 * ranks**2
        self.ready = self.rows + 2 * ranks**2 * self.blocks
        self.abort = self.ready + combines * 2 * ranks**3
        self.alive = self.abort + ranks
        self.rank = self.alive + ranks
        self.kernel = self.rank + ranks
        self.block = self.kernel + ranks
        self.cells = self.block + ranks * self.blocks

    def row(self, area: int, rank: int, slot: int) -> int:
        return (area * self.ranks + rank) * self.ranks + slot

    def word(self, base: int, at: int, parity: int, source: int, index: int = 0, width: int = 1) -> int:
        return base + ((at * 2 + parity) * self.ranks + source) * width + index

    def count_word(self, at: int, parity: int, source: int, column: int) -> int:
        return self.word(self.count, at, parity, source, column, self.ranks)

    def rows_word(self, at: int, parity: int, source: int, block: int) -> int:
        return self.word(self.rows, at, parity, source, block, self.blocks)

    def ready_word(self, at: int, parity: int, source: int, chunk: int) -> int:
        return self.word(self.ready, at, parity, source, chunk, self.ranks)


# what a block does in a step, and the choices it has there
Handler = tuple[Callable[..., bool], tuple[int, ...]]


def value_of(word: int) -> int:
    return word & (1 << CALL_BITS) - 1


def call_of(word: int) -> int:
    return (word & (1 << CARRIED_AT) - 1) >> CALL_BITS


class Turn:
    """One block taking one step on a copy of the state."""

    def __init__(self, machine: Machine, state: State, rank: int, block: int) -> None:
        self.machine, self.has, self.at, self.program = machine, machine.has, machine.layout, machine.program
        self.cells = list(state)
        self.rank, self.block = rank, block
        own = self.at.block + rank * self.at.blocks + block
        self.step, self.detail, self.known, self.released = state[own]
        self.heard = 0
        self.index, self.last_kind, self.received, self.slots = state[self.at.rank + rank]
        self.call = self.index + 1 + machine.offset[rank]
        self.what = ""  # the step in words

    @property
    def place(self) -> tuple[int, int]:
        return self.index, self.rank

    @property
    def grid(self) -> int:
        return self.program.grid(self.index, self.rank)

    # -- rows ---------------------------------------------------------------------------------------------------

    def write(self, area: int, rank: int, slot: int, value: int) -> None:
        if area < LANDING and slot >= (capacity := self.program.receive_capacity):
            raise Violation(f"rank {self.rank} writes slot {slot} of rank {rank}, which has {capacity}")
        location = self.at.row(area, rank, slot)
        bit = 1 << location
        if not self.known & bit:
            raise Violation(f"{self.name_of(location)} is overwritten, unordered with the write of its present content")
        cells, at = self.cells, self.at
        carried = ~(bit << CARRIED_AT)
        for cell in range(at.header, at.abort):
            if cells[cell]:
                cells[cell] &= carried
        for cell in range(at.block, at.cells):
            step, detail, known, released = cells[cell]
            cells[cell] = (step, detail, known & ~bit, released & ~bit)
        self.released &= ~bit
        cells[location] = value

    def read(self, area: int, rank: int, slot: int, expected: int) -> None:
        location = self.at.row(area, rank, slot)
        value = self.cells[location]
        if value != expected:
            raise Violation(f"{self.name_of(location)} holds {row_name(value)}, wanted {row_name(expected)}")
        if not self.known >> location & 1:
            raise Violation(f"{self.name_of(location)} is read, unordered with the write of {row_name(value)}")

    def name_of(self, location: int) -> str:
        area, rest = divmod(location, self.at.ranks**2)
        rank, slot = divmod(rest, self.at.ranks)
        names = ("dispatch_out", "combine_in rows", "combine_in weights", "landing area 0", "landing area 1")
        return f"{names[area]} of rank {rank}, slot {slot},"

    # -- fences -------------------------------------------------------------------------------------------------

    def release(self, name: str) -> None:
        if self.has[name]:
            self.released = self.known

    def acquire(self, name: str) -> None:
        """Through the words just heard, and no others."""
        if self.has[name]:
            self.known |= self.heard
        self.heard = 0

    # -- words --------------------------------------------------------------------------------------------------

    def parity(self, name: str, call: int) -> int:
        return call & 1 if self.has[name] else 0

    def send(self, name: str, cell: int, value: int = 0, carried: int | None = None) -> None:
        if self.has[name]:
            if carried is None:
                carried = self.released if cell >= self.at.header else 0
            self.cells[cell] = carried << CARRIED_AT | self.call << CALL_BITS | value

    def peers(self, first: int) -> tuple[tuple[int, ...], int]:
        """Whom the next step of a burst of words tells: one peer, and with the first one this rank itself.  Its own
        word is in its own memory, so it sets nothing going that the peer's word could not wait for."""
        others = [rank for rank in self.program.live if rank != self.rank]
        told = [self.rank, *others[:1]] if first == 0 else others[first : first + 1]
        return tuple(told), first + 1 if first + 1 < len(others) else -1

    def ready(self, cell: int) -> bool:
        """Whether a word of this call is there; one of a later call is a protocol fault."""
        tag = call_of(self.cells[cell])
        if tag == self.call:
            return True
        if tag > self.call and self.has["check.later_tag"]:
            raise OutOfStep(f"finds a word of call {tag}")
        return False

    def hear(self, cell: int) -> None:
        self.heard |= self.cells[cell] >> CARRIED_AT

    def waited_for(self, own_word: str) -> Iterator[int]:
        """The ranks that a wait looks at: the live set in device memory, this rank included."""
        ranks = self.program.live if self.has["check.live_set"] else range(self.at.ranks)
        return (rank for rank in ranks if rank != self.rank or self.has[own_word])

    def performed_here(self, name: str) -> int:
        """The rows in this rank's own dispatch_out that its earlier kernels have written: they are at home when this
        kernel begins, so whoever sees a relaxed word of it may overwrite them.  Nobody else reads these rows."""
        first = self.at.row(OUT, self.rank, 0)
        return self.known & ((1 << self.at.ranks) - 1) << first if self.has[name] else 0

    # -- kernel counters ----------------------------------------------------------------------------------------

    @property
    def kernel(self) -> list[Any]:
        return list(self.cells[self.at.kernel + self.rank])

    def set_kernel(self, **values: Any) -> None:
        names = {"started": STARTED, "arrived": ARRIVED, "claimed": CLAIMED, "gave_up": GAVE_UP, "record": RECORD}
        kernel = self.kernel
        for name, value in values.items():
            kernel[names[name]] = value
        self.cells[self.at.kernel + self.rank] = tuple(kernel)

    def arrive(self, name: str, ticket: int) -> bool:
        """Draws the block's place among those that need the call's state no more; true for the last one."""
        arrived = self.kernel[ARRIVED] + 1
        self.set_kernel(arrived=arrived)
        return arrived == self.grid if self.has[name] else ticket == 0

    def close_call(self, complete: bool, received: int, slots: tuple[int, ...]) -> None:
        self.set_kernel(started=0, arrived=0, claimed=0, record=(complete, received, slots))

    def done(self) -> None:
        self.step, self.detail = BLOCK_DONE, None

    # -- aborts -------------------------------------------------------------------------------------------------

    @property
    def aborted(self) -> bool:
        return self.cells[self.at.abort + self.rank] != 0


class OutOfStep(Exception):
    """A wait met the word of another kind of call or of a later call."""


def abort_all(program: Program, at: Layout, has: dict[str, bool], cells: list[Any], rank: int, cause: int) -> None:
    """Sets the sticky word here, then at every live peer; a word already set keeps its first cause.  The peers must
    know it before this rank's process may end because of it: else their watchers see that end first, and name this rank
    instead of the one that is lost."""
    keeps = has["abort.compare_and_swap"]
    cause = keeps and cells[at.abort + rank] or cause
    for peer in (rank, *program.live) if has["abort.tell_peers"] else (rank,):
        if not keeps or not cells[at.abort + peer]:
            cells[at.abort + peer] = cause


def row_name(value: int) -> str:
    """Rows are 0 (never written) or staging call << 8 | dispatch call << 4 | source."""
    if not value:
        return "nothing"
    staged, row = value >> 8, value & 255
    return f"the row of rank {row & 15} from dispatch {row >> 4}" + (f" put there by call {staged}" if staged else "")


def dispatched_row(index: int, source: int) -> int:
    return (index + 1) << 4 | source
