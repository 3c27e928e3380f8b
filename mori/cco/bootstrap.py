"""The control plane of one communicator: joining, and collectives for set-up. Nothing here is on the path of a call.

Joining goes through the lobby (lobby.py), which the creator of the unique id runs; everything after it through a star
around rank 0 (star.py), so the creator may leave once all have joined. Both kinds of connection open with the same
mutual proof (handshake.py) and carry the same frames (wire.py).
"""

from __future__ import annotations

import contextlib
import select
import socket
import time
from typing import Any

from mori import env
from mori._version import __version__
from mori.cco import lobby, network, verdict
from mori.cco.descriptors import PeerLink, exchange_descriptors
from mori.cco.handshake import Doorman, prove
from mori.cco.star import VERDICT_GRACE_S, Star
from mori.cco.unique_id import UniqueId
from mori.cco.wire import POLL_INTERVAL_S, Channel, Poll, WireError
from mori.errors import BootstrapError, BootstrapTimeout

__all__ = ["PROTOCOL_VERSION", "PeerLink", "Rendezvous", "exchange_descriptors"]

PROTOCOL_VERSION = 2  # of everything ranks say to each other, shared memory included; raise it with any change
_STAR_ROLE = "star"


class Rendezvous:
    """One rank's membership. All methods but `close` are collective; one thread at a time may use it."""

    def __init__(self, rank: int, peers: list[dict[str, Any]], secret: bytes, star: Star) -> None:
        self.rank = rank
        self.nranks = len(peers)
        self.peers = peers
        self.secret = secret
        self._star = star

    @classmethod
    def join(cls, unique_id: UniqueId, rank: int, nranks: int, hello: dict[str, Any], timeout_s: float) -> Rendezvous:
        """Meet the other `nranks - 1` ranks. Succeeds on all ranks or raises on all of them.

        `hello` (JSON values; "target" and "arch" are compared) is what the others find in `peers[rank]`, completed
        with host, pid, node, version and protocol.
        BootstrapTimeout names the ranks that did not come within `timeout_s`; BootstrapError whatever else went wrong:
        the creator of the id is gone, a rank that is taken or out of range, ranks that differ in nranks, version,
        protocol, target or arch.
        """
        if nranks < 1:
            raise ValueError(f"nranks must be at least 1, got {nranks}")
        if unique_id.is_zero:
            raise BootstrapError("the unique id is the zero id: pass on what get_unique_id() returned on one process")
        own = {**network.process_identity(), "version": __version__, "protocol": PROTOCOL_VERSION, **hello}
        with contextlib.ExitStack() as stack:
            joining = _Joining(unique_id, rank, nranks, timeout_s, stack)
            peers, channels = joining.run(own)
            stack.pop_all()
            joining.leave_lobby()
        return cls(rank, peers, unique_id.secret, Star(rank, peers, channels))

    def allgather(self, value: Any, what: str, timeout_s: float, poll: Poll | None = None) -> list[Any]:
        """Every rank's `value` (JSON), by rank. `what` names the step and must be the same on every rank.

        `poll` is called at least every 100 ms while waiting and may raise to end the wait.
        BootstrapTimeout names the missing ranks; OutOfStep says who is in which step; PeerLost who is gone. All are
        raised alike on every rank that takes part, and end this rendezvous: later steps raise them again.
        """
        return self._star.gather(value, what, timeout_s, poll)

    def barrier(self, what: str, timeout_s: float, poll: Poll | None = None) -> None:
        """Returns when every rank has called it. Errors as for `allgather`."""
        self._star.gather(None, what, timeout_s, poll)

    def close(self) -> None:
        """Leave; ranks that wait for this one learn it at once. Idempotent, never waits."""
        self._star.close()


