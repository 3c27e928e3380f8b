"""A lock between processes of one machine, or of a shared file system that has flock, which nobody can hold for ever.

The kernel drops a flock when its holder ends, however it ends. Nothing depends on the lock but work done twice: entries
are published by rename, so whoever cannot have it just goes on.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_log = logging.getLogger(__name__)

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.01, 0.2
_SAY_SO_AFTER_S = 5.0


@contextmanager
def held(path: Path, what: str, limit_s: float) -> Iterator[bool]:
    """Holds the lock file inside the block; yields False if that was not possible: no lock file can be made, the file
    system has no locks, or another process held it for `limit_s` seconds. `what` names the purpose in messages."""
    descriptor = _acquire(path, what, limit_s)
    try:
        yield descriptor is not None
    finally:
        if descriptor is not None:
            # Removed while held: whoever opened it before and gets the lock next sees that it has no name any more.
            try:
                path.unlink()
            except OSError as error:
                _log.debug("%s stays: %s", path, error)
            os.close(descriptor)


def _acquire(path: Path, what: str, limit_s: float) -> int | None:
    begin_s = time.monotonic()
    pause_s, said = _FIRST_PAUSE_S, False
    while True:
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except OSError as error:
            _log.debug("no lock for %s: %s", what, error)
            return None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.pread(descriptor, 200, 0).decode(errors="replace") or "another process"
            os.close(descriptor)
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES, errno.EINTR):
                _log.debug("no lock for %s: %s", what, error)
                return None
        else:
            if os.fstat(descriptor).st_nlink:
                _sign(descriptor)
                return descriptor
            os.close(descriptor)
            continue
        waited_s = time.monotonic() - begin_s
        if waited_s >= limit_s:
            _log.warning("%s has worked on %s for %.0f s: not waiting any longer", holder, what, waited_s)
            return None
        if waited_s >= _SAY_SO_AFTER_S and not said:
            said = True
            _log.warning("waiting for %s, which works on %s; at most %.0f s more", holder, what, limit_s - waited_s)
        time.sleep(min(pause_s, limit_s - waited_s))
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


def _sign(descriptor: int) -> None:
    """Tells those who wait who holds it. A full disk must not matter here."""
    try:
        os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
    except OSError as error:
        _log.debug("lock file stays unsigned: %s", error)
