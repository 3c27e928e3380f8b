"""The steps of a dispatch, direct and staged: csrc/kernels/dispatch.hpp and the waits of rendezvous.hpp.

send (first block) -> land, if staged -> wait -> flag, if direct -> check, landed wait and move of each claimed chunk,
arrive, if any source staged -> rows wait (last block to arrive).  A chunk is the one row of a source.  `detail` of a
block: what is sent so far; from the wait on, (what it decided, whether it arrived last or None if it has not arrived).
"""

from __future__ import annotations

from typing import NamedTuple

from .explorer import Violation
from .program import DISPATCH, Matrix
from .turn import CARRIED_AT, CLAIMED, LANDING, OUT, STARTED, Handler, OutOfStep, Turn, dispatched_row, value_of

WIDE, WITH_WEIGHTS, CHUNKED, STAGED = 2, 4, 8, 16  # bits of a header's value, above the kind of the call
BLOCK_COUNT, HEADER = 3, 4  # words of a burst behind the at most three columns of counts
NOTHING_SENT = (0, 0)  # the peer that is told next, the words it has got


class Decided(NamedTuple):
    """What a block reads out of the words of all ranks: the same everywhere."""

    fault: str
    matrix: Matrix
    staged: tuple[int, ...]  # ranks whose rows come by way of the landing area
    blocks: tuple[int, ...]  # by rank: how many rows words it sends


def first_step(turn: Turn, block: int) -> tuple[str, object]:
    return ("dispatch send", NOTHING_SENT) if block == 0 else after_send(turn)


def after_send(turn: Turn) -> tuple[str, object]:
    return ("dispatch land", 0) if turn.place in turn.program.staged else ("dispatch wait", None)


def user_reads(turn: Turn, dispatch: int, received: int) -> None:
    """Until a rank enters its next dispatch, received rows are the user's."""
    for slot, source in enumerate(turn.program.received(dispatch, turn.rank)[:received]):
        turn.read(OUT, turn.rank, slot, dispatched_row(dispatch, source))


def header_value(turn: Turn) -> int:
    return DISPATCH | WIDE * (turn.place in turn.program.wide_rows) | STAGED * (turn.place in turn.program.staged)


def send(turn: Turn, choice: int) -> bool:
    """Count words, block count and header to one peer; each in a step of its own, in any order, if the program splits
    them: they are relaxed stores.  Otherwise in one step: whoever reads them may always look later."""
    first, sent = turn.detail
    if turn.detail == NOTHING_SENT:
        user_reads(turn, turn.program.last_dispatch(turn.index), turn.received)
    everything = {*range(turn.at.ranks), BLOCK_COUNT, HEADER}
    now = {choice} if turn.program.split else everything
    if choice not in everything or sent >> choice & 1 or choice and not turn.program.split:
        return False
    told, following = turn.peers(first)
    count_parity, header_parity = turn.parity("parity.count", turn.call), turn.parity("parity.header", turn.call)
    blocks_parity = turn.parity("parity.blocks", turn.call)
    for peer in told:
        for column in now - {BLOCK_COUNT, HEADER}:
            value = turn.program.matrices[turn.index][turn.rank][column]
            turn.send("word.count", turn.at.count_word(peer, count_parity, turn.rank, column), value)
        if BLOCK_COUNT in now:
            turn.send("word.blocks", turn.at.word(turn.at.blocks_word, peer, blocks_parity, turn.rank), turn.grid)
        if HEADER in now:
            cell = turn.at.word(turn.at.header, peer, header_parity, turn.rank)
            turn.send("word.dispatch_header", cell, header_value(turn), turn.performed_here("assume.writes_at_home"))
    sent |= sum(1 << word for word in now)
    names = {BLOCK_COUNT: "block count", HEADER: "header"}
    turn.what = f"dispatch sends {', '.join(names.get(word, f'count {word}') for word in sorted(now))} to {told}"
    turn.detail = (first, sent)
    if sent == sum(1 << word for word in everything):
        turn.detail = (following, 0)
        if following < 0:
            turn.step, turn.detail = after_send(turn)
    return True


