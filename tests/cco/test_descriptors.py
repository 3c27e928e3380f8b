"""Passing memory descriptors between the ranks of a node."""

from __future__ import annotations

import ctypes
import fcntl
import os
import select
import signal
import socket
import subprocess
import sys

import pytest

from mori.cco.bootstrap import PeerLink, Rendezvous, exchange_descriptors
from mori.cco.unique_id import get_unique_id
from mori.errors import BootstrapError
from tests.cco.test_bootstrap import (
    HELLO,
    PATIENCE_S,
    _nothing_leaks,  # noqa: F401 - a fixture of every test here too
    close,
    joined,
    on_ranks,
    same_error_everywhere,
)


def memory(content: bytes) -> int:
    fd = os.memfd_create("test", os.MFD_CLOEXEC)
    os.write(fd, content)
    return fd


def swap(member: Rendezvous) -> dict[int, PeerLink]:
    fd = memory(b"rank %d" % member.rank)
    try:
        return exchange_descriptors(member, fd, PATIENCE_S)
    finally:
        os.close(fd)


@pytest.mark.parametrize("nranks", [1, 2, 8])
def test_every_rank_reads_every_other_rank_memory(nranks: int) -> None:
    members = joined(nranks)
    all_links = on_ranks(lambda rank: swap(members[rank]), nranks)
    for rank, links in enumerate(all_links):
        assert sorted(links) == [peer for peer in range(nranks) if peer != rank]
        for peer, link in links.items():
            assert os.pread(link.fd, 100, 0) == b"rank %d" % peer
            assert (link.pid, link.pidfd) == (os.getpid(), -1)  # threads of one process have no death of their own
            assert fcntl.fcntl(link.fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
            assert not link.socket.get_inheritable()
    if nranks > 1:
        all_links[0][1].socket.send(b"?")
        assert all_links[1][0].socket.recv(1) == b"?"  # two ends of one connection
        for link in all_links[0].values():
            link.close()
            link.close()
        assert all_links[1][0].socket.recv(1) == b""
    for links in all_links[1:]:
        for link in links.values():
            link.close()
    close(members)


def test_ranks_of_other_nodes_are_left_out() -> None:
    unique_id = get_unique_id()
    nodes = ["a", "b", "a"]
    members = on_ranks(lambda r: Rendezvous.join(unique_id, r, 3, HELLO | {"node": nodes[r]}, PATIENCE_S), 3)
    all_links = on_ranks(lambda rank: swap(members[rank]), 3)
    assert [sorted(links) for links in all_links] == [[2], [], [0]]
    for links in all_links:
        for link in links.values():
            link.close()
    close(members)


def test_a_process_is_watched_through_its_pidfd_and_socket() -> None:
    unique_id = get_unique_id()
    program = f"""
import os, sys
from mori.cco.bootstrap import Rendezvous, exchange_descriptors
from mori.cco.unique_id import UniqueId
member = Rendezvous.join(UniqueId.from_bytes(bytes.fromhex("{bytes(unique_id).hex()}")), 1, 2, {HELLO}, 10)
links = exchange_descriptors(member, os.memfd_create("test"), 10)
os.ftruncate(links[0].fd, 0)
sys.stdin.read()
"""
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE) as process:
        member = Rendezvous.join(unique_id, 0, 2, HELLO, PATIENCE_S)
        link = swap(member)[1]
        assert link.pid == process.pid and link.pidfd >= 0
        assert fcntl.fcntl(link.pidfd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
        assert select.select([link.pidfd, link.socket], [], [], 0)[0] == []
        process.send_signal(signal.SIGKILL)
        for end in (link.pidfd, link.socket):
            assert select.select([end], [], [], PATIENCE_S)[0] == [end]
        assert link.socket.recv(1) == b""
    link.close()
    member.close()


def leave_network_namespace() -> bool:
    """Give the calling thread a network namespace of its own; False without the right to do so."""
    clone_newnet = 0x40000000
    return ctypes.CDLL(None).unshare(clone_newnet) == 0


def test_ranks_that_cannot_reach_each_other_are_named_on_all() -> None:
    """A rank whose thread sits in a network namespace of its own, as in a container; TCP stands already."""
    if on_ranks(lambda _: leave_network_namespace(), 1) != [True]:
        pytest.skip("needs the right to make a network namespace")
    members = joined(3)

    def exchange(rank: int) -> dict[int, PeerLink]:
        assert rank != 1 or leave_network_namespace()
        return swap(members[rank])

    text = same_error_everywhere(on_ranks(exchange, 3), BootstrapError)
    for part in ("ranks 0 (host", "and 1 (host", "ranks 1 (host", "and 2 (host", str(os.getpid())):
        assert part in text
    assert "MORI_NODE_ID" in text and "host networking" in text
    assert text.count("ranks 0 (host") == 1  # 0 and 2 reach each other
    close(members)


def test_a_stranger_at_the_unix_socket_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection that comes before the peer's and proves nothing does not take its place."""
    members = joined(2)
    gather, strangers = members[1].allgather, []

    def allgather(value: object, what: str, timeout_s: float) -> list[object]:
        values = gather(value, what, timeout_s)
        if what == "names of the descriptor sockets":
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            sock.connect(f"\0{values[0]}")
            sock.send(b"\0\0\0\2{}")
            strangers.append(sock)
        return values

    monkeypatch.setattr(members[1], "allgather", allgather)
    all_links = on_ranks(lambda rank: swap(members[rank]), 2)
    assert os.pread(all_links[0][1].fd, 100, 0) == b"rank 1"
    assert len(strangers) == 1
    for links in all_links:
        for link in links.values():
            link.close()
    strangers[0].close()
    close(members)
