"""Compiled device code on disk: `<key>.code` beside `<key>.json`, in a folder that only its owner can write.

* Publication: each file is written under another name, synced and renamed; the JSON file comes last and makes the entry
  exist. So a reader sees no half entry, after a crash of the machine either.
* A reader takes nothing on trust: both files must be regular and belong to this user or root, the JSON must be about
  this key, and the content must have the length and SHA-256 that it states. Anything else counts as absent.
* No fault of the file system is an error of the program: the caller compiles, and is warned once per process.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mori import env
from mori.jit.errors import CacheWarning

DEFAULT_FOLDER = "~/.cache/mori"
_BINARY, _META, _LOCK, _TEMPORARY = ".code", ".json", ".lock", ".tmp"
_ABANDONED_AFTER_S = 3600
_OURS = re.compile(r"\.?[0-9a-f]{64}-[0-9a-f]{32}(\.code|\.json|\.lock|\.\w+\.tmp)")
_warned: set[str] = set()


def folder() -> Path:
    """Where the cache is, or would be."""
    return Path(env.get("MORI_JIT_CACHE_DIR") or DEFAULT_FOLDER).expanduser()


class Cache:
    """A folder that has been found fit; see `open_cache`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def load(self, key: str) -> bytes | None:
        """The binary, None if there is no entry or not a sound one."""
        meta = self.meta(key)
        binary = _read(self.path / (key + _BINARY)) if meta else None
        if not meta or binary is None or len(binary) != meta.get("bytes"):
            return None
        return binary if hashlib.sha256(binary).hexdigest() == meta.get("sha256") else None

    def load_any(self, inputs: str) -> bytes | None:
        """What some compiler, no matter which, made of these inputs."""
        loaded = (self.load(key) for key in self.keys() if key.startswith(f"{inputs}-"))
        return next((binary for binary in loaded if binary is not None), None)

    def meta(self, key: str) -> dict[str, Any] | None:
        try:
            meta = json.loads(_read(self.path / (key + _META)) or b"null")
        except ValueError:
            return None
        return meta if isinstance(meta, dict) and meta.get("key") == key else None

    def store(self, key: str, binary: bytes, meta: dict[str, Any]) -> None:
        """Publishes an entry, over an unsound one if there is one. Warns if it cannot be written."""
        meta = {**meta, "key": key, "bytes": len(binary), "sha256": hashlib.sha256(binary).hexdigest()}
        try:
            self._publish(key + _BINARY, binary)
            self._publish(key + _META, json.dumps(meta, indent=1).encode())
            _sync_folder(self.path)
        except OSError as error:
            _warn(self.path, f"cannot be written ({error.strerror or error})")

    def _publish(self, name: str, content: bytes) -> None:
        descriptor, temporary = tempfile.mkstemp(prefix=f".{Path(name).stem}.", suffix=_TEMPORARY, dir=self.path)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.rename(temporary, self.path / name)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise

    def lock_path(self, key: str) -> Path:
        return self.path / (key + _LOCK)

    def keys(self) -> list[str]:
        return [file.name[: -len(_META)] for file in self._files() if file.name.endswith(_META)]

    def clear(self) -> int:
        """Removes all entries and what killed processes left; returns the number of entries. Processes that compile
        meanwhile are not disturbed: at worst one of them compiles what another has just published."""
        count = len(self.keys())
        for file in self._files():
            # Lock files go by the hand of their holder alone: a second one could be made and locked beside a held one.
            # A young temporary file is about to be renamed.
            if file.name.endswith(_LOCK) or (file.name.endswith(_TEMPORARY) and not _abandoned(file)):
                continue
            file.unlink(missing_ok=True)
        return count

    def _files(self) -> Iterator[Path]:
        yield from (file for file in sorted(self.path.iterdir()) if _OURS.fullmatch(file.name))


def open_cache() -> Cache | None:
    """The cache in a folder that only this user (or root) can write, made with mode 0700 if absent.

    None, with one warning per process and reason, when there can be no such folder.
    """
    path = folder()
    try:
        if not path.is_absolute() and str(path).startswith("~"):
            raise OSError("this user has no home folder")
        path = path.absolute()
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            path.mkdir(mode=0o700)
        except FileExistsError:
            pass
        status = path.stat()
        if not stat.S_ISDIR(status.st_mode):
            raise OSError("it is no folder")
    except OSError as error:
        _warn(path, f"cannot be used ({error.strerror or error})")
        return None
    if not _trusted(status):
        _warn(path, f"is not used because it belongs to user {status.st_uid}, and this process runs as {os.geteuid()}")
        return None
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        mode = stat.S_IMODE(status.st_mode)
        _warn(path, f"is not used because others can write to it (mode {mode:04o}; chmod go-w makes it fit)")
        return None
    return Cache(path)


def _abandoned(file: Path) -> bool:
    try:
        return time.time() - file.stat().st_mtime > _ABANDONED_AFTER_S
    except FileNotFoundError:
        return False


def _trusted(status: os.stat_result) -> bool:
    # Root could replace this very program, so its files need no more trust; images come with caches that root filled.
    return status.st_uid in (os.geteuid(), 0)


def _read(path: Path) -> bytes | None:
    try:
        # Not blocking: somebody's pipe under the name of an entry must not hold us.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        with os.fdopen(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            return file.read() if stat.S_ISREG(status.st_mode) and _trusted(status) else None
    except OSError:
        return None


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _warn(path: Path, what: str) -> None:
    message = (
        f"the cache of device code {path} {what}: every process compiles for itself. "
        "Set MORI_JIT_CACHE_DIR to a folder that this user alone can write"
    )
    if message not in _warned:
        _warned.add(message)
        warnings.warn(message, CacheWarning, stacklevel=2)
