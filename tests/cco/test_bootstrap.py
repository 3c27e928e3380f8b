"""Joining and set-up collectives. Ranks are threads wherever a process is not the point."""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from mori.cco.bootstrap import Rendezvous
from mori.cco.unique_id import UniqueId, get_unique_id
from mori.errors import BootstrapError, BootstrapTimeout, OutOfStep, PeerLost

HELLO = {"target": "host", "arch": "host"}
PATIENCE_S = 10.0


def outcome(function: Callable[..., Any], *args: Any) -> Any:
    """What the function returns, or the exception it raises."""
    try:
        return function(*args)
    except Exception as error:
        return error


def on_ranks(function: Callable[[int], Any], ranks: int | list[int]) -> list[Any]:
    """Run `function(rank)` on one thread per rank; outcomes in the order given."""
    ranks = list(range(ranks)) if isinstance(ranks, int) else ranks
    with ThreadPoolExecutor(len(ranks)) as threads:
        return [future.result() for future in [threads.submit(outcome, function, rank) for rank in ranks]]


def joined(nranks: int) -> list[Rendezvous]:
    unique_id = get_unique_id()
    members = on_ranks(lambda rank: Rendezvous.join(unique_id, rank, nranks, HELLO, PATIENCE_S), nranks)
    assert all(isinstance(member, Rendezvous) for member in members), members
    return members


def close(members: list[Rendezvous]) -> None:
    for member in members:
        member.close()


def descriptors() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


@pytest.fixture(autouse=True)
def _nothing_leaks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """After every test, failed joins included: the same descriptors and threads as before."""
    monkeypatch.setenv("MORI_BOOTSTRAP_TIMEOUT", "2")
    monkeypatch.delenv("MORI_SOCKET_IFNAME", raising=False)
    before, threads = descriptors(), set(threading.enumerate())
    yield
    for thread in set(threading.enumerate()) - threads:
        thread.join(20)
        assert not thread.is_alive(), f"{thread.name} outlives the test"
    assert descriptors() == before


def same_error_everywhere(outcomes: list[Any], kind: type[Exception]) -> str:
    """All outcomes are that error, in the same words; returns them."""
    assert [type(each) for each in outcomes] == [kind] * len(outcomes), outcomes
    (text,) = {str(each) for each in outcomes}
    return text


@pytest.mark.parametrize("nranks", [1, 2, 8])
def test_ranks_meet_and_gather(nranks: int) -> None:
    members = joined(nranks)
    gathered = on_ranks(
        lambda rank: members[rank].allgather({"rank": rank, "pair": (rank, None)}, "test", PATIENCE_S), nranks
    )
    assert gathered == [[{"rank": rank, "pair": [rank, None]} for rank in range(nranks)]] * nranks
    assert on_ranks(lambda rank: members[rank].barrier("end", PATIENCE_S), nranks) == [None] * nranks
    for member in members:
        assert [peer["pid"] for peer in member.peers] == [os.getpid()] * nranks
        assert all(peer["host"] and peer["node"] and peer["target"] == "host" for peer in member.peers)
    close(members)


def test_large_values_pass() -> None:
    members = joined(3)
    values = ["x" * (3 << 20), "y" * (2 << 20), "z"]
    assert on_ranks(lambda rank: members[rank].allgather(values[rank], "large", PATIENCE_S), 3) == [values] * 3
    close(members)


def test_a_late_rank_is_waited_for() -> None:
    members = joined(3)
    waiting = {0: threading.Event(), 1: threading.Event()}

    def take_part(rank: int) -> list[Any]:
        if rank == 2:
            assert all(event.wait(PATIENCE_S) for event in waiting.values())  # both others have polled
            return members[2].allgather(2, "late", PATIENCE_S)
        return members[rank].allgather(rank, "late", PATIENCE_S, poll=waiting[rank].set)

    assert on_ranks(take_part, 3) == [[0, 1, 2]] * 3
    close(members)


def test_meeting_over_loopback_of_either_family() -> None:
    for address in ("::1", "127.0.0.1"):
        unique_id = get_unique_id(address)
        assert unique_id.address == address
        members = on_ranks(lambda rank, i=unique_id: Rendezvous.join(i, rank, 2, HELLO, PATIENCE_S), 2)
        assert on_ranks(lambda rank, m=members: m[rank].allgather(rank, "x", PATIENCE_S), 2) == [[0, 1], [0, 1]]
        close(members)


