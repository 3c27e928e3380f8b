"""The system that the explorer walks: ranks x blocks that take the steps of `dispatch.py` and `combine.py`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from . import combine, dispatch, steps
from .explorer import Violation
from .program import COMBINE, DISPATCH, Program
from .turn import (
    BLOCK_DONE,
    GAVE_UP,
    IDLE_KERNEL,
    LOST,
    OUT,
    OUT_OF_STEP,
    RANK_ENDED,
    RECORD,
    ROWS,
    STARTED,
    Handler,
    Layout,
    OutOfStep,
    State,
    Turn,
    abort_all,
    dispatched_row,
)

# every wait and the poll of the abort word in it
WAITS = {
    "dispatch wait": "abort.poll_dispatch_wait",
    "dispatch landed wait": "abort.poll_landed_wait",
    "dispatch rows wait": "abort.poll_rows_wait",
    "combine entered wait": "abort.poll_entered_wait",
    "combine hear": "abort.poll_combine_wait",
    "combine ready wait": "abort.poll_ready_wait",
}
ENTER = {DISPATCH: "dispatch enter", COMBINE: "combine enter"}


class Machine:
    """The system that the explorer walks: ranks x blocks taking the steps of `dispatch.py` and `combine.py`."""

    def __init__(self, program: Program, without: str | None = None) -> None:
        self.program, self.layout = program, Layout(program)
        self.has = {name: name != without for name in steps.NAMES}
        if without is not None and without not in self.has:
            raise ValueError(f"no step is called {without!r}; steps.py lists them")
        self.offset = program.call_offset or (0,) * program.ranks
        self.handlers: dict[str, Handler] = {**dispatch.HANDLERS, **combine.HANDLERS}
        self.handlers.update(dict.fromkeys(ENTER.values(), (self.enter, (0,))))
        self.first_steps = {DISPATCH: dispatch.first_step, COMBINE: combine.first_step}
        self.leave = {DISPATCH: dispatch.leave, COMBINE: combine.leave}
        self.sorts_blocks = program.blocks > 1 and not program.resident
        # block 0 is the block that took ticket 0, so the one that runs first; without tickets it may be the last
        self.order = range(program.blocks) if self.has["claim.ticket"] else range(program.blocks - 1, -1, -1)
        # a block that stages or moves alone draws what nobody else looks at: such steps are taken at once
        self.private = frozenset({"combine claim"} if program.stagers == 1 else ())
        if program.blocks == 1:
            self.private |= {"dispatch check"}

    # -- System -------------------------------------------------------------------------------------------------

    def initial(self) -> State:
        at, program = self.layout, self.program
        everything = (1 << at.locations) - 1
        cells: list[Any] = [0] * at.cells
        cells[at.kernel : at.block] = [IDLE_KERNEL] * at.ranks
        for rank in range(at.ranks):
            cells[at.alive + rank] = rank in program.live
            cells[at.rank + rank] = (-1, DISPATCH, 0, (-1,) * at.ranks)
            for block in range(at.blocks):
                cells[at.block + rank * at.blocks + block] = (RANK_ENDED, None, everything, 0)
        for rank in program.live:
            turn = Turn(self, tuple(cells), rank, 0)
            cells = self.begin(turn, -1, DISPATCH, 0, (-1,) * at.ranks)
        return tuple(cells)

    def steps(self, state: State) -> Iterator[tuple[str, State]]:
        at = self.layout
        found: list[tuple[str, State]] = []
        for rank in self.program.live:
            if not state[at.alive + rank]:
                continue
            ended, places = True, self.program.resident[rank] if self.program.resident else at.blocks
            for block in self.order:
                step = state[at.block + rank * at.blocks + block][0]
                if step == RANK_ENDED:
                    continue
                ended = False
                if step == BLOCK_DONE:
                    continue
                taken = list(self.take(state, rank, block, step))
                if taken and step in self.private:
                    return iter(taken)
                found += taken
                places -= 1
                if not places:
                    break
            found += self.fates(state, rank, ended)
        return iter(found)

    def take(self, state: State, rank: int, block: int, step: str) -> Iterator[tuple[str, State]]:
        handler, choices = self.handlers[step]
        moved = False
        for choice in choices:
            turn = Turn(self, state, rank, block)
            turn.what = step
            try:
                try:
                    moves = handler(turn, choice) if len(choices) > 1 else handler(turn)
                except OutOfStep as seen:
                    if not self.program.out_of_step and not turn.aborted:
                        raise Violation(f"rank {rank} in call {turn.call} {seen}") from None
                    turn.what += f": {seen}, aborts"
                    abort_all(self.program, self.layout, self.has, turn.cells, rank, OUT_OF_STEP)
                    self.leave_call(turn)
                    moves = True
                if moves:
                    moved = True
                    yield self.label(turn), self.pack(turn)
            except Violation as violation:
                violation.label = self.label(turn)
                raise
        # Words first, then the abort word: a wait does not fail once all of its words are there, if it looks at them
        # again after it saw the abort word.
        if moved and self.has["abort.look_again"]:
            return
        if step in WAITS and state[self.layout.abort + rank] and self.has[WAITS[step]]:
            turn = Turn(self, state, rank, block)
            turn.what = f"{step}: finds the abort word set"
            self.leave_call(turn)
            try:
                yield self.label(turn), self.pack(turn)
            except Violation as violation:
                violation.label = self.label(turn)
                raise

    def enter(self, turn: Turn) -> bool:
        """A block starts.  Its first look at the abort word: an aborted rank sends nothing."""
        kind = self.program.kind(turn.rank, turn.index)
        base = self.layout.block + turn.rank * self.layout.blocks
        not_started = [cell[:2] for cell in turn.cells[base : base + self.layout.blocks]]
        if turn.detail and (ENTER[kind], 0) in not_started and turn.has["claim.ticket"]:
            return False  # whoever starts first has ticket 0
        if kind == DISPATCH:
            turn.set_kernel(started=turn.kernel[STARTED] + 1)
        if turn.aborted and self.has["check.abort_at_entry"]:
            turn.what = "finds the abort word set at entry"
            self.leave_call(turn)
        else:
            turn.what = f"{ENTER[kind]}s"
            turn.step, turn.detail = self.first_steps[kind](turn, turn.detail)
        return True

    def leave_call(self, turn: Turn) -> None:
        self.leave[self.program.kind(turn.rank, turn.index)](turn)

    def label(self, turn: Turn) -> str:
        return f"rank {turn.rank} block {turn.block} call {turn.call}: {turn.what}"

    def pack(self, turn: Turn) -> State:
        at = self.layout
        base = at.block + turn.rank * at.blocks
        turn.cells[base + turn.block] = (turn.step, turn.detail, turn.known, turn.released)
        if turn.step == BLOCK_DONE and all(turn.cells[base + b][0] == BLOCK_DONE for b in range(at.blocks)):
            self.end_kernel(turn)
        elif self.sorts_blocks and self.program.kind(turn.rank, turn.index) == COMBINE:
            turn.cells[base : base + at.blocks] = sorted(turn.cells[base : base + at.blocks])
        return tuple(turn.cells)

    def fates(self, state: State, rank: int, ended: bool) -> Iterator[tuple[str, State]]:
        """What happens to a rank from outside: death, and the watcher that notices that another's process is gone: it
        died, or it ended because of the abort."""
        at, mortal = self.layout, self.program.mortal
        if mortal is None or ended:
            return
        if rank == mortal:
            yield f"rank {rank} dies", (*state[: at.alive + rank], False, *state[at.alive + rank + 1 :])
            return
        for other in self.program.live:
            if other == rank or state[at.abort + rank] == LOST + other:
                continue
            if state[at.abort + rank] and self.has["abort.compare_and_swap"]:
                continue
            over = state[at.block + other * at.blocks][0] == RANK_ENDED
            if not state[at.alive + other] or over and state[at.abort + other]:
                cells = list(state)
                abort_all(self.program, at, self.has, cells, rank, LOST + other)
                yield f"rank {rank}: the watcher sees that the process of rank {other} is gone", tuple(cells)

    def complaint(self, state: State) -> str | None:
        at = self.layout
        stuck = [
            f"rank {rank} block {block} at {state[at.block + rank * at.blocks + block][0]!r}"
            for rank in self.program.live
            if state[at.alive + rank]
            for block in range(at.blocks)
            if state[at.block + rank * at.blocks + block][0] != RANK_ENDED
        ]
        if stuck:
            return "deadlock: " + ", ".join(stuck)
        wanted = {OUT_OF_STEP} if self.program.out_of_step else {0}
        if self.program.mortal is not None:
            wanted.add(LOST + self.program.mortal)
        for rank in self.program.live:
            if state[at.alive + rank] and state[at.abort + rank] not in wanted:
                return f"rank {rank} ends with abort cause {state[at.abort + rank]}, wanted one of {sorted(wanted)}"
        return None

    # -- calls --------------------------------------------------------------------------------------------------

    def end_kernel(self, turn: Turn) -> None:
        """What any of its blocks knows, the next kernel on the stream knows; a system-scope release is not implied."""
        kind, kernel = self.program.kind(turn.rank, turn.index), turn.kernel
        complete, received, slots = kernel[RECORD]
        if kind == DISPATCH and complete:
            if kernel[GAVE_UP]:
                raise Violation(f"call {turn.call} of rank {turn.rank} ends as complete although a block of it gave up")
            base = self.layout.block + turn.rank * self.layout.blocks
            for block in range(self.layout.blocks):
                turn.known |= turn.cells[base + block][2]
            dispatch.user_reads(turn, turn.index, received)
        if kind == COMBINE and not turn.has["state.last_kind"]:
            kind = DISPATCH
        turn.cells = self.begin(turn, turn.index, kind, received, slots)

    def begin(self, turn: Turn, index: int, last_kind: int, received: int, slots: tuple[int, ...]) -> list[Any]:
        at, cells, rank = self.layout, turn.cells, turn.rank
        base = at.block + rank * at.blocks
        known = 0
        for block in range(at.blocks):
            known |= cells[base + block][2]
        index += 1
        cells[at.rank + rank] = (index, last_kind, received, slots)
        cells[at.kernel + rank] = (*cells[at.kernel + rank][:GAVE_UP], *IDLE_KERNEL[GAVE_UP:])
        over = index == len(self.program.calls)
        for block in range(at.blocks):
            cells[base + block] = (RANK_ENDED, None, known, 0)
        if over:
            return cells
        next_turn = Turn(self, tuple(cells), rank, 0)
        kind = self.program.kind(rank, index)
        enters = self.program.enters(index, rank)
        if kind == DISPATCH and not enters:
            next_turn.set_kernel(started=next_turn.kernel[STARTED] + next_turn.grid)
            cells[at.kernel + rank] = next_turn.cells[at.kernel + rank]
        for block in range(at.blocks):
            first: tuple[str, object] = (BLOCK_DONE, None)
            if block < self.program.grid(index, rank):
                first = (ENTER[kind], block) if enters else self.first_steps[kind](next_turn, block)
            cells[base + block] = (*first, known, 0)
        if self.program.fills_before(rank, index):
            self.fill(turn, index, received, known)
        return cells

    def fill(self, turn: Turn, index: int, received: int, known: int) -> None:
        """The expert kernel between a dispatch and a zero-copy combine: reads the received rows in place, writes the
        registered buffer."""
        at, cells, rank = self.layout, turn.cells, turn.rank
        turn.known, dispatch = known, self.program.last_dispatch(index)
        base = at.block + rank * at.blocks
        for slot, source in enumerate(self.program.received(dispatch, rank)[:received]):
            row = dispatched_row(dispatch, source)
            turn.read(OUT, rank, slot, row)
            turn.write(ROWS, rank, slot, (dispatch + 1) << 8 | row)
            for block in range(at.blocks):
                step, detail, block_known, released = cells[base + block]
                cells[base + block] = (step, detail, block_known | 1 << at.row(ROWS, rank, slot), released)
