"""Length-prefixed JSON over a non-blocking stream socket: how set-up messages travel.

A frame is a big-endian u32 length and that many bytes of JSON. JSON, never pickle: a peer that is not what it claims
to be can at worst send a wrong value. A channel refuses frames above its limit before it reads them.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import struct
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

Poll = Callable[[], object]

FRAME_LIMIT_BYTES = 64 << 20
POLL_INTERVAL_S = 0.1
_LENGTH = struct.Struct(">I")
_READ_BYTES = 1 << 16


_private: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def close_in_forked_child(sock: socket.socket) -> None:
    """Keep a socket to this process.

    A child made by fork holds a copy of every descriptor; as long as it lives, the death of its parent would show
    neither as end of stream nor as refused connection.
    """
    _private.add(sock)


def _close_private() -> None:
    for sock in list(_private):
        sock.close()


os.register_at_fork(after_in_child=_close_private)


class WireError(Exception):
    """The other side sent something that is not a frame, or one above the limit."""


class Channel:
    """One connection. `send` and `receive` wait; `post`, `flush` and `read` never do (for event loops)."""

    def __init__(self, sock: socket.socket, limit_bytes: int = FRAME_LIMIT_BYTES) -> None:
        sock.setblocking(False)
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        close_in_forked_child(sock)
        self.sock = sock
        self.limit_bytes = limit_bytes
        self.incoming: deque[Any] = deque()  # frames read from the socket and not yet taken
        self.outgoing = bytearray()
        self._partial = bytearray()

    def fileno(self) -> int:
        return self.sock.fileno()

    def post(self, message: object) -> None:
        """Queue a frame and send what fits.

        ConnectionError when the other side is gone; TypeError or ValueError for what is not JSON or too long.
        """
        body = json.dumps(message, separators=(",", ":")).encode()
        if len(body) > FRAME_LIMIT_BYTES:
            raise ValueError(f"message of {len(body)} bytes is above the limit of {FRAME_LIMIT_BYTES}")
        self.outgoing += _LENGTH.pack(len(body)) + body
        self.flush()

    def flush(self) -> bool:
        """Send what the socket takes now; True when nothing is left to send."""
        with contextlib.suppress(BlockingIOError):
            while self.outgoing:
                del self.outgoing[: self.sock.send(self.outgoing)]
        return not self.outgoing

    def read(self) -> None:
        """Move what has arrived into `incoming`. ConnectionError at end of stream, WireError when it is no frame.

        Frames that came before the end are delivered first: the error is raised by a later call.
        """
        try:
            chunk = self.sock.recv(_READ_BYTES)
        except BlockingIOError:
            return
        if not chunk:
            raise ConnectionResetError("the other side closed the connection")
        self._partial += chunk
        while len(self._partial) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._partial)
            if length > self.limit_bytes:
                raise WireError(f"frame of {length} bytes is above the limit of {self.limit_bytes}")
            end = _LENGTH.size + length
            if len(self._partial) < end:
                return
            try:
                self.incoming.append(json.loads(self._partial[_LENGTH.size : end]))
            except (ValueError, RecursionError) as error:
                raise WireError("frame is not JSON") from error
            del self._partial[:end]

    def send(self, message: object, deadline: float, poll: Poll | None = None) -> None:
        self.post(message)
        self.drain(deadline, poll)

    def drain(self, deadline: float, poll: Poll | None = None) -> None:
        while not self.flush():
            self._wait(select.POLLOUT, deadline, poll)

    def receive(self, deadline: float, poll: Poll | None = None) -> Any:
        """Next frame; TimeoutError at the deadline (time.monotonic()), ConnectionError when the other side is gone."""
        while not self.incoming:
            self._wait(select.POLLIN, deadline, poll)
            self.read()
        return self.incoming.popleft()

    def close(self) -> None:
        self.sock.close()

    def _wait(self, event: int, deadline: float, poll: Poll | None) -> None:
        poller = select.poll()
        poller.register(self.sock, event)
        while True:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError
            if poller.poll(1000 * min(left, POLL_INTERVAL_S)):
                return
            if poll is not None:
                poll()
