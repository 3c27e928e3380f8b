"""The steps of a dispatch, direct leg: csrc/kernels/dispatch.hpp and the waits of rendezvous.hpp.

send -> wait -> write -> (last block) rows -> rows wait.  `detail` of a block: while sending, (peer index, columns of
counts sent, header sent); from the wait on, the matrix it believes in, or the fault it decided.
"""

from __future__ import annotations

from .explorer import Violation
from .program import DISPATCH
from .turn import BLOCK_DONE, FINISHED, OUT, Handler, OutOfStep, Turn, dispatched_row


def first_step(last_kind: int, block: int) -> tuple[str, object]:
    return ("dispatch send", (0, 0, False)) if block == 0 else ("dispatch wait", None)


def enters(turn: Turn) -> bool:
    """A kernel's first look at the abort word; False ends the block.  A rank that gave up a dispatch must not combine
    what it has not got: a peer that had all its words would fetch it.  Until here received rows were the user's."""
    if turn.aborted and turn.has["check.abort_at_entry"]:
        turn.what = "finds the abort word set at entry"
        turn.abort("abort.tell_peers_at_entry")
        return False
    user_reads(turn, turn.program.last_dispatch(turn.index), turn.received)
    return True


def user_reads(turn: Turn, dispatch: int, received: int) -> None:
    for slot, source in enumerate(turn.program.received(dispatch, turn.rank)[:received]):
        turn.read(OUT, turn.rank, slot, dispatched_row(dispatch, source))


def header_value(turn: Turn) -> int:
    place = (turn.index, turn.rank)
    return DISPATCH | (place in turn.program.wide_rows) << 1 | (place in turn.program.bad_ids) << 3


def send(turn: Turn, choice: int) -> bool:
    """One count word (all of a peer's in one step unless the program splits them) or one header.  They are relaxed
    stores: either may become visible first."""
    live, ranks = turn.program.live, turn.at.ranks
    peer_index, columns, header = turn.detail
    if choice == 0 and columns == ranks or choice == 1 and header:
        return False
    if turn.detail == (0, 0, False) and not enters(turn):
        return True
    peer = live[peer_index]
    if choice == 0:
        matrix = turn.program.matrices[turn.index]
        parity = turn.parity("parity.count", turn.call)
        until = columns + 1 if turn.program.split_counts else ranks
        for column in range(columns, until):
            cell = turn.at.count_word(peer, parity, turn.rank, column)
            turn.send("word.count", cell, matrix[turn.rank][column])
        turn.what = f"dispatch sends rank {peer} its count words" + (f" up to {until}" if until < ranks else "")
        columns = until
    else:
        cell = turn.at.word(turn.at.header, peer, turn.parity("parity.header", turn.call), turn.rank)
        turn.send("word.dispatch_header", cell, header_value(turn))
        turn.what, header = f"dispatch sends rank {peer} its header", True
    turn.detail = (peer_index, columns, header)
    if columns == ranks and header:
        turn.detail = (peer_index + 1, 0, False)
        if peer_index + 1 == len(live):
            turn.step, turn.detail = "dispatch wait", None
    return True


def wait(turn: Turn) -> bool:
    """The rendezvous: header and count words of this call from every live peer, in every block."""
    at, has, ranks = turn.at, turn.has, turn.at.ranks
    waits = turn.block == 0 or has["wait.dispatch_every_block"]
    headers = at.header, turn.parity("parity.header", turn.call)
    count_parity = turn.parity("parity.count", turn.call)
    ready = True
    if waits and has["wait.dispatch_header"]:
        for peer in turn.waited_for("own.dispatch_header"):
            cell = at.word(headers[0], turn.rank, headers[1], peer)
            if not turn.ready(cell):
                ready = False
            elif has["check.dispatch_kind"] and turn.cells[cell] & 1 != DISPATCH:
                raise OutOfStep("meets a combine in its dispatch")
    if waits and has["wait.count"]:
        for peer in turn.waited_for("own.count"):
            for column in range(ranks) if has["wait.count_whole_row"] else (turn.rank,):
                ready &= turn.ready(at.count_word(turn.rank, count_parity, peer, column))
    if not ready:
        return False
    turn.detail = decide(turn, headers, count_parity)
    turn.step, turn.what = "dispatch write", "dispatch wait over"
    return True


