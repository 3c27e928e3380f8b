"""The lock between processes, seen from one process: each opening of the file counts as a holder of its own."""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from mori.jit import locks


def test_it_excludes_and_goes_away(tmp_path: Path) -> None:
    path = tmp_path / "a.lock"
    with locks.held(path, "the work", 1) as first:
        assert first and path.exists()
        with locks.held(path, "the work", 0) as second:
            assert not second
        assert path.exists()
    assert not path.exists()


def test_waiting_ends_and_names_the_holder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # A clock that only sleeping moves.
    clock = SimpleNamespace(now_s=0.0)
    clock.monotonic = lambda: clock.now_s
    clock.sleep = lambda pause_s: setattr(clock, "now_s", clock.now_s + pause_s)
    monkeypatch.setattr(locks, "time", clock)
    path = tmp_path / "a.lock"
    with locks.held(path, "add", 1), caplog.at_level(logging.WARNING), locks.held(path, "add", 30) as second:
        assert not second
    assert clock.now_s == pytest.approx(30)
    waiting, given_up = caplog.messages
    assert f"waiting for process {os.getpid()} on" in waiting and "works on add; at most 25 s more" in waiting
    assert "add for 30 s: not waiting any longer" in given_up


def test_who_waited_for_a_removed_file_locks_the_new_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, opened = tmp_path / "a.lock", threading.Event()
    flock, exists = locks.fcntl.flock, []

    def after_the_holder_left(descriptor: int, how: int) -> None:
        if threading.current_thread() is waiter:
            opened.set()
            released.wait(60)
        flock(descriptor, how)

    def wait() -> None:
        with locks.held(path, "add", 60) as got:
            exists.append(got and path.exists())

    released = threading.Event()
    waiter = threading.Thread(target=wait)
    monkeypatch.setattr(locks.fcntl, "flock", after_the_holder_left)
    with locks.held(path, "add", 60):
        waiter.start()
        assert opened.wait(60)
    released.set()
    waiter.join(60)
    assert exists == [True]


def test_where_no_lock_can_be_work_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with locks.held(tmp_path / "absent" / "a.lock", "add", 60) as got:
        assert not got

    def unsupported(descriptor: int, how: int) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(locks.fcntl, "flock", unsupported)
    with locks.held(tmp_path / "a.lock", "add", 60) as got:
        assert not got
