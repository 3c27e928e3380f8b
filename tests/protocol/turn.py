"""The memory of all ranks, and what one block of one kernel may do to it.

A step of the explorer is one access to a word (or to the kernel's own counters) together with the row accesses next
to it.  Rows need no steps of their own because every unordered pair of row accesses is found by happens-before:

* `known` of a block is the set of row locations whose newest content it may read or overwrite.  Writing a location
  takes it out of everybody else's sets, out of what the writer has released, and out of every word in memory.
* A release copies `known` to `released`; a word stored afterwards carries `released` along.
* A wait collects what the words carry in `heard`; an acquire adds `heard` to `known`.

So a store may become visible as late as its release, a load may run as early as its acquire, and a row touched outside
these bounds is torn, lost or stale in some execution: a violation here, whatever value the row happens to hold.
Count words, dispatch headers and entered words are relaxed: they carry nothing.

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

OUT, ROWS, WEIGHTS = 0, 1, 2  # areas of rows: dispatch out, combine in, weight rows of combine in
# a kernel's own counters: blocks that finished, chunks claimed, chunks staged, whether a block gave up because of the
# abort word, and what the blocks have released
FINISHED, CLAIMED, STAGED, GAVE_UP, RELEASED = range(5)
IDLE_KERNEL = (0, 0, 0, 0, 0)
ABORTED = 2  # in place of the kind of the last call, when that ended because of the abort word
LOST, OUT_OF_STEP = 1, 100  # abort causes; LOST + rank is a dead rank

# a block that takes no step of this call any more, or of any call
BLOCK_DONE, RANK_ENDED = "done", "ended"


class Layout:
    """Where each word and row lies in the flat state tuple."""

    def __init__(self, program: Program) -> None:
        ranks, self.ranks, self.blocks = program.ranks, program.ranks, program.blocks
        self.locations = 3 * ranks * ranks
        self.count = self.locations
        self.header = self.count + 2 * ranks**3
        self.arrived = self.header + 2 * ranks**2
        self.entered = self.arrived + 2 * ranks**2
        self.carried = self.entered + 2 * ranks**2  # what each header and rows word carries, in the order of these
        self.abort = self.carried + 4 * ranks**2
        self.alive = self.abort + ranks
        self.rank = self.alive + ranks
        self.kernel = self.rank + ranks
        self.block = self.kernel + ranks
        self.cells = self.block + ranks * self.blocks

    def row(self, area: int, rank: int, slot: int) -> int:
        return (area * self.ranks + rank) * self.ranks + slot

    def word(self, base: int, at: int, parity: int, source: int) -> int:
        return base + (at * 2 + parity) * self.ranks + source

    def count_word(self, at: int, parity: int, source: int, column: int) -> int:
        return self.count + ((at * 2 + parity) * self.ranks + source) * self.ranks + column


# what a block does in a step, and the choices it has there
Handler = tuple[Callable[..., bool], tuple[int, ...]]


def tagged(call: int, value: int = 0) -> int:
    return call << 8 | value


class Turn:
    """One block taking one step on a copy of the state."""

    def __init__(self, machine: Machine, state: State, rank: int, block: int) -> None:
        self.machine, self.has, self.at, self.program = machine, machine.has, machine.layout, machine.program
        self.cells = list(state)
        self.rank, self.block = rank, block
        own = state[self.at.block + rank * self.at.blocks + block]
        self.step, self.detail, self.known, self.released, self.heard = own
        self.index, self.last_kind, self.received, self.slots = state[self.at.rank + rank]
        self.call = self.index + 1 + machine.offset[rank]
        self.what = ""  # the step in words

    # -- rows ---------------------------------------------------------------------------------------------------

    def write(self, area: int, rank: int, slot: int, value: int) -> None:
        if slot >= (capacity := self.program.receive_capacity):
            raise Violation(f"rank {self.rank} writes slot {slot} of rank {rank}, which has {capacity}")
        location = self.at.row(area, rank, slot)
        bit = 1 << location
        if not self.known & bit:
            raise Violation(f"{self.name_of(location)} is overwritten, unordered with the write of its present content")
        cells, at = self.cells, self.at
        for cell in range(at.carried, at.abort):
            cells[cell] &= ~bit
        for r in range(at.ranks):
            kernel = cells[at.kernel + r]
            cells[at.kernel + r] = (*kernel[:RELEASED], kernel[RELEASED] & ~bit)
        for cell in range(at.block, at.cells):
            step, detail, known, released, heard = cells[cell]
            cells[cell] = (step, detail, known & ~bit, released & ~bit, heard & ~bit)
        self.released &= ~bit
        self.heard &= ~bit
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
        return f"{('dispatch_out', 'combine_in rows', 'combine_in weights')[area]} of rank {rank}, slot {slot},"

    # -- fences -------------------------------------------------------------------------------------------------

    def release(self, name: str) -> None:
        if self.has[name]:
            self.released = self.known

    def acquire(self, name: str) -> None:
        if self.has[name]:
            self.known |= self.heard

    # -- words --------------------------------------------------------------------------------------------------

    def parity(self, name: str, call: int) -> int:
        return call & 1 if self.has[name] else 0

    def send(self, name: str, cell: int, value: int, carries: bool = False) -> None:
        if self.has[name]:
            self.cells[cell] = tagged(self.call, value)
            if carries:
                self.cells[cell + self.at.carried - self.at.header] = self.released

    def ready(self, cell: int) -> bool:
        """Whether a word of this call is there; one of a later call is a protocol fault."""
        tag = self.cells[cell] >> 8
        if tag == self.call:
            return True
        if tag > self.call and self.has["check.later_tag"]:
            raise OutOfStep(f"finds a word of call {tag}")
        return False

    def hear(self, cell: int) -> None:
        self.heard |= self.cells[cell + self.at.carried - self.at.header]

    def waited_for(self, own_word: str) -> Iterator[int]:
        """The ranks that a wait looks at: the live set in device memory, this rank included."""
        ranks = self.program.live if self.has["check.live_set"] else range(self.at.ranks)
        return (rank for rank in ranks if rank != self.rank or self.has[own_word])

    # -- kernel counters ----------------------------------------------------------------------------------------

    @property
    def kernel(self) -> list[int]:
        return list(self.cells[self.at.kernel + self.rank])

    def count_in(self, last_fence: str) -> bool:
        """Counts this block out of the kernel's common work; the last one fences again and knows what all released."""
        kernel = self.kernel
        kernel[FINISHED] += 1
        self.heard |= kernel[RELEASED]
        kernel[RELEASED] |= self.released
        self.cells[self.at.kernel + self.rank] = tuple(kernel)
        last = kernel[FINISHED] == self.at.blocks
        if last:
            self.acquire(last_fence)
            self.release(last_fence)
        return last

    # -- aborts and the end of a call -----------------------------------------------------------------------------

    @property
    def aborted(self) -> bool:
        return self.cells[self.at.abort + self.rank] != 0

    def abort(self, tell_peers: str, cause: int = 0, counted_in: bool = False) -> None:
        """Sets the sticky word here, then at every live peer, and ends the block's part of the call; a word already
        set keeps its first cause.  The peers must know it before this rank's process may end because of it: else their
        watchers see that end first, and name this rank instead of the one that is lost."""
        peers = self.program.live if self.has[tell_peers] else (self.rank,)
        cause = self.cells[self.at.abort + self.rank] or cause
        for peer in (self.rank, *peers):
            if not self.cells[self.at.abort + peer]:
                self.cells[self.at.abort + peer] = cause
        kernel = self.kernel
        kernel[FINISHED] += not counted_in
        kernel[GAVE_UP] = 1
        self.cells[self.at.kernel + self.rank] = tuple(kernel)
        self.step, self.detail = BLOCK_DONE, None
        if kernel[FINISHED] == self.at.blocks:
            self.machine.finish(self, received=0, slots=(-1,) * self.at.ranks, aborted=True)


class OutOfStep(Exception):
    """A wait met the word of another kind of call or of a later call."""


def row_name(value: int) -> str:
    """Rows are 0 (never written) or staging call << 8 | dispatch call << 4 | source."""
    if not value:
        return "nothing"
    staged, row = value >> 8, value & 255
    return f"the row of rank {row & 15} from dispatch {row >> 4}" + (f" put there by call {staged}" if staged else "")


def dispatched_row(index: int, source: int) -> int:
    return (index + 1) << 4 | source
