"""Where the ranks of one unique id meet: a thread of the process that created the id.

    rank -> lobby   registration: nranks, hello, how long it will wait, (rank 0) where its star listens
    lobby -> rank   "go": every rank's hello and the address of the star, once all have registered
    rank -> lobby   "connected", once its connection of the star stands
    lobby -> rank   "done", once all are connected; the lobby closes

At any point a failure goes to everyone instead, with one wording: joining succeeds on all ranks or on none. After a
failure the lobby stays until its deadline, so that ranks that come late hear the cause too.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
import time
from typing import Any

from mori.cco import verdict
from mori.cco.handshake import Doorman, Guest
from mori.cco.whole import whole
from mori.cco.wire import Channel, WireError
from mori.errors import BootstrapError, BootstrapTimeout, MoriError

ROLE = "rank"
# What must be the same on all ranks before they may exchange anything further.
AGREED_FIELDS = {
    "version": "mori version",
    "protocol": "protocol version",
    "target": "target (MORI_TARGET)",
    "arch": "arch",
}
_TICK_S = 0.5
_FAREWELL_S = 5.0  # how long the last messages may take to leave


class _Seat:
    """A registered rank."""

    def __init__(self, channel: Channel, registration: dict[str, Any]) -> None:
        self.channel = channel
        self.nranks: int = whole(registration["nranks"], "nranks")
        self.hello: dict[str, Any] = registration["hello"]
        self.star = registration["star"]
        self.timeout_s = float(registration["timeout_s"])
        self.deadline = time.monotonic() + self.timeout_s
        self.connected = False

    @property
    def who(self) -> str:
        return verdict.place(self.hello)


class Lobby:
    def __init__(self, listener: socket.socket, secret: bytes, timeout_s: float) -> None:
        self._doorman = Doorman(listener, secret, ROLE)
        self._selector = selectors.EpollSelector()
        self._selector.register(self._doorman, selectors.EVENT_READ)
        self._guests: dict[int, Guest] = {}  # by descriptor: proven, registered or not
        self._seats: dict[int, _Seat] = {}
        self._deadline = time.monotonic() + timeout_s
        self._gone = False  # "go" has been said
        self._failure: MoriError | None = None
        self._nranks = 0  # the largest that any rank has stated
        self._told: set[int] = set()  # ranks that know the failure, or are gone

    def start(self) -> None:
        threading.Thread(target=self._run, name="mori-lobby", daemon=True).start()

    def _run(self) -> None:
        try:
            while not self._finished():
                for key, _ in self._selector.select(self._patience_s()):
                    if key.fileobj is self._doorman:
                        self._welcome()
                    elif (guest := self._guests.get(key.fd)) is not None:
                        self._serve(guest)
                self._doorman.expire()
                self._check_deadlines()
            self._flush()
        finally:
            self._close()

    def _patience_s(self) -> float:
        """Until the next deadline, but short enough to drop silent strangers in time."""
        ends = [self._deadline]
        if self._failure is None:
            ends += [seat.deadline for seat in self._seats.values()]
        return max(0.0, min(_TICK_S, min(ends) - time.monotonic()))

    def _finished(self) -> bool:
        if self._failure is None:
            return self._gone and all(seat.connected for seat in self._seats.values())
        everyone = self._nranks > 0 and self._told >= set(range(self._nranks))
        return everyone or time.monotonic() >= self._deadline

    def _welcome(self) -> None:
        for guest in self._doorman.admit():
            self._guests[guest.channel.fileno()] = guest
            self._selector.register(guest.channel, selectors.EVENT_READ)

    def _serve(self, guest: Guest) -> None:
        try:
            guest.channel.flush()
            guest.channel.read()
            while guest.channel.incoming:
                self._hear(guest, guest.channel.incoming.popleft())
            self._watch(guest.channel)
        except (OSError, WireError):
            self._leave(guest)
        except (KeyError, TypeError, ValueError):
            self._fail(
                BootstrapError(
                    f"rank {guest.rank} speaks another bootstrap protocol; run the same mori version on every rank"
                )
            )

    def _watch(self, channel: Channel) -> None:
        writing = selectors.EVENT_WRITE if channel.outgoing else 0
        self._selector.modify(channel, selectors.EVENT_READ | writing)

    def _hear(self, guest: Guest, message: dict[str, Any]) -> None:
        if self._failure is not None:
            self._tell(guest)
        elif "nranks" in message:
            self._seat(guest, _Seat(guest.channel, message))
        elif "failed" in message:
            self._fail(BootstrapError(f"rank {guest.rank} could not join: {message['failed']}"))
        else:
            self._seats[guest.rank].connected = True
            if all(seat.connected for seat in self._seats.values()):
                self._broadcast({"done": True})

    def _seat(self, guest: Guest, seat: _Seat) -> None:
        self._deadline = max(self._deadline, seat.deadline)
        self._nranks = max(self._nranks, seat.nranks)
        objection = self._objection(guest.rank, seat)
        if objection:
            self._fail(BootstrapError(objection))
            return
        self._seats[guest.rank] = seat
        if len(self._seats) == seat.nranks:
            self._gone = True
            peers = [self._seats[rank].hello for rank in range(seat.nranks)]
            self._broadcast({"go": peers, "star": self._seats[0].star})

    def _objection(self, rank: int, seat: _Seat) -> str | None:
        me = f"rank {rank} ({seat.who})"
        if not self._seats:
            return None if 0 <= rank < seat.nranks else f"{me} is out of range for nranks={seat.nranks}"
        first_rank, first = next(iter(self._seats.items()))
        if seat.nranks != first.nranks:
            return f"{me} joins with nranks={seat.nranks}, rank {first_rank} ({first.who}) with nranks={first.nranks}"
        if not 0 <= rank < seat.nranks:
            return f"{me} is out of range for nranks={seat.nranks}: ranks are 0 to {seat.nranks - 1}"
        if rank in self._seats:
            return f"rank {rank} joins twice: {self._seats[rank].who}, and {seat.who}; give each process its own rank"
        for field, name in AGREED_FIELDS.items():
            mine, theirs = seat.hello.get(field), first.hello.get(field)
            if mine != theirs:
                return (
                    f"ranks differ in {name}: {me} has {mine}, rank {first_rank} ({first.who}) has {theirs}; "
                    "it must be the same on every rank"
                )
        return None

    def _leave(self, guest: Guest) -> None:
        self._selector.unregister(guest.channel)
        del self._guests[guest.channel.fileno()]
        guest.channel.close()
        seat = self._seats.get(guest.rank)
        if seat is None or seat.channel is not guest.channel:
            return
        self._told.add(guest.rank)
        if self._failure is None and not self._finished():
            self._fail(BootstrapError(f"rank {guest.rank} ({seat.who}) went away before all ranks had joined"))

    def _check_deadlines(self) -> None:
        if self._failure is not None or self._finished():
            return
        now = time.monotonic()
        late = [rank for rank, seat in self._seats.items() if seat.deadline <= now]
        if late:
            self._fail(self._overdue(late[0]))
        elif now >= self._deadline:
            self._fail(BootstrapTimeout("no rank joined before the deadline of the unique id (MORI_BOOTSTRAP_TIMEOUT)"))

    def _overdue(self, rank: int) -> BootstrapTimeout:
        """The time of `rank` is over: who kept it waiting?"""
        nranks, timeout_s = self._nranks, self._seats[rank].timeout_s
        if self._gone:
            missing = [r for r, seat in sorted(self._seats.items()) if not seat.connected]
        else:
            missing = [r for r in range(nranks) if r not in self._seats]
        return BootstrapTimeout(
            f"{verdict.name_ranks(missing)} of {nranks} had not {'connected to rank 0' if self._gone else 'joined'} "
            f"when the {timeout_s:g} s of rank {rank} were over; start missing ranks earlier or raise "
            "MORI_BOOTSTRAP_TIMEOUT",
            missing=tuple(missing),
        )

    def _fail(self, failure: MoriError) -> None:
        self._failure = failure
        for guest in list(self._guests.values()):
            self._tell(guest)

    def _tell(self, guest: Guest) -> None:
        assert self._failure is not None
        self._told.add(guest.rank)
        self._post(guest.channel, verdict.encode(self._failure))

    def _broadcast(self, message: object) -> None:
        for seat in self._seats.values():
            self._post(seat.channel, message)

    def _post(self, channel: Channel, message: object) -> None:
        with contextlib.suppress(OSError):  # if its end is gone, the selector says so next
            channel.post(message)
            self._watch(channel)

    def _flush(self) -> None:
        end = time.monotonic() + _FAREWELL_S
        for guest in self._guests.values():
            with contextlib.suppress(OSError, TimeoutError):
                guest.channel.drain(end)
                guest.channel.sock.shutdown(socket.SHUT_WR)

    def _close(self) -> None:
        for guest in self._guests.values():
            guest.channel.close()
        self._selector.close()
        self._doorman.close()
