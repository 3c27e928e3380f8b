"""From the abort word of a communicator to the exception that tells what happened."""

from __future__ import annotations

from typing import Any

from mori.errors import MoriError, OutOfStep, PeerLost, PeerTimeout

# Numbers of csrc/layout/comm_control.hpp.
PEER_DIED, PEER_LEFT, PEER_TIMEOUT, OUT_OF_STEP = 1, 2, 3, 4
PHASES = {
    0: "a call",
    1: "dispatch, waiting for its row counts",
    2: "dispatch, waiting for its rows",
    3: "combine, waiting for it to enter",
    4: "combine, waiting for its rows to be ready",
    5: "a watch over the peers",
    6: "a barrier",
}


def peer_left(peer: int, hello: dict[str, Any], phase: str) -> PeerLost:
    return PeerLost(
        peer=peer, phase=phase, host=str(hello["host"]), pid=int(hello["pid"]), reason="left the communicator"
    )


def communicator_error(fault: tuple[int, ...], peers: list[dict[str, Any]]) -> MoriError:
    """The exception for a decoded abort word; `peers` are the ranks' hellos."""
    kind, phase_number, peer, origin, call, expected, seen = fault
    phase = PHASES.get(phase_number, "a call")
    host, pid = str(peers[peer]["host"]), int(peers[peer]["pid"])
    if kind == PEER_LEFT:
        return peer_left(peer, peers[peer], phase)
    if kind == PEER_TIMEOUT:
        return PeerTimeout(
            f"rank {peer} (pid {pid}, {host}) is alive but did not arrive in time: rank {origin} was in {phase} "
            f"(call {call}; expected word {expected:#x}, seen {seen:#x}). If ranks may legally be this far apart, "
            "raise MORI_TIMEOUT_S",
            peer=peer,
            phase=phase,
            expected=expected,
            seen=seen,
        )
    if kind == OUT_OF_STEP:
        return OutOfStep(
            f"rank {origin} is in {phase}, call {call} ({_describe(expected)}), but rank {peer} is in "
            f"{_describe(seen)}: every rank must make the same calls in the same order. Destroy this communicator"
        )
    return PeerLost(peer=peer, phase=phase, host=host, pid=pid, reason="died")


def _describe(header: int) -> str:
    """A header word: call:32 | row_bytes:24 | dtype:4 | kind:1 | path:1 | fault:2."""
    return f"{'combine' if header >> 3 & 1 else 'dispatch'} number {header >> 32}"