def shares(turn: Turn) -> list[int]:
    """The destinations whose rows this block sends."""
    return [peer for peer in range(turn.at.ranks) if peer % turn.grid == turn.block]


def land(turn: Turn) -> bool:
    """This block's rows into the landing areas, without waiting for anybody; release; rows words."""
    if turn.detail == 0:
        area = LANDING + turn.parity("parity.landing", turn.call)
        for peer in shares(turn):
            if turn.program.matrices[turn.index][turn.rank][peer]:
                turn.write(area, peer, turn.rank, dispatched_row(turn.index, turn.rank))
        turn.release("release.landed_rows")
    following = flag_peers(turn, turn.detail, "lands its rows, ")
    turn.detail = following
    if following < 0:
        turn.step, turn.detail = "dispatch wait", None
    return True


def flag_peers(turn: Turn, first: int, what: str) -> int:
    told, following = turn.peers(first)
    parity = turn.parity("parity.rows", turn.call)
    for peer in told:
        turn.send("word.rows", turn.at.rows_word(peer, parity, turn.rank, turn.block))
    turn.what = f"dispatch {what if first == 0 else ''}sends its rows word to {told}"
    return following


def wait(turn: Turn) -> bool:
    """The rendezvous: all words of this call from every live peer, in every block; then the block arrives, unless there
    are landed rows to move."""
    at, has, ranks = turn.at, turn.has, turn.at.ranks
    waits = turn.block == 0 or has["wait.dispatch_every_block"]
    header_parity = turn.parity("parity.header", turn.call)
    count_parity = turn.parity("parity.count", turn.call)
    blocks_parity = turn.parity("parity.blocks", turn.call)
    ready = True
    if waits and has["wait.dispatch_header"]:
        for peer in turn.waited_for("own.dispatch_header"):
            cell = at.word(at.header, turn.rank, header_parity, peer)
            if not turn.ready(cell):
                ready = False
            elif has["check.dispatch_kind"] and turn.cells[cell] & 1 != DISPATCH:
                raise OutOfStep("meets a combine in its dispatch")
    if waits and has["wait.count"]:
        for peer in turn.waited_for("own.count"):
            for column in range(ranks) if has["wait.count_whole_row"] else (turn.rank,):
                ready &= turn.ready(at.count_word(turn.rank, count_parity, peer, column))
    if waits and has["wait.blocks"]:
        for peer in turn.waited_for("own.blocks"):
            ready &= turn.ready(at.word(at.blocks_word, turn.rank, blocks_parity, peer))
    if not ready:
        return False
    for peer in turn.program.live:
        turn.known |= turn.cells[at.word(at.header, turn.rank, header_parity, peer)] >> CARRIED_AT
    decided = decide(turn, header_parity, count_parity, blocks_parity)
    if decided.fault != (wanted := turn.program.faults[turn.index]):
        raise Violation(
            f"rank {turn.rank} decides {decided.fault!r} in call {turn.call}, every rank must decide {wanted!r}"
        )
    turn.what, last = "dispatch wait over", None
    if not moves(turn, decided) or not turn.has["claim.arrive_after_move"]:
        last = arrive(turn)
    if turn.place in turn.program.staged:
        after_flag(turn, decided, last)
    else:
        turn.step, turn.detail = "dispatch flag", (decided, last, 0)
    return True


def arrive(turn: Turn) -> bool:
    last = turn.arrive("claim.dispatch_last_block", turn.block)
    turn.what += ", arrives" + (" last" if last else "")
    return last


def moves(turn: Turn, decided: Decided) -> bool:
    return bool(decided.staged) and not (decided.fault and turn.has["check.fault_before_move"])


