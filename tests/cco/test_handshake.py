"""Who is let in, and what becomes of those who are not."""

from __future__ import annotations

import json
import socket
import struct
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from mori.cco import handshake
from mori.cco.handshake import Doorman, Guest, prove
from mori.cco.wire import Channel
from mori.errors import BootstrapError

SECRET = bytes(range(32))
PATIENCE_S = 10.0


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        yield sock


@pytest.fixture
def doorman(listener: socket.socket) -> Iterator[Doorman]:
    keeper = Doorman(listener, SECRET, "rank")
    yield keeper
    keeper.close()


def dial(listener: socket.socket) -> Channel:
    return Channel(socket.create_connection(listener.getsockname(), PATIENCE_S))


def until(condition: Callable[[], bool], doorman: Doorman) -> list[Guest]:
    """Let the doorman work until the condition holds; the guests it let in."""
    guests = []
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end
        guests += doorman.admit()
        doorman.expire()
    return guests


def visit(listener: socket.socket, doorman: Doorman, secret: bytes, role: str = "rank") -> tuple[list[Guest], str]:
    """One client that tries to prove itself; guests, and what the client was told."""
    channel = dial(listener)
    with ThreadPoolExecutor(1) as thread:
        proof = thread.submit(prove, channel, secret, role, 3, time.monotonic() + PATIENCE_S)
        guests = until(proof.done, doorman)
    channel.close()
    return guests, str(proof.exception() or "")


def test_the_secret_opens(listener: socket.socket, doorman: Doorman) -> None:
    (guest,), told = visit(listener, doorman, SECRET)
    assert (guest.rank, told) == (3, "")
    guest.channel.close()


@pytest.mark.parametrize("secret, role", [(bytes(32), "rank"), (SECRET, "star"), (SECRET[:31], "rank")])
def test_another_secret_or_role_does_not(listener: socket.socket, doorman: Doorman, secret: bytes, role: str) -> None:
    guests, told = visit(listener, doorman, secret, role)
    assert guests == [] and "secret of the unique id does not match" in told


def test_a_server_without_the_secret_is_refused() -> None:
    """It lets anyone in and sends back the client's own proof, the best it can do."""
    ours, theirs = map(Channel, socket.socketpair())
    with ThreadPoolExecutor(1) as thread:
        deadline = time.monotonic() + PATIENCE_S
        proof = thread.submit(prove, ours, SECRET, "rank", 3, deadline)
        theirs.send({"greeting": handshake.GREETING, "nonce": "00" * 32}, deadline)
        theirs.send({"mac": theirs.receive(deadline)["mac"]}, deadline)
        assert isinstance(proof.exception(), BootstrapError)
    ours.close()
    theirs.close()


def test_a_proof_serves_one_connection_and_one_rank(listener: socket.socket, doorman: Doorman) -> None:
    deadline = time.monotonic() + PATIENCE_S
    first, second, third = (dial(listener) for _ in range(3))
    until(lambda: len(doorman._strangers) == 3, doorman)
    nonce = first.receive(deadline)["nonce"]
    proof = {"role": "rank", "rank": 3, "nonce": "11", "mac": handshake._mac(SECRET, "client", "rank", 3, nonce, "11")}
    second.post(proof)
    third.post(proof | {"rank": 4})
    assert until(lambda: len(doorman._strangers) == 1, doorman) == []
    first.post(proof)
    (guest,) = until(lambda: not doorman._strangers, doorman)
    assert guest.rank == 3
    for channel in (first, second, third, guest.channel):
        channel.close()


def frame(body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + body


@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        struct.pack(">I", 1025),  # above the limit: refused before its body comes
        frame(b"nope"),
        frame(b"\xff\xfe"),
        frame(b"[" * 900),
        frame(b"7"),
        frame(b"{}"),
        frame(json.dumps({"role": "rank", "rank": 3, "nonce": "\ud800", "mac": "\ud800"}).encode()),
        frame(json.dumps({"role": "rank", "rank": "3", "nonce": "1", "mac": "2"}).encode()),
    ],
)
def test_garbage_is_dropped(listener: socket.socket, doorman: Doorman, garbage: bytes) -> None:
    with socket.create_connection(listener.getsockname(), PATIENCE_S) as sock:
        sock.sendall(garbage)
        until(lambda: bool(doorman._strangers), doorman)
        assert until(lambda: not doorman._strangers, doorman) == []


def test_silence_and_crowds_are_bounded(
    listener: socket.socket, doorman: Doorman, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handshake, "_MOST_STRANGERS", 3)
    crowd = [dial(listener) for _ in range(5)]
    last = crowd[-1].sock.getsockname()
    until(lambda: last in [s.channel.sock.getpeername() for s in doorman._strangers.values()], doorman)
    assert len(doorman._strangers) == 3
    later = time.monotonic() + handshake.HANDSHAKE_S + 1
    monkeypatch.setattr(handshake.time, "monotonic", lambda: later)
    doorman.expire()
    assert not doorman._strangers
    for channel in crowd:
        channel.close()
