"""Errors as messages: one rank finds a fault, every rank raises it with the same words."""

from __future__ import annotations

from typing import Any

from mori.errors import BootstrapError, BootstrapTimeout, MoriError, OutOfStep, PeerLost

_KINDS: dict[str, type[MoriError]] = {
    kind.__name__: kind for kind in (BootstrapError, BootstrapTimeout, OutOfStep, PeerLost)
}


def encode(error: MoriError) -> dict[str, Any]:
    return {"error": type(error).__name__, "message": str(error), "attributes": vars(error)}


def raise_if_error(message: Any) -> None:
    """Raise what `encode` was given on the other side; return for any other message."""
    if not isinstance(message, dict) or "error" not in message:
        return
    error = _KINDS.get(message["error"], BootstrapError)(message["message"])
    for name, value in message["attributes"].items():
        setattr(error, name, tuple(value) if isinstance(value, list) else value)
    raise error


def place(hello: dict[str, Any]) -> str:
    """Where a rank runs, for messages."""
    return f"host {hello.get('host')}, pid {hello.get('pid')}"


def name_ranks(ranks: list[int] | tuple[int, ...]) -> str:
    """The words `rank 3` or `ranks 1, 2, 5`; long lists are cut."""
    shown = ", ".join(map(str, ranks[:16])) + (f" and {len(ranks) - 16} more" if len(ranks) > 16 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"