def decide(turn: Turn, header_parity: int, count_parity: int, blocks_parity: int) -> Decided:
    """The matrix, or the fault that every rank finds in the same words."""
    at, has, live, ranks = turn.at, turn.has, turn.program.live, range(turn.at.ranks)
    headers = [value_of(turn.cells[at.word(at.header, turn.rank, header_parity, peer)]) for peer in live]
    matrix = tuple(
        tuple(value_of(turn.cells[at.count_word(turn.rank, count_parity, s, d)]) if s in live else 0 for d in ranks)
        for s in ranks
    )
    fault = mismatch(turn, headers) if has["check.dispatch_row_bytes"] else ""
    columns = ranks if has["check.overflow_everywhere"] else (turn.rank,)
    if not fault and has["check.overflow"]:
        too_many = [d for d in columns if sum(row[d] for row in matrix) > turn.program.receive_capacity]
        fault = f"overflow of rank {too_many[0]}" if too_many else ""
    staged = tuple(peer for peer, header in zip(live, headers, strict=True) if header & STAGED)
    blocks = tuple(
        value_of(turn.cells[at.word(at.blocks_word, turn.rank, blocks_parity, peer)]) if peer in live else 0
        for peer in ranks
    )
    return Decided(fault, matrix, staged if has["check.staged_path"] else (), blocks)


def mismatch(turn: Turn, headers: list[int]) -> str:
    """A header that differs from this rank's own makes a block look; then the first that differs from the lowest live
    rank's is named, alike everywhere."""
    own = WIDE * (turn.place in turn.program.wide_rows)
    if all(header & WIDE == own for header in headers):
        return ""
    differing = [rank for rank, header in zip(turn.program.live, headers, strict=True) if (header ^ headers[0]) & WIDE]
    return f"row mismatch of rank {differing[0]}" if differing else ""


def slots_of(turn: Turn, decided: Decided) -> tuple[int, ...]:
    """Where this rank's row lies at each peer: behind the rows of all lower sources."""
    matrix, own = decided.matrix, turn.rank
    return tuple(sum(matrix[s][d] for s in range(own)) if matrix[own][d] else -1 for d in range(turn.at.ranks))


def flag(turn: Turn) -> bool:
    """Direct: this block's rows into their final slots, release, rows words; the words also after a fault."""
    decided, last, first = turn.detail
    if first == 0:
        slots = (-1,) * turn.at.ranks if decided.fault else slots_of(turn, decided)
        for peer in shares(turn):
            if slots[peer] >= 0:
                turn.write(OUT, peer, slots[peer], dispatched_row(turn.index, turn.rank))
        turn.release("release.dispatch_rows")
    following = flag_peers(turn, first, "writes its rows, ")
    turn.detail = (decided, last, following)
    if following < 0:
        after_flag(turn, decided, last)
    return True


def after_flag(turn: Turn, decided: Decided, last: bool | None) -> None:
    if moves(turn, decided):
        turn.step, turn.detail = "dispatch check", (decided, last)
    else:
        after_move(turn, decided, last)


def after_move(turn: Turn, decided: Decided, last: bool | None) -> None:
    turn.step, turn.detail = "dispatch arrive" if last is None else "dispatch rows wait", (decided, last)
    if last is False:
        turn.done()


def rows_words(turn: Turn, decided: Decided, source: int) -> list[int]:
    parity = turn.parity("parity.rows", turn.call)
    blocks = range(decided.blocks[source] if turn.has["wait.rows_of_all_blocks"] else 1)
    return [turn.at.rows_word(turn.rank, parity, source, block) for block in blocks]


def check(turn: Turn) -> bool:
    """Only a block that finds all blocks of the launch started moves rows: it may wait for any of them."""
    if turn.kernel[STARTED] == turn.grid or not turn.has["check.all_started"]:
        turn.what = "dispatch finds all blocks started"
        claim(turn)
    else:
        turn.what = "dispatch finds blocks not started, moves nothing"
        after_move(turn, *turn.detail)
    return True


