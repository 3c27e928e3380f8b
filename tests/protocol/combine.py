"""The steps of a combine, external or zero copy: csrc/kernels/combine.hpp and the waits of rendezvous.hpp.

(entered -> entered wait, after another combine) -> claim -> stage -> (block of the last chunk) send -> wait -> pull.
A chunk is one received row.  `detail` of a block: peer index while sending, the chunk while staging, whether it sent
the word while waiting, (fault, weight bits of the headers) while pulling.  Blocks are alike here, so the machine keeps
the blocks of a rank sorted, and each of them pulls every row.
"""

from __future__ import annotations

from .dispatch import enters
from .explorer import Violation
from .program import COMBINE, DISPATCH
from .turn import (
    BLOCK_DONE,
    CLAIMED,
    FINISHED,
    OUT,
    RELEASED,
    ROWS,
    STAGED,
    WEIGHTS,
    Handler,
    OutOfStep,
    Turn,
    dispatched_row,
)


def first_step(last_kind: int, block: int) -> tuple[str, object]:
    if last_kind != COMBINE:
        return "combine claim", None
    return ("combine entered", 0) if block == 0 else ("combine entered wait", False)


def entered(turn: Turn) -> bool:
    """The peers may have read what this call stages: tell them that this rank has left the combine before."""
    if turn.detail == 0 and not enters(turn):
        return True
    peer = turn.program.live[turn.detail]
    cell = turn.at.word(turn.at.entered, peer, turn.parity("parity.entered", turn.call), turn.rank)
    turn.send("word.entered", cell, 0)
    turn.what = f"combine sends rank {peer} its entered word"
    turn.detail += 1
    if turn.detail == len(turn.program.live):
        turn.step, turn.detail = "combine entered wait", True
    return True


def entered_wait(turn: Turn) -> bool:
    at, has, ready = turn.at, turn.has, True
    parity, header_parity = turn.parity("parity.entered", turn.call), turn.parity("parity.header", turn.call)
    if has["wait.entered"] and (turn.detail or has["wait.entered_every_block"]):
        for peer in turn.waited_for("own.entered"):
            header = turn.cells[at.word(at.header, turn.rank, header_parity, peer)]
            if has["check.dispatch_while_entering"] and header >> 8 == turn.call and header & 1 == DISPATCH:
                raise OutOfStep("meets a dispatch while it enters a combine")
            ready &= turn.ready(at.word(at.entered, turn.rank, parity, peer))
    if ready:
        turn.step, turn.detail, turn.what = "combine claim", None, "combine entered wait over"
    return ready


def has_weights(turn: Turn) -> bool:
    return (turn.index, turn.rank) not in turn.program.no_weights


def chunks(turn: Turn) -> int:
    """At least one, so that a rank that received nothing still has a block that sends its header."""
    stages = turn.program.calls_of(turn.rank)[turn.index] == "X" or has_weights(turn)
    rows = turn.received if stages else 0
    return max(rows, 1) if turn.has["claim.empty_chunk"] else rows


def claim(turn: Turn) -> bool:
    kernel = turn.kernel
    chunk = kernel[CLAIMED]
    if chunk == 0 and not enters(turn):  # the first block to claim; later ones meet an abort in the wait
        return True
    may_claim = turn.has["claim.combine_any_block"] or chunk % turn.at.blocks == turn.block
    if chunk == chunks(turn) or not may_claim:
        turn.step, turn.detail, turn.what = "combine wait", False, "combine finds all chunks claimed"
        return True
    kernel[CLAIMED] += 1
    turn.cells[turn.at.kernel + turn.rank] = tuple(kernel)
    turn.step, turn.detail, turn.what = "combine stage", chunk, f"combine claims chunk {chunk}"
    return True