class _Joining:
    """One rank's way through the lobby into the star. What it opens goes on `stack`."""

    def __init__(
        self, unique_id: UniqueId, rank: int, nranks: int, timeout_s: float, stack: contextlib.ExitStack
    ) -> None:
        self._id = unique_id
        self._rank = rank
        self._nranks = nranks
        self._timeout_s = timeout_s
        self._deadline = time.monotonic() + timeout_s
        self._stack = stack
        at = network.endpoint(unique_id.address, unique_id.port)
        self._creator = f"the process that created the unique id, at {at},"

    def run(self, hello: dict[str, Any]) -> tuple[list[dict[str, Any]], dict[int, Channel]]:
        self._lobby = self._connect(self._id.address, self._id.port, lobby.ROLE, self._creator)
        doorman = star = None
        if self._rank == 0 and self._nranks > 1:
            listener = network.listen(self._star_address())
            self._stack.callback(listener.close)
            doorman = Doorman(listener, self._id.secret, _STAR_ROLE)
            star = listener.getsockname()[:2]
        with contextlib.closing(doorman) if doorman else contextlib.nullcontext():
            registration = {"nranks": self._nranks, "hello": hello, "timeout_s": self._timeout_s, "star": star}
            with contextlib.suppress(ConnectionError):  # the lobby may have failed already; its verdict is read next
                self._lobby.send(registration, self._deadline)
            go = self._hear_lobby()
            try:
                channels = self._gather_spokes(doorman) if doorman else self._reach_hub(go["star"])
                report: dict[str, Any] = {"connected": True}
            except (BootstrapError, OSError) as error:
                channels, report = {}, {"failed": str(error) or type(error).__name__}
            with contextlib.suppress(ConnectionError):
                self._lobby.send(report, self._deadline + VERDICT_GRACE_S)
            self._hear_lobby()
        return go["go"], channels

    def leave_lobby(self) -> None:
        self._lobby.close()

    def _star_address(self) -> str:
        if env.get("MORI_SOCKET_IFNAME"):
            return network.listening_address()
        return str(self._lobby.sock.getsockname()[0])

    def _hear_lobby(self) -> dict[str, Any]:
        """Next word of the lobby; raises its verdict."""
        try:
            message = self._lobby.receive(self._deadline + VERDICT_GRACE_S)
        except TimeoutError:
            raise BootstrapTimeout(
                f"{self._creator} stopped answering while rank {self._rank} waited for the other ranks "
                f"({self._timeout_s:g} s)"
            ) from None
        except (ConnectionError, WireError) as error:
            raise BootstrapError(
                f"{self._creator} went away before all {self._nranks} ranks had joined; it must live until then"
            ) from error
        verdict.raise_if_error(message)
        return dict(message)

    def _reach_hub(self, star: list[Any] | None) -> dict[int, Channel]:
        if star is None:  # a lone rank
            return {}
        address, port = star
        whom = f"rank 0, at {network.endpoint(address, port)},"
        return {0: self._connect(address, port, _STAR_ROLE, whom)}

    def _gather_spokes(self, doorman: Doorman) -> dict[int, Channel]:
        """Rank 0: wait until every other rank is connected, or the lobby says that one could not."""
        channels: dict[int, Channel] = {}
        poller = select.poll()
        poller.register(doorman, select.POLLIN)
        poller.register(self._lobby, select.POLLIN)
        while len(channels) < self._nranks - 1:
            if time.monotonic() >= self._deadline:
                raise BootstrapTimeout("not every rank connected to rank 0")
            for descriptor, _ in poller.poll(1000 * POLL_INTERVAL_S):
                if descriptor == self._lobby.fileno():
                    self._hear_lobby()
            for guest in doorman.admit():
                self._stack.callback(guest.channel.close)
                if 0 < guest.rank < self._nranks:
                    channels.setdefault(guest.rank, guest.channel)
            doorman.expire()
        return channels

    def _connect(self, address: str, port: int, role: str, whom: str) -> Channel:
        sock = socket.socket(network.family_of(address), socket.SOCK_STREAM)
        self._stack.callback(sock.close)
        try:
            sock.settimeout(max(0.001, self._deadline - time.monotonic()))
            sock.connect((address, port))
            if sock.getsockname() == sock.getpeername():  # the free port that TCP picked for us was this very one
                raise ConnectionRefusedError
            channel = Channel(sock)
            prove(channel, self._id.secret, role, self._rank, self._deadline)
        except ConnectionRefusedError as error:
            raise BootstrapError(
                f"{whom} is gone or unreachable: connection refused. It must live until all ranks have joined, "
                "and an id serves one set of ranks once"
            ) from error
        except TimeoutError as error:
            raise BootstrapTimeout(
                f"{whom} did not answer within {self._timeout_s:g} s; MORI_SOCKET_IFNAME chooses the network interface"
            ) from error
        except ConnectionError as error:
            raise BootstrapError(f"{whom} is gone: it closed the connection during the handshake") from error
        except WireError as error:
            raise BootstrapError(f"{whom} is gone; something else listens there now ({error})") from error
        except BootstrapError as error:
            raise BootstrapError(f"{whom} did not recognise rank {self._rank}: {error}") from error
        except OSError as error:
            raise BootstrapError(
                f"{whom} cannot be reached: {error.strerror}; MORI_SOCKET_IFNAME chooses the network interface"
            ) from error
        return channel
