"""The 128 bytes by which the ranks of one communicator find and recognise each other."""

from __future__ import annotations

import ipaddress
import secrets
import struct

from mori import env
from mori.cco import network

_VERSION = 1
# magic, version, IP version (4 or 6), port, packed address (IPv4 in the first four bytes), secret; zeros to the end.
_FORMAT = struct.Struct(">4sBBH16s32s72x")
_MAGIC = b"MORI"
_ADDRESS_BYTES = {4: 4, 6: 16}
SECRET_BYTES = 32
UNIQUE_ID_BYTES = 128


class UniqueId:
    """Address, port and secret of one rendezvous, as an immutable 128-byte token.

    Whoever has it can join, so pass it on as you would a password; `repr` hides the secret. `UniqueId()` is the zero
    id: a placeholder of the right size that no communicator accepts.
    """

    __slots__ = ("_raw",)

    def __init__(self) -> None:
        self._raw = bytes(UNIQUE_ID_BYTES)

    @classmethod
    def from_bytes(cls, raw: bytes) -> UniqueId:
        """ValueError unless `raw` is 128 bytes that hold an id of this version (or zeros)."""
        raw = bytes(raw)
        if len(raw) != UNIQUE_ID_BYTES:
            raise ValueError(f"a unique id has {UNIQUE_ID_BYTES} bytes, got {len(raw)}")
        if any(raw):
            magic, version, ip_version, _, _, _ = _FORMAT.unpack(raw)
            if magic != _MAGIC or ip_version not in _ADDRESS_BYTES:
                raise ValueError("these 128 bytes are not a mori unique id: pass on what get_unique_id() returned")
            if version != _VERSION:
                raise ValueError(
                    f"unique id of version {version}, this mori reads version {_VERSION}: "
                    "run the same mori version on every rank"
                )
        self = cls()
        self._raw = raw
        return self

    @classmethod
    def _compose(cls, address: str, port: int, secret: bytes) -> UniqueId:
        packed = ipaddress.ip_address(address)
        return cls.from_bytes(_FORMAT.pack(_MAGIC, _VERSION, packed.version, port, packed.packed, secret))

    @property
    def ptr(self) -> bytes:
        """The raw token, for the low-level interface."""
        return self._raw

    @property
    def is_zero(self) -> bool:
        return not any(self._raw)

    @property
    def address(self) -> str:
        _, _, ip_version, _, packed, _ = _FORMAT.unpack(self._raw)
        return str(ipaddress.ip_address(packed[: _ADDRESS_BYTES.get(ip_version, 4)]))

    @property
    def port(self) -> int:
        return int(_FORMAT.unpack(self._raw)[3])

    @property
    def secret(self) -> bytes:
        return bytes(_FORMAT.unpack(self._raw)[5])

    def __bytes__(self) -> bytes:
        return self._raw

    def __reduce__(self) -> tuple[object, ...]:
        return (UniqueId.from_bytes, (self._raw,))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, UniqueId) and secrets.compare_digest(self._raw, other._raw)

    def __hash__(self) -> int:
        return hash(self._raw)

    def __repr__(self) -> str:
        return "UniqueId(zero)" if self.is_zero else f"UniqueId({network.endpoint(self.address, self.port)})"


def get_unique_id(address: str | None = None) -> UniqueId:
    """New id; a background thread of this process listens for the ranks until all have joined or the deadline passes.

    The caller need not be a rank but must stay alive until all ranks have joined. `address` is where to listen;
    by default it follows MORI_SOCKET_IFNAME, see `network.listening_address`. The deadline is
    MORI_BOOTSTRAP_TIMEOUT from now, or that of the last rank to come, whichever is later.
    BootstrapError when no address or port can be had.
    """
    from mori.cco.lobby import Lobby  # needs UniqueId

    listener = network.listen(address or network.listening_address())
    secret = secrets.token_bytes(SECRET_BYTES)
    bound, port = listener.getsockname()[:2]
    Lobby(listener, secret, env.get("MORI_BOOTSTRAP_TIMEOUT")).start()
    return UniqueId._compose(bound, port, secret)
