"""Every rank of a node gets the memory descriptor of every other one, over Unix sockets.

Sockets in the abstract name space leave no file behind and reach exactly as far as one network namespace. Each rank
listens under a random name and tells it to the others; the higher rank of a pair connects to the lower one. Both prove
that they hold the secret of the unique id (handshake.py), then swap descriptors: the connecting side first, so that
neither can read the other's descriptor by accident while it still reads handshake frames.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import socket
import struct
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mori.cco import verdict
from mori.cco.handshake import Doorman, prove
from mori.cco.wire import POLL_INTERVAL_S, Channel, WireError
from mori.errors import BootstrapError

if TYPE_CHECKING:
    from mori.cco.bootstrap import Rendezvous

_ROLE = "descriptor"
_CREDENTIALS = struct.Struct("3i")  # struct ucred: pid, uid, gid
_DESCRIPTOR = struct.Struct("i")
_STRANGERS = 64  # places in the queue beyond those of the peers
_SWAP_GRACE_S = 5.0  # for agreeing on the outcome, after the deadline of the swaps themselves


@dataclass
class PeerLink:
    """What one rank holds of another. The owner closes it; who closes `fd` earlier sets the field to -1.

    `socket` carries nothing any more: end of stream on it means that the peer is gone. `pid` is the peer's as seen from
    here (0 when it is not visible). `pidfd` becomes readable when that process ends; -1 when there is none: the peer
    is a thread of this process, its pid is not visible, or the kernel refuses.
    """

    fd: int
    socket: socket.socket
    pid: int
    pidfd: int

    def close(self) -> None:
        """Idempotent."""
        descriptors = (self.fd, self.pidfd)
        self.fd = self.pidfd = -1
        for descriptor in descriptors:
            if descriptor >= 0:
                os.close(descriptor)
        self.socket.close()


def exchange_descriptors(rendezvous: Rendezvous, fd: int, timeout_s: float) -> dict[int, PeerLink]:
    """Collective. Hand `fd` to every other rank of this node and get theirs, by rank; all are close-on-exec.

    Ranks that report another node are left out: they share no memory with this one.
    BootstrapError, on all ranks, names the pairs that cannot pass descriptors and says what to do about it.
    """
    deadline = time.monotonic() + timeout_s
    with contextlib.ExitStack() as stack:
        swap = _Swap(rendezvous, fd, deadline, stack)
        names = rendezvous.allgather(swap.name, "names of the descriptor sockets", timeout_s)
        _agree(rendezvous, swap.connect(names), "descriptor sockets connected", timeout_s)
        _agree(rendezvous, swap.run(), "descriptors exchanged", timeout_s + _SWAP_GRACE_S)
        stack.pop_all()
        return swap.finish()


def _agree(rendezvous: Rendezvous, failures: dict[int, str], what: str, timeout_s: float) -> None:
    """Raise on every rank if any rank failed; `failures` maps peer to reason."""
    pairs: dict[tuple[int, int], str] = {}
    for rank, failed in enumerate(rendezvous.allgather(failures, what, timeout_s)):
        for peer, reason in failed.items():
            pairs.setdefault((min(rank, int(peer)), max(rank, int(peer))), reason)
    if not pairs:
        return
    peers = rendezvous.peers
    shown = "; ".join(
        f"ranks {low} ({verdict.place(peers[low])}) and {high} ({verdict.place(peers[high])}): {reason}"
        for (low, high), reason in sorted(pairs.items())[:4]
    )
    more = f"; and {len(pairs) - 4} more pairs" if len(pairs) > 4 else ""
    raise BootstrapError(
        f"ranks of one node cannot pass memory descriptors to each other: {shown}{more}. Ranks of a node must share "
        "a network namespace: run their containers with a common one (host networking), or tell them apart as nodes "
        "with MORI_NODE_ID"
    )


class _Swap:
    """One rank's part. Everything it opens goes on `stack` until all ranks have succeeded."""

    def __init__(self, rendezvous: Rendezvous, fd: int, deadline: float, stack: contextlib.ExitStack) -> None:
        self._rank = rendezvous.rank
        self._secret = rendezvous.secret
        self._fd = fd
        self._deadline = deadline
        self._stack = stack
        node = rendezvous.peers[self._rank]["node"]
        self._node_ranks = [rank for rank, peer in enumerate(rendezvous.peers) if peer["node"] == node]
        self._channels: dict[int, Channel] = {}
        self._links: dict[int, PeerLink] = {}
        self.name = f"mori-{secrets.token_hex(16)}"
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        stack.callback(listener.close)
        listener.bind(f"\0{self.name}")
        listener.listen(len(self._node_ranks) + _STRANGERS)
        self._doorman = Doorman(listener, self._secret, _ROLE)
        stack.callback(self._doorman.close)

    def connect(self, names: list[str]) -> dict[int, str]:
        """Connect to every lower rank; the queue of its listener takes us, so nobody waits here."""
        failures = {}
        for peer in self._lower():
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self._stack.callback(sock.close)
            try:
                sock.settimeout(self._left())
                sock.connect(f"\0{names[peer]}")
            except OSError as error:
                failures[peer] = f"{error.strerror or error} (different network namespaces or containers?)"
                continue
            self._channels[peer] = Channel(sock)
        return failures

    def run(self) -> dict[int, str]:
        """Swap with every lower rank, then with the higher ones as they come: rank 0 starts, so there is no cycle."""
        for peer in self._lower():
            try:
                prove(self._channels[peer], self._secret, _ROLE, self._rank, self._deadline)
                self._hand_over(peer)
                self._take(peer)
            except (OSError, WireError, BootstrapError) as error:
                return {peer: str(error) or type(error).__name__}
        waiting = {rank for rank in self._node_ranks if rank > self._rank}
        poller = select.poll()
        poller.register(self._doorman, select.POLLIN)
        while waiting:
            if time.monotonic() >= self._deadline:
                return dict.fromkeys(waiting, "no answer before the deadline (MORI_BOOTSTRAP_TIMEOUT)")
            poller.poll(1000 * POLL_INTERVAL_S)
            for guest in self._doorman.admit():
                self._stack.callback(guest.channel.close)
                if guest.rank not in waiting:
                    continue
                waiting.remove(guest.rank)
                self._channels[guest.rank] = guest.channel
                try:
                    self._take(guest.rank)
                    self._hand_over(guest.rank)
                except OSError as error:
                    return {guest.rank: str(error) or type(error).__name__}
            self._doorman.expire()
        return {}

    def finish(self) -> dict[int, PeerLink]:
        self._doorman.close()
        for link in self._links.values():
            link.socket.setblocking(False)
        return self._links

    def _lower(self) -> list[int]:
        return [rank for rank in self._node_ranks if rank < self._rank]

    def _left(self) -> float:
        return max(0.001, self._deadline - time.monotonic())

    def _hand_over(self, peer: int) -> None:
        sock = self._channels[peer].sock
        sock.settimeout(self._left())
        socket.send_fds(sock, [b"d"], [self._fd])

    def _take(self, peer: int) -> None:
        sock = self._channels[peer].sock
        sock.settimeout(self._left())
        # Not socket.recv_fds: it drops the flags, and with them close-on-exec.
        payload, ancillary, _, _ = sock.recvmsg(1, socket.CMSG_LEN(_DESCRIPTOR.size), socket.MSG_CMSG_CLOEXEC)
        descriptors = [_DESCRIPTOR.unpack(data)[0] for _, kind, data in ancillary if kind == socket.SCM_RIGHTS]
        if len(descriptors) != 1:
            raise ConnectionError("closed the connection" if not payload else "no descriptor came with the message")
        pid, _, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
        link = PeerLink(descriptors[0], sock, pid, _open_process(pid))
        self._stack.callback(link.close)
        self._links[peer] = link


def _open_process(pid: int) -> int:
    """Close-on-exec pidfd, or -1. The peer answers once more afterwards, so this is no later process of its number."""
    if pid in (0, os.getpid()):
        return -1
    try:
        return os.pidfd_open(pid)
    except OSError:
        return -1
