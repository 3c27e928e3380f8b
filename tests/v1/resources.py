"""What a process holds at the moment: memory, descriptors, threads."""

from __future__ import annotations

import contextlib
import gc
import os
import time
from pathlib import Path
from typing import NamedTuple


class Resources(NamedTuple):
    descriptors: int
    threads: int
    memory_file_bytes: int
    """Bytes in use in memfd files that this process has open or mapped."""
    mappings: int
    """Mapped ranges of memfd files."""
    resident_bytes: int


def memory_files() -> dict[tuple[int, int], int]:
    """Bytes in use per memfd, by (device, inode), of all memfds open in this process."""
    found = {}
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            path = f"/proc/self/fd/{descriptor}"
            if os.readlink(path).startswith("/memfd:"):
                status = os.stat(path)
                found[status.st_dev, status.st_ino] = status.st_blocks * 512
    return found


def settled_snapshot() -> Resources:
    """A snapshot taken once nothing changes any more: threads that are asked to end need a moment for it."""
    same, last = 0, snapshot()
    deadline = time.monotonic() + 5.0
    while same < 4 and time.monotonic() < deadline:
        time.sleep(0.01)
        current = snapshot()
        same = same + 1 if current[:4] == last[:4] else 0
        last = current
    return last


def snapshot() -> Resources:
    gc.collect()
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    maps = Path("/proc/self/maps").read_text().splitlines()
    return Resources(
        descriptors=len(os.listdir("/proc/self/fd")),
        threads=int(status["Threads"]),
        memory_file_bytes=sum(memory_files().values()),
        mappings=sum("/memfd:" in line for line in maps),
        resident_bytes=int(status["VmRSS"].split()[0]) * 1024,
    )
