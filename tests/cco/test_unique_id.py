"""The 128-byte token, and where its creator listens."""

from __future__ import annotations

import pickle
import socket

import pytest

from mori.cco import network
from mori.cco.unique_id import UNIQUE_ID_BYTES, UniqueId, get_unique_id
from mori.errors import BootstrapError
from tests.cco.test_bootstrap import _nothing_leaks  # noqa: F401 - a fixture of every test here too

SECRET = bytes(range(32))


@pytest.mark.parametrize("address", ["10.1.2.3", "::1", "fd00::2"])
def test_round_trip(address: str) -> None:
    unique_id = UniqueId._compose(address, 40123, SECRET)
    raw = bytes(unique_id)
    assert len(raw) == UNIQUE_ID_BYTES == 128 and unique_id.ptr == raw
    for copy in (UniqueId.from_bytes(raw), UniqueId.from_bytes(bytearray(raw)), pickle.loads(pickle.dumps(unique_id))):
        assert (copy.address, copy.port, copy.secret) == (address, 40123, SECRET)
        assert copy == unique_id and hash(copy) == hash(unique_id)
    other = UniqueId._compose(address, 40123, bytes(32))
    assert other != unique_id and unique_id != raw


def test_repr_hides_the_secret() -> None:
    assert repr(UniqueId._compose("::1", 7, SECRET)) == "UniqueId([::1]:7)"
    assert repr(UniqueId()) == "UniqueId(zero)"


def test_zero_id() -> None:
    assert bytes(UniqueId()) == bytes(128)
    assert UniqueId.from_bytes(bytes(128)) == UniqueId()
    assert UniqueId().is_zero and not UniqueId._compose("::1", 7, SECRET).is_zero


@pytest.mark.parametrize("length", [0, 127, 129])
def test_wrong_length(length: int) -> None:
    with pytest.raises(ValueError, match=f"128 bytes, got {length}"):
        UniqueId.from_bytes(bytes(length))


def test_foreign_bytes() -> None:
    with pytest.raises(ValueError, match="not a mori unique id"):
        UniqueId.from_bytes(b"x" * 128)
    raw = bytearray(bytes(UniqueId._compose("::1", 7, SECRET)))
    raw[4] += 1
    with pytest.raises(ValueError, match="version 2, this mori reads version 1"):
        UniqueId.from_bytes(raw)


def test_ids_are_distinct_and_somebody_listens() -> None:
    first, second = get_unique_id("127.0.0.1"), get_unique_id("127.0.0.1")
    assert first.secret != second.secret and first.port != second.port
    for unique_id in (first, second):
        with socket.create_connection((unique_id.address, unique_id.port), 5) as sock:
            assert sock.recv(1)
    assert first.secret not in (bytes(32), second.secret)


def test_named_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MORI_SOCKET_IFNAME", "lo")
    assert get_unique_id().address in ("127.0.0.1", "::1")


def test_unknown_interface_lists_those_that_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MORI_SOCKET_IFNAME", "nosuch0")
    with pytest.raises(BootstrapError, match="MORI_SOCKET_IFNAME=nosuch0") as caught:
        get_unique_id()
    for _, name in socket.if_nameindex():
        assert name in str(caught.value)


def test_interface_without_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "_addresses", lambda name: [])
    monkeypatch.setenv("MORI_SOCKET_IFNAME", "lo")
    with pytest.raises(BootstrapError, match="lo .* is down or has no usable address"):
        get_unique_id()


@pytest.mark.parametrize(
    "addresses, route, expected",
    [
        ({"lo": ["127.0.0.1", "::1"], "br0": ["172.17.0.1"], "eth0": ["10.0.0.5", "fd00::5"]}, "eth0", "10.0.0.5"),
        ({"lo": ["127.0.0.1"], "br0": ["172.17.0.1"]}, None, "172.17.0.1"),
        ({"lo": ["127.0.0.1", "::1"]}, None, "127.0.0.1"),
        ({"lo": ["127.0.0.1", "::1"], "eth0": ["fd00::5"]}, "eth0", "fd00::5"),
        ({"lo": ["::1"]}, None, "::1"),
        ({}, None, "127.0.0.1"),
    ],
)
def test_default_address(
    monkeypatch: pytest.MonkeyPatch, addresses: dict[str, list[str]], route: str | None, expected: str
) -> None:
    monkeypatch.setattr(socket, "if_nameindex", lambda: list(enumerate(addresses, 1)))
    monkeypatch.setattr(network, "_addresses", addresses.__getitem__)
    monkeypatch.setattr(network, "_default_route_interface", lambda: route)
    assert network.listening_address() == expected


def test_an_address_of_another_machine_cannot_be_listened_at() -> None:
    with pytest.raises(BootstrapError, match=r"cannot listen at 192\.0\.2\.77: .*MORI_SOCKET_IFNAME"):
        network.listen("192.0.2.77")


def test_node_identity(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MORI_NODE_ID", raising=False)
    plain = network.node_identity()
    assert plain == network.node_identity()
    monkeypatch.setenv("MORI_NODE_ID", "a")
    first = network.node_identity()
    monkeypatch.setenv("MORI_NODE_ID", "b")
    assert len({plain, first, network.node_identity()}) == 3
