"""Where a process can be reached, and on which machine it runs."""

from __future__ import annotations

import fcntl
import functools
import ipaddress
import os
import socket
import struct
from pathlib import Path

from mori import env
from mori.errors import BootstrapError

_SIOCGIFFLAGS = 0x8913
_SIOCGIFADDR = 0x8915
_IFF_UP = 1
_BACKLOG = 1024


def node_identity() -> str:
    """Equal on two ranks exactly when they share a machine: the kernel's boot id, plus MORI_NODE_ID when set.

    Never the host name: two machines may carry the same, and containers of one machine carry different ones.
    """
    return f"{_boot_id()}/{env.get('MORI_NODE_ID') or ''}"


def listening_address() -> str:
    """Address at which this process should listen: of MORI_SOCKET_IFNAME if set, else one that others can reach.

    The interface of the default route comes first (bridges of container runtimes have addresses that mean something
    else on every machine), loopback last. BootstrapError for an interface that does not exist or has no address.
    """
    name = env.get("MORI_SOCKET_IFNAME")
    names = [interface for _, interface in socket.if_nameindex()]
    if name is not None:
        if name not in names:
            raise BootstrapError(
                f"MORI_SOCKET_IFNAME={name} names no network interface of {socket.gethostname()}; "
                f"there are {', '.join(names)}"
            )
        found = _addresses(name)
        if not found:
            raise BootstrapError(
                f"network interface {name} (MORI_SOCKET_IFNAME) of {socket.gethostname()} is down or has no usable "
                f"address; those with one: {', '.join(n for n in names if _addresses(n)) or 'none'}"
            )
        return found[0]
    first = _default_route_interface()
    names.sort(key=lambda interface: interface != first)
    found = [address for interface in names for address in _addresses(interface)]
    found.sort(key=lambda address: ipaddress.ip_address(address).is_loopback)
    return found[0] if found else "127.0.0.1"


def listen(address: str) -> socket.socket:
    """Listening TCP socket at a free port of `address`. BootstrapError when that is impossible."""
    sock = socket.socket(family_of(address), socket.SOCK_STREAM)
    try:
        sock.bind((address, 0))
        sock.listen(_BACKLOG)
    except OSError as error:
        sock.close()
        raise BootstrapError(
            f"cannot listen at {address}: {error.strerror}; MORI_SOCKET_IFNAME chooses another network interface"
        ) from error
    return sock


def family_of(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ipaddress.ip_address(address).version == 6 else socket.AF_INET


def endpoint(address: str, port: int) -> str:
    """For messages."""
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


@functools.cache
def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _addresses(interface: str) -> list[str]:
    """IPv4 address, then IPv6 addresses, of an interface that is up.

    Link-local IPv6 is left out: it names a machine only together with an interface index of the reader's.
    """
    request = struct.pack("256s", interface.encode()[:15])
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            (flags,) = struct.unpack_from("H", fcntl.ioctl(probe, _SIOCGIFFLAGS, request), 16)
            if not flags & _IFF_UP:
                return []
            found.append(socket.inet_ntoa(fcntl.ioctl(probe, _SIOCGIFADDR, request)[20:24]))
        except OSError:  # no IPv4 address there
            pass
    for line in _proc_net("if_inet6"):
        packed, _, _, _, _, name = line.split()
        address = ipaddress.IPv6Address(bytes.fromhex(packed))
        if name == interface and not address.is_link_local:
            found.append(str(address))
    return found


def _default_route_interface() -> str | None:
    for line in _proc_net("route")[1:]:
        interface, destination, *_, mask = line.split()[:8]
        if destination == mask == "00000000":
            return interface
    for line in _proc_net("ipv6_route"):
        fields = line.split()
        if fields[0] == "0" * 32 and fields[1] == "00" and fields[-1] != "lo":
            return fields[-1]
    return None


def _proc_net(name: str) -> list[str]:
    # Of the calling thread, because a thread may sit in a network namespace of its own.
    try:
        return Path(f"/proc/thread-self/net/{name}").read_text().splitlines()
    except OSError:  # this address family is switched off
        return []


def process_identity() -> dict[str, object]:
    """What every rank says about itself to the others."""
    return {"host": socket.gethostname(), "pid": os.getpid(), "node": node_identity()}