# --- ranks that do not fit together -------------------------------------------------------------------------------


def latecomer(unique_id: UniqueId, rank: int, nranks: int) -> str:
    """What a rank hears that comes after the others have failed."""
    return str(outcome(Rendezvous.join, unique_id, rank, nranks, HELLO, PATIENCE_S))


def join_all(
    unique_id: UniqueId, ranks: list[int], nranks: int | list[int], hellos: list[dict[str, Any]] | None = None
) -> list[Any]:
    """Join with these ranks at once; the outcomes."""

    def join(index: int) -> Rendezvous:
        count = nranks if isinstance(nranks, int) else nranks[index]
        return Rendezvous.join(unique_id, ranks[index], count, hellos[index] if hellos else HELLO, PATIENCE_S)

    return on_ranks(join, len(ranks))


@pytest.mark.parametrize(
    "field, name",
    [("version", "mori version"), ("protocol", "protocol version"), ("target", "target"), ("arch", "arch")],
)
def test_a_mismatch_is_refused_by_name_on_every_rank(field: str, name: str) -> None:
    outcomes = join_all(get_unique_id(), [0, 1, 2], 3, [HELLO, HELLO | {field: "other"}, HELLO])
    text = same_error_everywhere(outcomes, BootstrapError)
    assert f"ranks differ in {name}" in text and "rank 1" in text and "has other" in text


def test_a_rank_that_is_taken() -> None:
    unique_id = get_unique_id()
    text = same_error_everywhere(join_all(unique_id, [0, 1, 1], 3), BootstrapError)
    assert "rank 1 joins twice" in text and str(os.getpid()) in text
    assert latecomer(unique_id, 2, 3) == text


@pytest.mark.parametrize("stray", [2, -1])
def test_a_rank_out_of_range(stray: int) -> None:
    unique_id = get_unique_id()
    text = same_error_everywhere(join_all(unique_id, [0, stray], 2), BootstrapError)
    assert f"rank {stray} " in text and "out of range for nranks=2" in text
    assert latecomer(unique_id, 1, 2) == text


def test_ranks_that_disagree_on_their_number() -> None:
    text = same_error_everywhere(join_all(get_unique_id(), [0, 1, 2], [2, 3, 3]), BootstrapError)
    assert "nranks=2" in text and "nranks=3" in text


def test_missing_ranks_are_named_to_all_present() -> None:
    unique_id = get_unique_id()
    outcomes = on_ranks(lambda rank: Rendezvous.join(unique_id, rank, 4, HELLO, 0.5), [1, 3])
    text = same_error_everywhere(outcomes, BootstrapTimeout)
    assert "ranks 0, 2 of 4" in text and "MORI_BOOTSTRAP_TIMEOUT" in text
    assert outcomes[0].missing == (0, 2)
    assert latecomer(unique_id, 0, 4) == latecomer(unique_id, 2, 4) == text


def test_arguments() -> None:
    with pytest.raises(ValueError, match="nranks must be at least 1, got 0"):
        Rendezvous.join(UniqueId(), 0, 0, HELLO, 1)
    with pytest.raises(BootstrapError, match="zero id"):
        Rendezvous.join(UniqueId(), 0, 1, HELLO, 1)


# --- strangers ----------------------------------------------------------------------------------------------------


def altered(unique_id: UniqueId) -> UniqueId:
    """Same address, another secret."""
    return UniqueId._compose(unique_id.address, unique_id.port, bytes(32))


def test_a_wrong_secret_is_refused_and_harms_nobody() -> None:
    unique_id = get_unique_id()

    def join(index: int) -> Rendezvous:
        return Rendezvous.join(altered(unique_id) if index == 2 else unique_id, index % 2, 2, HELLO, PATIENCE_S)

    first, second, stranger = on_ranks(join, 3)
    assert isinstance(stranger, BootstrapError) and "secret" in str(stranger)
    assert bytes(32).hex() not in str(stranger)
    close([first, second])


GARBAGE = [
    b"",
    b"GET / HTTP/1.1\r\n\r\n",
    struct.pack(">I", 1 << 30) + b"x",
    struct.pack(">I", 4) + b"nope",
    struct.pack(">I", 900) + b"[" * 900,
    *[
        struct.pack(">I", len(body)) + body
        for body in (
            json.dumps(message).encode()
            for message in (7, {}, {"rank": "0"}, {"role": "rank", "rank": 0, "nonce": "é", "mac": "é"})
        )
    ],
]


