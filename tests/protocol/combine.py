"""The steps of a combine, external or zero copy: csrc/kernels/combine.hpp and the waits of rendezvous.hpp.

(entered -> entered wait, after another combine) -> header (first block) -> claim -> stage (the first `stagers` blocks)
-> hear -> pull.  A chunk is one received row.  `detail` of a block: the peer that is told next, also with the chunk
while staging; (whether it arrived last, fault, headers) while pulling.  Each block pulls every row, so blocks are alike
once they have staged, and the machine keeps the blocks of a rank sorted.
"""

from __future__ import annotations

from .dispatch import CHUNKED, WIDE, WITH_WEIGHTS, mismatch, user_reads
from .explorer import Violation
from .program import COMBINE, DISPATCH
from .turn import CLAIMED, OUT, ROWS, WEIGHTS, Handler, OutOfStep, Turn, call_of, dispatched_row, value_of


def first_step(turn: Turn, block: int) -> tuple[str, object]:
    if turn.last_kind == COMBINE:
        return ("combine entered", 0) if block == 0 else ("combine entered wait", block)
    return after_entered(turn, block)


def after_entered(turn: Turn, block: int) -> tuple[str, object]:
    return ("combine header", 0) if block == 0 else after_header(turn, block)


def after_header(turn: Turn, block: int) -> tuple[str, object]:
    return ("combine claim" if stages(turn) and block < turn.program.stagers else "combine hear"), block


def external(turn: Turn) -> bool:
    return turn.program.calls_of(turn.rank)[turn.index] == "X"


def has_weights(turn: Turn) -> bool:
    return turn.place not in turn.program.no_weights


def stages(turn: Turn) -> bool:
    return external(turn) or has_weights(turn)


def entered(turn: Turn) -> bool:
    """The peers may have read what this call stages: tell them that this rank has left the combine before."""
    if turn.detail == 0:
        user_reads(turn, turn.program.last_dispatch(turn.index), turn.received)
    told, following = turn.peers(turn.detail)
    parity = turn.parity("parity.entered", turn.call)
    for peer in told:
        turn.send("word.entered", turn.at.word(turn.at.entered, peer, parity, turn.rank))
    turn.what = f"combine sends its entered word to {told}"
    turn.detail = following
    if following < 0:
        turn.step, turn.detail = "combine entered wait", 0
    return True


def entered_wait(turn: Turn) -> bool:
    at, has, ready, ticket = turn.at, turn.has, True, turn.detail
    parity, header_parity = turn.parity("parity.entered", turn.call), turn.parity("parity.header", turn.call)
    if has["wait.entered"] and (ticket == 0 or has["wait.entered_every_block"]):
        for peer in turn.waited_for("own.entered"):
            header = turn.cells[at.word(at.header, turn.rank, header_parity, peer)]
            if has["check.dispatch_while_entering"] and call_of(header) == turn.call and header & 1 == DISPATCH:
                raise OutOfStep("meets a dispatch while it enters a combine")
            ready &= turn.ready(at.word(at.entered, turn.rank, parity, peer))
    if ready:
        turn.what = "combine entered wait over"
        turn.step, turn.detail = after_entered(turn, ticket)
    return ready


def header(turn: Turn) -> bool:
    """The first block tells the peers at once.  If nothing is staged the header says that the rows are there: writes
    of an earlier kernel, released here."""
    if not stages(turn):
        turn.release("release.combine_header")
    told, following = turn.peers(turn.detail)
    wide = WIDE * (turn.place in turn.program.wide_rows)
    value = COMBINE | wide | WITH_WEIGHTS * has_weights(turn) | CHUNKED * stages(turn)
    parity = turn.parity("parity.header", turn.call)
    for peer in told:
        turn.send("word.combine_header", turn.at.word(turn.at.header, peer, parity, turn.rank), value)
    turn.what = f"combine sends its header to {told}"
    turn.detail = following
    if following < 0:
        turn.step, turn.detail = after_header(turn, 0)
    return True


def claim(turn: Turn) -> bool:
    """The next chunk with rows for peers; chunks of own rows are passed over."""
    ticket, chunk = turn.detail, turn.kernel[CLAIMED]
    may_claim = turn.has["claim.any_stager"] or (chunk + 1) % turn.program.stagers == ticket
    if chunk >= turn.received or not may_claim:
        turn.step, turn.what = "combine hear", "combine finds all chunks claimed"
        return True
    turn.set_kernel(claimed=chunk + 1)
    turn.what = f"combine claims chunk {chunk}"
    if source_of(turn, chunk) != turn.rank:
        turn.step, turn.detail = "combine stage", (ticket, chunk, 0)
    return True


def source_of(turn: Turn, chunk: int) -> int:
    return turn.program.received(turn.program.last_dispatch(turn.index), turn.rank)[chunk]


