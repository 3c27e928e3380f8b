"""Set-up collectives over a star: every rank has one connection, to rank 0 (the hub).

Each frame carries the number and the name of the step, so ranks that are in different steps are told so. The hub
decides, and its verdict reaches every rank with the same words; the first rank whose deadline ends asks for one.

    spoke -> hub    {"step", "what", "value"}      its part
    hub -> spoke    {"step", "values"}             all parts
    hub -> spoke    {"error", ...}                 the step failed (verdict.py)
    spoke -> hub    {"step", "expired": seconds}   its time is over
    either way      {"bye"}                        leaving in good order
"""

from __future__ import annotations

import contextlib
import json
import select
import socket
import time
from typing import Any

from mori.cco import verdict
from mori.cco.wire import POLL_INTERVAL_S, Channel, Poll, WireError
from mori.errors import BootstrapError, BootstrapTimeout, MoriError, OutOfStep, PeerLost

VERDICT_GRACE_S = 2.0  # how long a rank whose time is over waits for the hub to say who is missing


class Star:
    """`channels` maps peer rank to connection: every rank on the hub, {0: ...} on the others."""

    def __init__(self, rank: int, peers: list[dict[str, Any]], channels: dict[int, Channel]) -> None:
        self.rank = rank
        self.peers = peers
        self._channels = channels
        self._step = 0
        self._broken: MoriError | None = None

    def gather(self, value: Any, what: str, timeout_s: float, poll: Poll | None) -> list[Any]:
        if self._broken is not None:
            raise self._broken.with_traceback(None)  # else it would carry every frame that ever raised it
        # All ranks get equal results (lists for tuples); what is no JSON raises here, before anybody counts the step.
        value = json.loads(json.dumps(value))
        self._step += 1
        # Whatever ends the step early, a callback that raises or an interrupt too, leaves the ranks apart.
        self._broken = BootstrapError(f"set-up step {what!r} was interrupted on rank {self.rank}; none can follow")
        try:
            if self.rank == 0:
                values = _HubStep(self, value, what, timeout_s, poll).run()
            else:
                values = self._take_part(value, what, timeout_s, poll)
        except MoriError as error:
            self._broken = error
            raise
        self._broken = None
        return values

    def close(self) -> None:
        for channel in self._channels.values():
            with contextlib.suppress(OSError):
                channel.post({"bye": True})
                channel.sock.shutdown(socket.SHUT_WR)
            channel.close()
        self._channels.clear()
        self._broken = BootstrapError("the communicator has been closed on this rank")

    def lost(self, peer: int, what: str, reason: str) -> PeerLost:
        hello = self.peers[peer]
        return PeerLost(
            peer=peer,
            phase=f"set-up step {what!r}",
            host=str(hello.get("host", "")),
            pid=int(hello.get("pid", 0)),
            reason=reason,
        )

    def _take_part(self, value: Any, what: str, timeout_s: float, poll: Poll | None) -> list[Any]:
        hub = self._channels[0]
        deadline = time.monotonic() + timeout_s
        # If the hub has failed and closed, sending fails while its verdict may wait to be read.
        try:
            with contextlib.suppress(ConnectionError):
                hub.send({"step": self._step, "what": what, "value": value}, deadline, poll)
            answer = hub.receive(deadline, poll)
        except TimeoutError:
            answer = self._ask_for_verdict(hub, what, timeout_s)
        except (ConnectionError, WireError) as error:
            raise self.lost(0, what, "died") from error
        verdict.raise_if_error(answer)
        if "bye" in answer:
            raise self.lost(0, what, "left the communicator")
        values: list[Any] = answer["values"]
        return values

    def _ask_for_verdict(self, hub: Channel, what: str, timeout_s: float) -> Any:
        end = time.monotonic() + VERDICT_GRACE_S
        try:
            with contextlib.suppress(ConnectionError):
                hub.send({"step": self._step, "expired": timeout_s}, end)
            return hub.receive(end)
        except TimeoutError:
            raise BootstrapTimeout(
                f"rank 0 ({verdict.place(self.peers[0])}) had not arrived at set-up step {what!r} when the "
                f"{timeout_s:g} s of rank {self.rank} were over; raise MORI_BOOTSTRAP_TIMEOUT if it is only slow",
                missing=(0,),
            ) from None
        except (ConnectionError, WireError) as error:
            raise self.lost(0, what, "died") from error