def claim(turn: Turn) -> None:
    """The next source with a landed row for this rank.  All are started, or all are claimed, for the rest of the call;
    so nothing is lost by claiming in the step of the check or of a move, and by arriving in it if nothing is left."""
    decided, last = turn.detail
    chunk, sources = turn.kernel[CLAIMED], [s for s in decided.staged if decided.matrix[s][turn.rank]]
    if chunk < len(sources) and (turn.has["claim.any_mover"] or (chunk + 1) % turn.grid == turn.block):
        turn.set_kernel(claimed=chunk + 1)
        turn.what += f", claims the landed row of rank {sources[chunk]}"
        turn.step, turn.detail = "dispatch landed wait", (decided, last, sources[chunk])
    else:
        turn.what += ", finds all landed rows claimed"
        after_move(turn, decided, arrive(turn) if last is None else last)


def landed_wait(turn: Turn) -> bool:
    """All rows of the claimed row's source are in the landing area, its own rank's included."""
    decided, _, source = turn.detail
    words = rows_words(turn, decided, source) if source != turn.rank or turn.has["own.landed"] else []
    if turn.has["wait.landed"] and not all(turn.ready(word) for word in words):
        return False
    for word in words:
        turn.hear(word)
    turn.acquire("acquire.landed_rows")
    turn.step, turn.what = "dispatch move", f"dispatch finds the rows of rank {source} landed"
    return True


def move(turn: Turn) -> bool:
    """The claimed row from the landing area to its final slot."""
    decided, last, source = turn.detail
    area, row = LANDING + turn.parity("parity.landing", turn.call), dispatched_row(turn.index, source)
    turn.read(area, turn.rank, source, row)
    turn.write(OUT, turn.rank, sum(decided.matrix[s][turn.rank] for s in range(source)), row)
    turn.what = f"dispatch moves the landed row of rank {source}"
    turn.detail = (decided, last)
    claim(turn)
    return True


def arrive_after_move(turn: Turn) -> bool:
    turn.what = "dispatch leaves the moving to others"
    after_move(turn, turn.detail[0], arrive(turn))
    return True


def rows_wait(turn: Turn) -> bool:
    """The last block to arrive: all rows words of all peers; acquire; no block gave up; the call is closed."""
    decided, _ = turn.detail
    words = [word for source in turn.program.live if source != turn.rank for word in rows_words(turn, decided, source)]
    if turn.has["wait.rows"] and not all(turn.ready(word) for word in words):
        return False
    for word in words:
        turn.hear(word)
    turn.acquire("acquire.dispatch_rows")
    if turn.aborted and turn.has["abort.last_block_looks"]:
        turn.what = "dispatch has all rows, finds the abort word set"
        leave(turn)
        return True
    turn.what = "dispatch has all rows, closes the call"
    fault = decided.fault
    received = 0 if fault else sum(row[turn.rank] for row in decided.matrix)
    if received != (wanted := len(turn.program.received(turn.index, turn.rank))):
        raise Violation(f"rank {turn.rank} counts {received} received rows in call {turn.call}, not {wanted}")
    turn.close_call(True, received, (-1,) * turn.at.ranks if fault else slots_of(turn, decided))
    turn.done()
    return True


def leave(turn: Turn) -> None:
    """What a block does whose wait has failed.  Before it has heard from all it sends no rows words; while it moves, it
    moves no more rows.  The last to arrive closes the call, without rows."""
    turn.set_kernel(gave_up=1)
    if turn.step == "dispatch landed wait":
        after_move(turn, *turn.detail[:2])
        return
    if turn.step == "dispatch rows wait" or arrive(turn):
        turn.close_call(False, 0, (-1,) * turn.at.ranks)
    turn.done()


HANDLERS: dict[str, Handler] = {
    "dispatch send": (send, tuple(range(HEADER + 1))),
    "dispatch land": (land, (0,)),
    "dispatch wait": (wait, (0,)),
    "dispatch flag": (flag, (0,)),
    "dispatch check": (check, (0,)),
    "dispatch landed wait": (landed_wait, (0,)),
    "dispatch move": (move, (0,)),
    "dispatch arrive": (arrive_after_move, (0,)),
    "dispatch rows wait": (rows_wait, (0,)),
}