def test_strangers_neither_stop_nor_delay_ranks() -> None:
    """Scanners, garbage and silent connections, before and while ranks join; all stay open until the end."""
    unique_id = get_unique_id()
    at = (unique_id.address, unique_id.port)
    strangers = []

    def annoy(_: int) -> None:
        for garbage in GARBAGE:
            sock = socket.create_connection(at, PATIENCE_S)
            strangers.append(sock)
            sock.sendall(garbage)
        socket.create_connection(at, PATIENCE_S).close()

    annoy(0)
    first = threading.Thread(target=annoy, args=(0,))
    first.start()
    members = on_ranks(lambda rank: Rendezvous.join(unique_id, rank, 4, HELLO, PATIENCE_S), 4)
    first.join()
    assert on_ranks(lambda rank: members[rank].allgather(rank, "x", PATIENCE_S), 4) == [[0, 1, 2, 3]] * 4
    close(members)
    for sock in strangers:
        sock.close()


def test_a_silent_stranger_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mori.cco.handshake.HANDSHAKE_S", 0.1)
    unique_id = get_unique_id()
    with socket.create_connection((unique_id.address, unique_id.port), PATIENCE_S) as sock:
        while sock.recv(4096):  # the greeting, then end of stream
            pass
    close(on_ranks(lambda rank: Rendezvous.join(unique_id, rank, 1, HELLO, PATIENCE_S), 1))


# --- the creator --------------------------------------------------------------------------------------------------

CREATOR = """
import sys
from mori.cco.unique_id import get_unique_id
print(bytes(get_unique_id()).hex(), flush=True)
sys.stdin.read()
"""


