"""Every exception that mori raises on purpose.

`MoriError` is the root. Three families hang below it, told apart by what is still usable afterwards:

* the communicator is lost: `PeerLost`, `PeerTimeout`, `OutOfStep`. Every later call on it raises the same cause;
* one call failed, on every rank alike, and the op goes on: `CallFault` and its subclasses;
* nothing came into being: `BootstrapError`, `ConfigMismatch`, `HeapExhausted`, `NotInitialized`.

The attributes are plain values in the instance dictionary, so all of them survive pickling between processes.
"""

from __future__ import annotations


class MoriError(RuntimeError):
    """Root of all errors that mori raises on purpose."""


class PeerLost(MoriError):
    """A rank that this one needs is gone: its process died, or it left the communicator.

    `peer` is the rank (None when it is not known which), `phase` what this rank was doing, `host` and `pid` say where
    the peer ran, `reason` is "died" or "left the communicator". Without a `message` one is composed from these.
    """

    def __init__(
        self,
        message: str = "",
        *,
        peer: int | None = None,
        phase: str = "",
        host: str = "",
        pid: int = 0,
        reason: str = "died",
    ) -> None:
        self.peer = peer
        self.phase = phase
        self.host = host
        self.pid = pid
        self.reason = reason
        super().__init__(message or self._compose())

    def _compose(self) -> str:
        who = "a peer rank" if self.peer is None else f"rank {self.peer}"
        where = ", ".join(part for part in (f"pid {self.pid}" if self.pid else "", self.host) if part)
        when = f" during {self.phase}" if self.phase else ""
        return (
            f"{who}{f' ({where})' if where else ''} {self.reason}{when}; "
            "this communicator cannot be used any more: destroy it and build a new one with the ranks that are alive"
        )


class PeerTimeout(MoriError, TimeoutError):
    """A rank is alive but did not do its part of `phase` in time; `expected` and `seen` say what was awaited."""

    def __init__(
        self,
        message: str = "",
        *,
        peer: int | None = None,
        phase: str = "",
        expected: object = None,
        seen: object = None,
    ) -> None:
        self.peer = peer
        self.phase = phase
        self.expected = expected
        self.seen = seen
        super().__init__(message or self._compose())

    def _compose(self) -> str:
        who = "a peer rank" if self.peer is None else f"rank {self.peer}"
        what = f" in {self.phase}" if self.phase else ""
        return (
            f"{who} is alive but did not arrive{what} in time: expected {self.expected}, seen {self.seen}; "
            "if ranks may legally be this far apart, raise MORI_TIMEOUT_S"
        )


class OutOfStep(MoriError):
    """Ranks made different calls (dispatch against combine, or another call number) at the same time."""


class CallFault(MoriError):
    """A fault of one call, seen alike by every rank; the op stays usable."""


class ReceiveOverflow(CallFault):
    """A rank would have received more rows than its buffers hold."""


class RowMismatch(CallFault):
    """Ranks passed rows of different dtype or size to the same call."""


class CallFaultWarning(RuntimeWarning):
    """An earlier call on this op failed and nobody has asked for the cause yet (`op.check()` raises it)."""


class ConfigMismatch(MoriError, ValueError):
    """Ranks disagree about something that shapes memory or the wire; the message names field, ranks and values."""


class BootstrapError(MoriError):
    """The ranks could not find, authenticate or understand each other."""


class BootstrapTimeout(BootstrapError, TimeoutError):
    """A set-up step ended at its deadline; `missing` holds the ranks that had not arrived (empty when unknown)."""

    def __init__(self, message: str = "", *, missing: tuple[int, ...] = ()) -> None:
        self.missing = tuple(missing)
        super().__init__(message)


class HeapExhausted(MoriError):
    """The symmetric heap is too small; the message states needed, used and configured bytes and the variable to set."""


class NotInitialized(MoriError):
    """Something was used before the shmem layer was initialised, or after it was finalised."""


class UnsupportedDtype(TypeError, KeyError):
    """A payload dtype that no kernel serves; also a KeyError because that is what existing callers catch."""

    # KeyError shows the repr of its argument; users should read the plain sentence.
    __str__ = Exception.__str__
