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


DEADLOCK, TORN, ROW_LOST = "deadlock", "unordered with the write", "holds nothing"
RESTAGED = "put there by call 3, wanted the row of rank 0 from dispatch 1 put there by call 2"

STEPS = (
    Step("word.count", "D", DEADLOCK),
    Step("word.dispatch_header", "D", DEADLOCK),
    Step("word.rows", "D", DEADLOCK),
    Step("word.entered", "DXX", DEADLOCK),
    Step("word.combine_header", "DX", DEADLOCK),
    Step("wait.dispatch_header", "row bytes differ", "must decide 'row mismatch'"),
    Step("wait.dispatch_every_block", "D", "is overwritten"),
    Step("wait.count", "D split", "is overwritten"),
    Step("wait.count_whole_row", "DDX split", "wanted the row of rank 0 from dispatch 1"),
    Step("wait.rows", "DX", ROW_LOST),
    Step("wait.entered", "DXX", RESTAGED),
    Step("wait.entered_every_block", "DXX", RESTAGED),
    Step("wait.combine_header", "DX", ROW_LOST),
    Step("wait.combine_every_block", "DX", ROW_LOST),
    Step("own.count", "D", "counts 1 received rows in call 1, not 2"),
    Step("own.dispatch_header", "stated fault", "must decide 'stated fault'"),
    Step("own.combine_header", "DX", ROW_LOST),
    Step("parity.count", "faulted dispatch sends no rows words", "in call 1 finds a word of call 2"),
    Step("parity.header", "XD", "in call 1 finds a word of call 2"),
    Step("parity.entered", "DXXX", "in call 3 finds a word of call 4"),
    Step("release.dispatch_rows", "DX", TORN),
    Step("fence.dispatch_last_block", "DX", TORN),
    Step("acquire.dispatch_rows", "DX", TORN),
    Step("release.combine_rows", "DX", TORN),
    Step("fence.combine_last_chunk", "DX", TORN),
    Step("acquire.combine_rows", "DX", TORN),
    Step("acquire.combine_every_block", "DX", TORN),
    Step("claim.dispatch_last_block", "DX", ROW_LOST),
    Step("claim.ticket", "one resident block", DEADLOCK),
    Step("claim.combine_any_block", "one resident block", DEADLOCK),
    Step("claim.combine_last_done", "DX", ROW_LOST),
    Step("claim.empty_chunk", "DX, rank 1 receives nothing", DEADLOCK),
    Step("check.later_tag", "call number off by two", DEADLOCK),
    Step("check.combine_kind", "dispatch meets combine", ROW_LOST),
    Step("check.dispatch_while_entering", "dispatch meets second combine", DEADLOCK),
    Step("check.dispatch_row_bytes", "row bytes differ", "must decide 'row mismatch'"),
    Step("check.combine_row_bytes", "row bytes differ in combine", "must decide 'row mismatch'"),
    Step("check.dispatch_stated_fault", "stated fault", "must decide 'stated fault'"),
    Step("check.combine_stated_fault", "stated fault in combine", "must decide 'stated fault'"),
    Step("check.overflow", "overflow", "writes slot 1 of rank 0, which has 1"),
    Step("check.overflow_everywhere", "overflow", "writes slot 1 of rank 0, which has 1"),
    Step("check.weights_bit", "DXX, no weights at rank 1", "combine_in weights of rank 1"),
    Step("check.live_set", "masked rank", DEADLOCK),
    Step("check.abort_at_entry", "rank 2 of 3 dies", "combine_in rows of rank 0, slot 0, holds nothing"),
    Step("abort.poll_dispatch_wait", "rank 1 dies", DEADLOCK),
    Step("abort.poll_rows_wait", "rank 1 dies", DEADLOCK),
    Step("abort.poll_entered_wait", "rank 1 dies", DEADLOCK),
    Step("abort.poll_combine_wait", "rank 1 dies", DEADLOCK),
    Step("abort.dispatch_last_block_looks", "rank 1 dies", "although a block of it gave up"),
    Step("abort.combine_last_block_looks", "rank 1 dies", "although a block of it gave up"),
    Step("abort.tell_peers", "dispatch meets second combine", DEADLOCK),
    Step("abort.first_cause", "rank 2 of 3 dies", "abort cause"),
    Step("abort.tell_peers_at_entry", "rank 2 of 3 dies", "abort cause 1, wanted one of [0, 3]"),
    Step("state.last_kind", "DXX", RESTAGED),
)
SPARE_STEPS = (
    SpareStep("own.rows", "the block that waits for the rank's own rows word has sent it"),
    SpareStep("own.entered", "a block that runs is the proof that its rank has left the call before"),
    SpareStep(
        "parity.rows",
        "a peer sends rows words of the next dispatch only after this rank's count words of it, so after the only"
        " block that reads them is done; kept for the staged leg",
    ),
    SpareStep(
        "check.dispatch_kind",
        "the combining rank always meets the dispatch header and aborts everyone; kept so that the dispatch says itself"
        " what it met",
    ),
)
NAMES = tuple(step.name for step in (*STEPS, *SPARE_STEPS))
