"""Mutual proof that both ends of a connection hold the secret of one unique id, before anything else is said.

    server -> client   greeting, server nonce
    client -> server   role, rank, client nonce, HMAC-SHA-256(secret, "client", role, rank, both nonces)
    server -> client   HMAC-SHA-256(secret, "server", role, rank, both nonces)

The nonces stop replays, the side in the MAC stops reflection, role and rank in it stop a proof for one seat from
being used for another. Who cannot prove it is told so and dropped.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import secrets
import selectors
import socket
import time
from typing import NamedTuple

from mori.cco.wire import FRAME_LIMIT_BYTES, Channel, Poll, WireError, close_in_forked_child
from mori.errors import BootstrapError

GREETING = "mori bootstrap"
HANDSHAKE_S = 10.0  # a stranger that stays silent is dropped after this long
_HANDSHAKE_LIMIT_BYTES = 1024
_MOST_STRANGERS = 1024  # unproven connections kept at once; beyond this the oldest goes
_NONCE_BYTES = 32


def _mac(secret: bytes, side: str, role: str, rank: int, server_nonce: str, client_nonce: str) -> str:
    text = "\n".join((GREETING, side, role, str(rank), server_nonce, client_nonce))
    return hmac.new(secret, text.encode("utf-8", "replace"), hashlib.sha256).hexdigest()


def _same(mac: str, claimed: object) -> bool:
    # Compared as bytes: compare_digest raises on text that is not ASCII, and a stranger may send such text.
    return isinstance(claimed, str) and hmac.compare_digest(mac.encode(), claimed.encode("utf-8", "replace"))


def prove(channel: Channel, secret: bytes, role: str, rank: int, deadline: float, poll: Poll | None = None) -> None:
    """Client side. BootstrapError when the server is not ours or does not take us for its own."""
    greeting = channel.receive(deadline, poll)
    if not isinstance(greeting, dict) or greeting.get("greeting") != GREETING:
        raise BootstrapError("what listens there is not a mori bootstrap listener")
    server_nonce, client_nonce = str(greeting.get("nonce")), secrets.token_hex(_NONCE_BYTES)
    proof = _mac(secret, "client", role, rank, server_nonce, client_nonce)
    channel.send({"role": role, "rank": rank, "nonce": client_nonce, "mac": proof}, deadline, poll)
    answer = channel.receive(deadline, poll)
    claimed = answer.get("mac") if isinstance(answer, dict) else None
    if not _same(_mac(secret, "server", role, rank, server_nonce, client_nonce), claimed):
        raise BootstrapError("the secret of the unique id does not match (is the id of an earlier run in use?)")


class Guest(NamedTuple):
    """A connection that has proved to hold the secret."""

    channel: Channel
    rank: int


class _Stranger(NamedTuple):
    channel: Channel
    nonce: str
    deadline: float


class Doorman:
    """Server side: accepts connections and hands out those that prove themselves for `role`.

    Never waits. Strangers cost it a bounded number of descriptors, bytes and seconds, as long as `expire` is called now
    and then. `fileno` is readable whenever `admit` has something to do, so a doorman can sit in another selector.
    """

    def __init__(self, listener: socket.socket, secret: bytes, role: str) -> None:
        listener.setblocking(False)
        close_in_forked_child(listener)
        self._listener = listener
        self._secret = secret
        self._role = role
        self._strangers: dict[int, _Stranger] = {}  # by descriptor, oldest first
        self._selector = selectors.EpollSelector()
        self._selector.register(listener, selectors.EVENT_READ)

    def fileno(self) -> int:
        return self._selector.fileno()

    def admit(self) -> list[Guest]:
        guests = []
        for key, _ in self._selector.select(0):
            if key.fileobj is self._listener:
                self._accept()
            elif (stranger := self._strangers.get(key.fd)) is not None and (guest := self._examine(stranger)):
                guests.append(guest)
        return guests

    def expire(self) -> None:
        """Drop strangers that have had their time."""
        now = time.monotonic()
        for stranger in [s for s in self._strangers.values() if s.deadline < now]:
            self._drop(stranger)

    def close(self) -> None:
        for stranger in list(self._strangers.values()):
            self._drop(stranger)
        self._selector.close()
        self._listener.close()

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError:  # gone again, or out of descriptors: the next turn tries once more
            return
        if len(self._strangers) >= _MOST_STRANGERS:
            self._drop(next(iter(self._strangers.values())))
        try:
            channel = Channel(sock, _HANDSHAKE_LIMIT_BYTES)
            nonce = secrets.token_hex(_NONCE_BYTES)
            channel.post({"greeting": GREETING, "nonce": nonce})
        except OSError:
            sock.close()
            return
        self._strangers[channel.fileno()] = _Stranger(channel, nonce, time.monotonic() + HANDSHAKE_S)
        self._selector.register(channel, selectors.EVENT_READ)

    def _examine(self, stranger: _Stranger) -> Guest | None:
        channel = stranger.channel
        try:
            channel.read()
            if not channel.incoming:
                return None
            rank = self._check_proof(channel, stranger.nonce, channel.incoming.popleft())
        except (OSError, WireError):
            self._drop(stranger)
            return None
        self._forget(stranger)
        channel.limit_bytes = FRAME_LIMIT_BYTES
        return Guest(channel, rank)

    def _check_proof(self, channel: Channel, nonce: str, proof: object) -> int:
        claimed = proof if isinstance(proof, dict) else {}
        rank, client_nonce = claimed.get("rank"), claimed.get("nonce")
        if isinstance(rank, int) and isinstance(client_nonce, str) and claimed.get("role") == self._role:
            if _same(_mac(self._secret, "client", self._role, rank, nonce, client_nonce), claimed.get("mac")):
                channel.post({"mac": _mac(self._secret, "server", self._role, rank, nonce, client_nonce)})
                return rank
        channel.post({"refused": "secret"})
        raise WireError("no proof of the secret")

    def _forget(self, stranger: _Stranger) -> None:
        del self._strangers[stranger.channel.fileno()]
        self._selector.unregister(stranger.channel)

    def _drop(self, stranger: _Stranger) -> None:
        self._forget(stranger)
        with contextlib.suppress(OSError):
            # Without this, closing with unread bytes resets the connection and the refusal may be lost.
            stranger.channel.sock.shutdown(socket.SHUT_WR)
        stranger.channel.close()
