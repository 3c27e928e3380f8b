"""What the ranks of one exploration are told to do, and what a correct protocol makes of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

DISPATCH, COMBINE = 0, 1

Matrix = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Program:
    """A short run.  `calls` holds one letter per call: D dispatch, X combine of an external input that aliases the
    received rows, Z zero-copy combine, F zero-copy combine whose buffer is refilled before it although a combine came
    before (which callers must not do).  Ranks that call something else than the others are listed in `other_calls`."""

    name: str
    calls: str
    ranks: int = 2
    blocks: int = 2
    # by rank, on how many blocks its GPU has room: the next block starts when one before has ended; () for all
    resident: tuple[int, ...] = ()
    # rows[k][s][d]: rows that rank s sends to rank d in the k-th dispatch (0 or 1); the last entry repeats
    rows: tuple[Matrix, ...] = ()
    capacity: int | None = None  # receive cap in rows, ranks if None
    no_weights: frozenset[tuple[int, int]] = frozenset()  # (call index, rank) of combines without weight rows
    wide_rows: frozenset[tuple[int, int]] = frozenset()  # (call index, rank) whose row bytes differ from the others'
    staged: frozenset[tuple[int, int]] = frozenset()  # (call index, rank) of dispatches that take the staged path
    one_block: frozenset[tuple[int, int]] = frozenset()  # (call index, rank) of launches with a single block
    stagers: int = 1  # blocks of a combine that stage rows
    masked: frozenset[int] = frozenset()
    mortal: int | None = None  # the rank that may die, at any point
    call_offset: tuple[int, ...] = ()  # added to a rank's call numbers, a broken counter
    other_calls: dict[int, str] = field(default_factory=dict, hash=False)
    split: bool = False  # count words, block count and header are steps of their own; else those for a peer are one
    out_of_step: bool = False  # the run must end with OutOfStep on every live rank

    @cached_property
    def live(self) -> tuple[int, ...]:
        return tuple(rank for rank in range(self.ranks) if rank not in self.masked)

    @property
    def may_abort(self) -> bool:
        return self.mortal is not None or self.out_of_step

    def enters(self, index: int, rank: int) -> bool:
        """Whether the start of a block is a step of its own: where an abort word may be found set, or where blocks look
        whether the others have started."""
        landed = any((index, source) in self.staged for source in self.live)
        return self.may_abort or landed and self.kind(rank, index) == DISPATCH and self.grid(index, rank) > 1

    def grid(self, index: int, rank: int) -> int:
        return 1 if (index, rank) in self.one_block else self.blocks

    @property
    def receive_capacity(self) -> int:
        return self.ranks if self.capacity is None else self.capacity

    def calls_of(self, rank: int) -> str:
        return self.other_calls.get(rank, self.calls)

    def kind(self, rank: int, index: int) -> int:
        return DISPATCH if self.calls_of(rank)[index] == "D" else COMBINE

    def last_dispatch(self, index: int) -> int:
        """Index of the last dispatch before call `index`, -1 if there is none."""
        return self.calls.rfind("D", 0, index)

    @cached_property
    def matrices(self) -> tuple[Matrix, ...]:
        """By call index: rows per source and destination of a dispatch there; masked ranks neither send nor receive."""
        everyone = range(self.ranks)
        rows = self.rows or (tuple(tuple(1 for _ in everyone) for _ in everyone),)
        chosen = [rows[min(self.calls.count("D", 0, index), len(rows) - 1)] for index in range(len(self.calls))]
        return tuple(
            tuple(tuple(matrix[s][d] if {s, d} <= set(self.live) else 0 for d in everyone) for s in everyone)
            for matrix in chosen
        )

    @cached_property
    def faults(self) -> tuple[str, ...]:
        """By call index: the per-call fault that every rank must report, "" for none."""
        return tuple(self._fault(index) for index in range(len(self.calls)))

    def _fault(self, index: int) -> str:
        wide = [(index, rank) in self.wide_rows for rank in self.live]
        if len(set(wide)) > 1:
            return f"row mismatch of rank {self.live[wide.index(not wide[0])]}"
        if self.calls[index] == "D":
            matrix = self.matrices[index]
            for d in range(self.ranks):
                if sum(row[d] for row in matrix) > self.receive_capacity:
                    return f"overflow of rank {d}"
        return ""

    def received(self, index: int, rank: int) -> tuple[int, ...]:
        """Sources of the rows that `rank` holds after the dispatch at `index`, in slot order."""
        if index < 0 or self.faults[index]:
            return ()
        matrix = self.matrices[index]
        return tuple(source for source in range(self.ranks) for _ in range(matrix[source][rank]))

    def registered_content(self, index: int, own: bool = False) -> int:
        """Index of the call whose rows the combine-in rows must hold while the combine at `index` reads them, -1 if
        none: an external combine stages its own; zero copy finds what was staged, or filled in after that dispatch.  A
        rank's own rows are never staged."""
        last = self.last_dispatch(index)
        if own:
            return last if "DZ" in self.calls[last : index + 1] else -1
        return max((at for at in range(last + 1, index + 1) if self.calls[at] == "X"), default=last)

    def fills_before(self, rank: int, index: int) -> bool:
        """Whether the expert writes the registered buffer before call `index`: once per dispatch, never between two
        combines of it."""
        calls = self.calls_of(rank)
        return calls[index] == "F" or calls[index] == "Z" and index > 0 and calls[index - 1] == "D"