def stage(turn: Turn) -> bool:
    """One chunk into combine-in, release, ready words."""
    rank, (ticket, chunk, first) = turn.rank, turn.detail
    if first == 0:
        row = dispatched_row(turn.program.last_dispatch(turn.index), source_of(turn, chunk))
        staged = (turn.index + 1) << 8 | row
        if external(turn):
            turn.read(OUT, rank, chunk, row)
            turn.write(ROWS, rank, chunk, staged)
        if has_weights(turn):
            turn.write(WEIGHTS, rank, chunk, staged)
        turn.release("release.combine_rows")
    told, following = turn.peers(first)
    parity = turn.parity("parity.ready", turn.call)
    for peer in told:
        turn.send("word.ready", turn.at.ready_word(peer, parity, rank, chunk))
    turn.what = f"combine {'stages' if first == 0 else 'tells of'} chunk {chunk}, sends its ready word to {told}"
    turn.detail = (ticket, chunk, following)
    if following < 0:
        turn.step, turn.detail = "combine claim", ticket
    return True


def hear(turn: Turn) -> bool:
    """The headers of all live ranks, in every block; then the block arrives.  The last one to hear closes the call,
    with rows still to be pulled."""
    at, has, ready = turn.at, turn.has, True
    parity = turn.parity("parity.header", turn.call)
    if has["wait.combine_header"] and (turn.detail == 0 or has["wait.combine_every_block"]):
        for peer in turn.waited_for("own.combine_header"):
            cell = at.word(at.header, turn.rank, parity, peer)
            if not turn.ready(cell):
                ready = False
            elif has["check.combine_kind"] and turn.cells[cell] & 1 != COMBINE:
                raise OutOfStep("meets a dispatch in its combine")
    if not ready:
        return False
    cells = [at.word(at.header, turn.rank, parity, peer) for peer in turn.program.live]
    for cell in cells:
        turn.hear(cell)
    turn.acquire("acquire.combine_header")
    headers = [value_of(turn.cells[cell]) for cell in cells]
    fault = mismatch(turn, headers) if has["check.combine_row_bytes"] else ""
    wanted = turn.program.faults[turn.index]
    if fault != wanted:
        raise Violation(f"rank {turn.rank} decides {fault!r} in call {turn.call}, every rank must decide {wanted!r}")
    last = arrive(turn)
    turn.what = "combine hears all headers" + (", closes the call" if last else "")
    turn.step, turn.detail = "combine ready wait", (fault, tuple(headers))
    if fault:
        turn.done()
    return True


def arrive(turn: Turn) -> bool:
    last = turn.arrive("claim.combine_last_block", turn.detail)
    if last:
        turn.close_call(True, turn.received, turn.slots)
    return last


def ready_wait(turn: Turn) -> bool:
    """The chunks of all rows of this rank's token.  The kernel goes on token by token; here none is pulled before all
    are ready."""
    at, has = turn.at, turn.has
    parity = turn.parity("parity.ready", turn.call)
    for peer, slot, header in sources(turn):
        if peer == turn.rank or not header & CHUNKED and has["check.chunked_flag"]:
            continue
        word = at.ready_word(turn.rank, parity, peer, slot)
        if not turn.ready(word) and has["wait.ready"]:
            return False
        turn.hear(word)
    turn.acquire("acquire.combine_rows")
    turn.step, turn.what = "combine pull", "combine finds its rows ready"
    return True


def sources(turn: Turn) -> list[tuple[int, int, int]]:
    """Where this rank's rows are: rank, slot, and the header of that rank."""
    headers = dict(zip(turn.program.live, turn.detail[1], strict=True))
    return [(peer, slot, headers[peer]) for peer, slot in enumerate(turn.slots) if slot >= 0]


def pull(turn: Turn) -> bool:
    program, has = turn.program, turn.has
    row = dispatched_row(program.last_dispatch(turn.index), turn.rank)
    for peer, slot, header in sources(turn):
        own = peer == turn.rank
        content = program.registered_content(turn.index, own)
        if own and external(turn) and has["check.own_in_place"]:
            turn.read(OUT, peer, slot, row)
        elif own and external(turn):
            turn.read(ROWS, peer, slot, (turn.index + 1) << 8 | row)
        elif content >= 0:
            turn.read(ROWS, peer, slot, (content + 1) << 8 | row)
        if not own and (header & WITH_WEIGHTS or not has["check.weights_flag"]):
            turn.read(WEIGHTS, peer, slot, (turn.index + 1) << 8 | row)
    turn.what = "combine pulls its rows"
    turn.done()
    return True


def leave(turn: Turn) -> None:
    """A block whose wait has failed writes zeros; the last to arrive closes the call."""
    if turn.step != "combine ready wait":
        arrive(turn)
    turn.set_kernel(gave_up=1)
    turn.done()


HANDLERS: dict[str, Handler] = {
    "combine entered": (entered, (0,)),
    "combine entered wait": (entered_wait, (0,)),
    "combine header": (header, (0,)),
    "combine claim": (claim, (0,)),
    "combine stage": (stage, (0,)),
    "combine hear": (hear, (0,)),
    "combine ready wait": (ready_wait, (0,)),
    "combine pull": (pull, (0,)),
}