class _HubStep:
    """One step as rank 0 sees it."""

    def __init__(self, star: Star, value: Any, what: str, timeout_s: float, poll: Poll | None) -> None:
        self._star = star
        self._channels = star._channels
        self._step = star._step
        self._what = what
        self._timeout_s = timeout_s
        self._deadline = time.monotonic() + timeout_s
        self._poll = poll
        self._values: dict[int, Any] = {0: value}

    def run(self) -> list[Any]:
        try:
            self._collect()
            values = [self._values[rank] for rank in range(len(self._star.peers))]
            slow = self._announce({"step": self._step, "values": values})
            if slow:
                raise BootstrapTimeout(
                    f"{verdict.name_ranks(slow)} did not read the result of set-up step {self._what!r}", missing=slow
                )
            return values
        except MoriError as error:
            self._deadline = time.monotonic() + VERDICT_GRACE_S
            self._poll = None
            self._announce(verdict.encode(error))
            raise

    def _collect(self) -> None:
        poller = select.poll()
        rank_of = {}
        for rank, channel in self._channels.items():
            poller.register(channel, select.POLLIN)
            rank_of[channel.fileno()] = rank
        while len(self._values) < len(self._star.peers):
            left = self._deadline - time.monotonic()
            if left <= 0:
                raise self._overdue(0, self._timeout_s)
            for descriptor, _ in poller.poll(1000 * min(left, POLL_INTERVAL_S)):
                self._read(rank_of[descriptor])
            if self._poll is not None:
                self._poll()

    def _read(self, rank: int) -> None:
        channel = self._channels[rank]
        try:
            channel.read()
        except (ConnectionError, WireError) as error:
            raise self._star.lost(rank, self._what, "died") from error
        while channel.incoming:
            message = channel.incoming.popleft()
            if "bye" in message:
                raise self._star.lost(rank, self._what, "left the communicator")
            if "expired" in message:
                if message["step"] == self._step:  # else it crossed the result of an earlier step
                    raise self._overdue(rank, message["expired"])
                continue
            if (message["step"], message["what"]) != (self._step, self._what):
                raise OutOfStep(
                    f"ranks are in different set-up steps: rank 0 in {self._what!r} (step {self._step}), rank {rank} "
                    f"in {message['what']!r} (step {message['step']}); all ranks must make the same calls in one order"
                )
            self._values[rank] = message["value"]

    def _overdue(self, rank: int, timeout_s: float) -> BootstrapTimeout:
        missing = tuple(r for r in range(len(self._star.peers)) if r not in self._values)
        if not missing:
            text = f"the {timeout_s:g} s of rank {rank} in set-up step {self._what!r} were over before rank 0 arrived"
            return BootstrapTimeout(f"{text}; raise MORI_BOOTSTRAP_TIMEOUT", missing=(0,))
        where = "; ".join(f"rank {r}: {verdict.place(self._star.peers[r])}" for r in missing[:4])
        return BootstrapTimeout(
            f"{verdict.name_ranks(missing)} had not arrived at set-up step {self._what!r} when the {timeout_s:g} s of "
            f"rank {rank} were over ({where}); raise MORI_BOOTSTRAP_TIMEOUT if ranks are only slow",
            missing=missing,
        )

    def _announce(self, message: object) -> tuple[int, ...]:
        """Send to every rank; returns those that did not take it in time. Nobody waits for another's full buffer.

        A rank whose connection is gone is passed over: the next step names it.
        """
        reachable = {}
        for rank, channel in self._channels.items():
            with contextlib.suppress(ConnectionError):
                channel.post(message)
                reachable[rank] = channel
        slow = []
        for rank, channel in reachable.items():
            try:
                channel.drain(self._deadline, self._poll)
            except TimeoutError:
                slow.append(rank)
            except ConnectionError:
                pass
        return tuple(slow)