def stage(turn: Turn) -> bool:
    """One chunk into combine-in, release, count it done; the block that completes the last chunk owns the header."""
    program, chunk, rank = turn.program, turn.detail, turn.rank
    external = program.calls_of(rank)[turn.index] == "X"
    if chunk < turn.received:
        dispatch = program.last_dispatch(turn.index)
        row = dispatched_row(dispatch, program.received(dispatch, rank)[chunk])
        staged = (turn.index + 1) << 8 | row
        if external:
            turn.read(OUT, rank, chunk, row)
            turn.write(ROWS, rank, chunk, staged)
        if has_weights(turn):
            turn.write(WEIGHTS, rank, chunk, staged)
    turn.release("release.combine_rows")
    kernel = turn.kernel
    kernel[STAGED] += 1
    turn.heard |= kernel[RELEASED]
    kernel[RELEASED] |= turn.released
    turn.cells[turn.at.kernel + rank] = tuple(kernel)
    turn.what = f"combine stages chunk {chunk}, releases, counts it done"
    last = kernel[STAGED] == chunks(turn) if turn.has["claim.combine_last_done"] else chunk == chunks(turn) - 1
    if last:
        turn.acquire("fence.combine_last_chunk")
        turn.release("fence.combine_last_chunk")
    turn.step, turn.detail = ("combine send", 0) if last else ("combine claim", None)
    return True


def send(turn: Turn) -> bool:
    program, place = turn.program, (turn.index, turn.rank)
    peer = program.live[turn.detail]
    value = COMBINE | (place in program.wide_rows) << 1 | has_weights(turn) << 2 | (place in program.bad_ids) << 3
    cell = turn.at.word(turn.at.header, peer, turn.parity("parity.header", turn.call), turn.rank)
    turn.send("word.combine_header", cell, value, carries=True)
    turn.what = f"combine sends rank {peer} its header"
    turn.detail += 1
    if turn.detail == len(program.live):
        turn.step, turn.detail = "combine wait", True
    return True


def wait(turn: Turn) -> bool:
    at, has, ready = turn.at, turn.has, True
    parity = turn.parity("parity.header", turn.call)
    if has["wait.combine_header"] and (turn.detail or has["wait.combine_every_block"]):
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
    if turn.detail or has["acquire.combine_every_block"]:
        turn.acquire("acquire.combine_rows")
    words = [turn.cells[cell] for cell in cells]
    fault = ""
    if has["check.combine_row_bytes"] and len({word >> 1 & 1 for word in words}) > 1:
        fault = "row mismatch"
    elif has["check.combine_stated_fault"] and any(word >> 3 & 1 for word in words):
        fault = "stated fault"
    weights = tuple(bool(word >> 2 & 1) or not has["check.weights_bit"] for word in words)
    turn.step, turn.detail, turn.what = "combine pull", (fault, weights), "combine wait over"
    return True


def pull(turn: Turn) -> bool:
    """The peers' rows; then the call is over for this block, and for the rank with its last block."""
    program, (decided, weights) = turn.program, turn.detail
    fault = program.faults[turn.index]
    if decided != fault:
        raise Violation(f"rank {turn.rank} decides {decided!r} in call {turn.call}, every rank must decide {fault!r}")
    dispatch = program.last_dispatch(turn.index)
    for place, peer in enumerate(program.live):
        slot = turn.slots[peer]
        if fault or slot < 0:
            continue
        row = dispatched_row(dispatch, turn.rank)
        turn.read(ROWS, peer, slot, (program.registered_content(turn.index) + 1) << 8 | row)
        if weights[place]:
            turn.read(WEIGHTS, peer, slot, (turn.index + 1) << 8 | row)
    turn.what = "combine pulls its rows, counts in"
    kernel = turn.kernel
    kernel[FINISHED] += 1
    turn.cells[turn.at.kernel + turn.rank] = tuple(kernel)
    turn.step, turn.detail = BLOCK_DONE, None
    if kernel[FINISHED] < turn.at.blocks:
        return True
    if turn.aborted and turn.has["abort.combine_last_block_looks"]:
        turn.what += ", finds the abort word set"
        turn.abort("abort.tell_peers", counted_in=True)
    else:
        turn.machine.finish(turn, turn.received, turn.slots)
    return True


HANDLERS: dict[str, Handler] = {
    "combine entered": (entered, (0,)),
    "combine entered wait": (entered_wait, (0,)),
    "combine claim": (claim, (0,)),
    "combine stage": (stage, (0,)),
    "combine send": (send, (0,)),
    "combine wait": (wait, (0,)),
    "combine pull": (pull, (0,)),
}
PRIVATE = frozenset({"combine claim"})
