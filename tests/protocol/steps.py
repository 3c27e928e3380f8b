"""Every step of the protocol that can be taken out on its own, and the program that fails without it.

The model looks each step up by its name (a name that is not here is a KeyError), so no step of the model is missing.
"""

from __future__ import annotations

from typing import NamedTuple


class Step(NamedTuple):
    name: str
    fails: str  # the program of `programs.py` that breaks without this step
    how: str  # part of what the explorer then says


class SpareStep(NamedTuple):
    """A step without which every program still ends well."""

    name: str
    reason: str
    in_deaths: bool = False  # of use only when a rank dies


DEADLOCK, TORN, ROW_LOST = "deadlock", "unordered with the write", "holds nothing"
RESTAGED = "put there by call 3, wanted the row of rank 0 from dispatch 1 put there by call 2"
LATER_WORD, GAVE_UP = "finds a word of call", "ends as complete although a block of it gave up"
MISMATCH = "must decide 'row mismatch of rank 1'"

STEPS = (
    Step("word.count", "D", DEADLOCK),
    Step("word.blocks", "D", DEADLOCK),
    Step("word.dispatch_header", "D", DEADLOCK),
    Step("word.rows", "D", DEADLOCK),
    Step("word.entered", "DXX", DEADLOCK),
    Step("word.combine_header", "DX", DEADLOCK),
    Step("word.ready", "DX", DEADLOCK),
    Step("wait.dispatch_header", "row bytes differ, split", MISMATCH),
    Step("wait.dispatch_every_block", "D", "is overwritten"),
    Step("wait.count", "D split", "is overwritten"),
    Step("wait.count_whole_row", "DDX split", "is overwritten"),
    Step("wait.blocks", "D split", ROW_LOST),
    Step("wait.rows", "D", ROW_LOST),
    Step("wait.rows_of_all_blocks", "D", ROW_LOST),
    Step("wait.landed", "S", ROW_LOST),
    Step("wait.entered", "DXX", RESTAGED),
    Step("wait.entered_every_block", "DXX, 2 stagers", RESTAGED),
    Step("wait.combine_header", "DZX, no weights", ROW_LOST),
    Step("wait.combine_every_block", "DZX, no weights", ROW_LOST),
    Step("wait.ready", "DX", ROW_LOST),
    Step("own.count", "D split", ROW_LOST),
    Step("own.dispatch_header", "row bytes differ, split", MISMATCH),
    Step("own.combine_header", "row bytes differ in combine", MISMATCH),
    Step("own.landed", "S", ROW_LOST),
    Step("parity.count", "SS", LATER_WORD),
    Step("parity.blocks", "SS", LATER_WORD),
    Step("parity.header", "XD", LATER_WORD),
    Step("parity.entered", "DXXX", LATER_WORD),
    Step("parity.rows", "SS", LATER_WORD),
    Step("parity.landing", "SS", "landing area 0"),
    Step("release.dispatch_rows", "D", TORN),
    Step("release.landed_rows", "S", TORN),
    Step("release.combine_header", "DZDZ, no weights", TORN),
    Step("release.combine_rows", "DX", TORN),
    Step("acquire.dispatch_rows", "D", TORN),
    Step("acquire.landed_rows", "S", TORN),
    Step("acquire.combine_header", "DZDZ, no weights", TORN),
    Step("acquire.combine_rows", "DX", TORN),
    Step("assume.writes_at_home", "SDS and DSD", "is overwritten"),
    Step("claim.dispatch_last_block", "rank 1 dies", GAVE_UP),
    Step("claim.combine_last_block", "DXX, 2 stagers", "is overwritten"),
    Step("claim.ticket", "one resident block", DEADLOCK),
    Step("claim.any_mover", "one resident block, staged", ROW_LOST),
    Step("claim.arrive_after_move", "S", "is overwritten"),
    Step("claim.any_stager", "one resident block", DEADLOCK),
    Step("check.later_tag", "call number off by two", DEADLOCK),
    Step("check.combine_kind", "dispatch meets combine", ROW_LOST),
    Step("check.dispatch_while_entering", "dispatch meets second combine", DEADLOCK),
    Step("check.dispatch_row_bytes", "row bytes differ", MISMATCH),
    Step("check.combine_row_bytes", "row bytes differ in combine", MISMATCH),
    Step("check.overflow", "overflow", "must decide 'overflow of rank 0'"),
    Step("check.overflow_everywhere", "overflow", "rank 1 decides '' in call 1"),
    Step("check.fault_before_move", "staged overflow", "writes slot 1 of rank 0, which has 1"),
    Step("check.staged_path", "S", ROW_LOST),
    Step("check.all_started", "one resident block, staged", DEADLOCK),
    Step("check.weights_flag", "DXX, no weights at rank 1", "combine_in weights of rank 1"),
    Step("check.chunked_flag", "DZX, no weights", DEADLOCK),
    Step("check.own_in_place", "DX", ROW_LOST),
    Step("check.live_set", "masked rank", DEADLOCK),
    Step("check.abort_at_entry", "rank 2 of 3 dies, staged", "landing area 1"),
    Step("abort.poll_dispatch_wait", "rank 1 dies", DEADLOCK),
    Step("abort.poll_landed_wait", "rank 1 dies, staged", DEADLOCK),
    Step("abort.poll_rows_wait", "rank 1 dies", DEADLOCK),
    Step("abort.poll_entered_wait", "rank 1 dies", DEADLOCK),
    Step("abort.poll_combine_wait", "rank 1 dies", DEADLOCK),
    Step("abort.poll_ready_wait", "rank 1 dies", DEADLOCK),
    Step("abort.last_block_looks", "rank 1 dies", GAVE_UP),
    Step("abort.tell_peers", "rank 2 of 3 dies", "abort cause"),
    Step("abort.compare_and_swap", "rank 2 of 3 dies", "abort cause"),
    Step("state.last_kind", "DXX", RESTAGED),
)
SPARE_STEPS = (
    SpareStep("own.blocks", "nobody waits for the direct rows words of its own rank"),
    SpareStep("own.entered", "a block that runs is the proof that its rank has left the call before"),
    SpareStep(
        "parity.ready",
        "a peer stages for a later combine only after this rank has entered it, or a dispatch before it, so after all"
        " blocks that read the words of this one have ended",
    ),
    SpareStep(
        "check.dispatch_kind",
        "the combining rank always meets the dispatch header and aborts everyone; kept so that the dispatch says itself"
        " what it met",
    ),
    SpareStep(
        "abort.look_again",
        "a block gives up after the abort word is set and arrives after it gave up, so the last block, which looks at"
        " the abort word after all have arrived, closes the call as failed; kept so that a peer's orderly end fails no"
        " call whose words are there. A wait's rarer checks give up without it",
        in_deaths=True,
    ),
)
NAMES = tuple(step.name for step in (*STEPS, *SPARE_STEPS))