def test_the_creator_need_not_be_a_rank_and_may_leave_after_joining() -> None:
    with subprocess.Popen([sys.executable, "-c", CREATOR], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as creator:
        assert creator.stdin and creator.stdout
        unique_id = UniqueId.from_bytes(bytes.fromhex(creator.stdout.readline().decode()))
        members = on_ranks(lambda rank: Rendezvous.join(unique_id, rank, 2, HELLO, PATIENCE_S), 2)
        creator.stdin.close()
        assert creator.wait(PATIENCE_S) == 0
        assert on_ranks(lambda rank: members[rank].allgather(rank, "x", PATIENCE_S), 2) == [[0, 1]] * 2
        close(members)
        gone = outcome(Rendezvous.join, unique_id, 0, 2, HELLO, PATIENCE_S)
    assert isinstance(gone, BootstrapError) and not isinstance(gone, BootstrapTimeout)
    assert "gone or unreachable" in str(gone) and f"{unique_id.address}:{unique_id.port}" in str(gone)


def test_a_creator_that_dies_while_ranks_wait() -> None:
    dies_at_registration = "import os; from mori.cco import lobby; lobby.Lobby._seat = lambda *_: os._exit(9)" + CREATOR
    command = [sys.executable, "-c", dies_at_registration]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as creator:
        assert creator.stdout
        unique_id = UniqueId.from_bytes(bytes.fromhex(creator.stdout.readline().decode()))
        error = outcome(Rendezvous.join, unique_id, 1, 2, HELLO, PATIENCE_S)
    assert isinstance(error, BootstrapError) and "went away before all 2 ranks had joined" in str(error)


def test_a_rank_that_dies_while_others_wait() -> None:
    unique_id = get_unique_id()
    program = f"""
import os
from mori.cco import bootstrap
from mori.cco.unique_id import UniqueId
bootstrap._Joining._hear_lobby = lambda _: os._exit(1)  # once it has registered
bootstrap.Rendezvous.join(UniqueId.from_bytes(bytes.fromhex("{bytes(unique_id).hex()}")), 1, 3, {HELLO}, 30)
"""
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(outcome, Rendezvous.join, unique_id, 0, 3, HELLO, PATIENCE_S)
        subprocess.run([sys.executable, "-c", program], check=False)
        error = waiting.result()
    assert type(error) is BootstrapError
    assert "rank 1 (host" in str(error) and "went away" in str(error)
    assert latecomer(unique_id, 2, 3) == str(error)


def test_a_forked_child_does_not_keep_the_listener() -> None:
    program = """
import os, sys
from mori.cco.unique_id import get_unique_id
unique_id = get_unique_id()
if os.fork() == 0:
    print(bytes(unique_id).hex(), flush=True)
    sys.stdin.read()
os._exit(0)
"""
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as creator:
        assert creator.stdin and creator.stdout
        unique_id = UniqueId.from_bytes(bytes.fromhex(creator.stdout.readline().decode()))
        creator.wait(PATIENCE_S)
        error = outcome(Rendezvous.join, unique_id, 0, 1, HELLO, PATIENCE_S)
        creator.stdin.close()
    assert isinstance(error, BootstrapError) and "connection refused" in str(error)


# --- collectives that fail ----------------------------------------------------------------------------------------


def test_different_steps_are_named_on_every_rank() -> None:
    members = joined(3)
    steps = ["make op", "barrier", "make op"]
    text = same_error_everywhere(on_ranks(lambda r: members[r].allgather(r, steps[r], PATIENCE_S), 3), OutOfStep)
    assert "rank 0 in 'make op' (step 1)" in text and "rank 1 in 'barrier' (step 1)" in text
    again = on_ranks(lambda rank: members[rank].barrier("next", PATIENCE_S), 3)
    assert same_error_everywhere(again, OutOfStep) == text
    close(members)


def test_a_missing_rank_is_named_to_all_present() -> None:
    members = joined(4)
    outcomes = on_ranks(lambda rank: members[rank].barrier("make op", 0.4), [0, 1, 3])
    text = same_error_everywhere(outcomes, BootstrapTimeout)
    assert text.startswith("rank 2 had not arrived at set-up step 'make op'") and str(os.getpid()) in text
    assert [each.missing for each in outcomes] == [(2,)] * 3
    late = outcome(members[2].barrier, "make op", PATIENCE_S)
    assert str(late) == text
    close(members)


def test_the_shortest_patience_decides_for_all() -> None:
    members = joined(3)
    outcomes = on_ranks(lambda rank: members[rank].barrier("make op", 0.3 if rank == 1 else 60), [0, 1])
    assert "rank 2 had not arrived" in same_error_everywhere(outcomes, BootstrapTimeout)
    close(members)


def test_a_missing_rank_0_is_named_by_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mori.cco.star.VERDICT_GRACE_S", 0.2)
    members = joined(3)
    outcomes = on_ranks(lambda rank: members[rank].barrier("make op", 0.2), [1, 2])
    assert [each.missing for each in outcomes] == [(0,)] * 2
    assert all("rank 0" in str(each) and "'make op'" in str(each) for each in outcomes)
    close(members)


def test_a_rank_that_leaves_is_named_as_such() -> None:
    for leaver in (0, 2):
        members = joined(3)
        members[leaver].close()
        stayers = [rank for rank in range(3) if rank != leaver]
        outcomes = on_ranks(lambda rank, m=members: m[rank].barrier("make op", PATIENCE_S), stayers)
        assert f"rank {leaver}" in same_error_everywhere(outcomes, PeerLost)
        for each in outcomes:
            assert (each.peer, each.reason, each.pid) == (leaver, "left the communicator", os.getpid())
        close(members)


RANK = """
import sys
from mori.cco.bootstrap import Rendezvous
from mori.cco.unique_id import UniqueId
unique_id, rank, nranks = sys.argv[1:]
member = Rendezvous.join(UniqueId.from_bytes(bytes.fromhex(unique_id)), int(rank), int(nranks), {hello}, 10)
sys.stdin.read()
""".replace("{hello}", repr(HELLO))


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_is_named_by_all(victim: int) -> None:
    unique_id = get_unique_id()
    command = [sys.executable, "-c", RANK, bytes(unique_id).hex(), str(victim), "3"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        survivors = [rank for rank in range(3) if rank != victim]
        members = on_ranks(lambda rank: Rendezvous.join(unique_id, rank, 3, HELLO, PATIENCE_S), survivors)
        process.send_signal(signal.SIGKILL)
        outcomes = on_ranks(lambda index: members[index].barrier("make op", PATIENCE_S), 2)
    same_error_everywhere(outcomes, PeerLost)
    assert {(each.peer, each.pid, each.reason) for each in outcomes} == {(victim, process.pid, "died")}
    close(members)


def test_poll_ends_a_wait_on_hub_and_spoke() -> None:
    class Stop(Exception):
        pass

    def stop() -> None:
        raise Stop

    members = joined(3)
    assert [type(each) for each in on_ranks(lambda r: members[r].barrier("x", 60, poll=stop), [0, 1])] == [Stop, Stop]
    for rank in (0, 1):
        with pytest.raises(BootstrapError, match="'x' was interrupted on rank"):
            members[rank].barrier("y", 1)
    close(members)