def decide(turn: Turn, headers: tuple[int, int], count_parity: int) -> object:
    """The matrix, or the fault that every rank finds in the same words."""
    at, has, live, ranks = turn.at, turn.has, turn.program.live, range(turn.at.ranks)
    words = [turn.cells[at.word(headers[0], turn.rank, headers[1], peer)] for peer in live]
    if has["check.dispatch_row_bytes"] and len({word >> 1 & 1 for word in words}) > 1:
        return "row mismatch"
    if has["check.dispatch_stated_fault"] and any(word >> 3 & 1 for word in words):
        return "stated fault"
    matrix = tuple(
        tuple(turn.cells[at.count_word(turn.rank, count_parity, s, d)] & 255 if s in live else 0 for d in ranks)
        for s in ranks
    )
    columns = ranks if has["check.overflow_everywhere"] else (turn.rank,)
    if has["check.overflow"] and any(sum(row[d] for row in matrix) > turn.program.receive_capacity for d in columns):
        return "overflow"
    return matrix


def slots_of(turn: Turn) -> tuple[int, ...]:
    """Where this rank's row lies at each peer: behind the rows of all lower sources."""
    matrix = turn.detail
    if isinstance(matrix, str):
        return (-1,) * turn.at.ranks
    own = turn.rank
    return tuple(sum(matrix[s][d] for s in range(own)) if matrix[own][d] else -1 for d in range(turn.at.ranks))


def write(turn: Turn) -> bool:
    """Rows into their final slots, this block's share of the peers; release; count in."""
    for peer, slot in enumerate(slots_of(turn)):
        if slot >= 0 and peer % turn.at.blocks == turn.block:
            turn.write(OUT, peer, slot, dispatched_row(turn.index, turn.rank))
    turn.what = "dispatch writes its rows, releases, counts in"
    turn.release("release.dispatch_rows")
    last = turn.count_in("fence.dispatch_last_block")
    if not turn.has["claim.dispatch_last_block"]:
        last = turn.block == 0
    if last and turn.aborted and turn.has["abort.dispatch_last_block_looks"]:
        # a block that gave up has not written its rows: no rows word may say that they are there
        turn.what += ", finds the abort word set"
        turn.abort("abort.tell_peers", counted_in=True)
    elif isinstance(turn.detail, str) and turn.program.fault_skips_rows:
        if last:
            end(turn)
        else:
            turn.step, turn.detail = BLOCK_DONE, None
    else:
        turn.step, turn.detail = ("dispatch rows", (turn.detail, 0)) if last else (BLOCK_DONE, None)
    return True


def rows(turn: Turn) -> bool:
    matrix, peer_index = turn.detail
    peer = turn.program.live[peer_index]
    cell = turn.at.word(turn.at.arrived, peer, turn.parity("parity.rows", turn.call), turn.rank)
    turn.send("word.rows", cell, 0, carries=True)
    turn.what = f"dispatch sends rank {peer} its rows word"
    turn.detail = (matrix, peer_index + 1)
    if peer_index + 1 == len(turn.program.live):
        turn.step, turn.detail = "dispatch rows wait", matrix
    return True


def rows_wait(turn: Turn) -> bool:
    """All rows are here; the next kernel on the stream may read them plainly."""
    kernel, parity = turn.kernel, turn.parity("parity.rows", turn.call)
    words = [turn.at.word(turn.at.arrived, turn.rank, parity, peer) for peer in turn.waited_for("own.rows")]
    if turn.has["wait.rows"] and not all(turn.ready(word) for word in words):
        return False
    if kernel[FINISHED] < turn.at.blocks:
        return False
    for word in words:
        turn.hear(word)
    turn.acquire("acquire.dispatch_rows")
    turn.what = "dispatch has all rows, ends"
    end(turn)
    return True


def end(turn: Turn) -> None:
    """The last block leaves the received count, the call number and the kind of the call for the calls to come."""
    decided = turn.detail
    fault = turn.program.faults[turn.index]
    if (decided if isinstance(decided, str) else "") != fault:
        raise Violation(f"rank {turn.rank} decides {decided!r} in call {turn.call}, every rank must decide {fault!r}")
    received = 0 if fault else sum(row[turn.rank] for row in decided)
    if received != (wanted := len(turn.program.received(turn.index, turn.rank))):
        raise Violation(f"rank {turn.rank} counts {received} received rows in call {turn.call}, not {wanted}")
    user_reads(turn, turn.index, received)
    turn.machine.finish(turn, received, slots_of(turn))


HANDLERS: dict[str, Handler] = {
    "dispatch send": (send, (0, 1)),
    "dispatch wait": (wait, (0,)),
    "dispatch write": (write, (0,)),
    "dispatch rows": (rows, (0,)),
    "dispatch rows wait": (rows_wait, (0,)),
}
