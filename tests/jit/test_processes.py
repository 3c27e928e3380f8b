"""Real processes and one cache: compiled once, whoever dies, whatever the file system refuses."""

from __future__ import annotations

import fcntl
import json
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.jit.fake_compiler import MAGIC

PROGRAM = Path(__file__).with_name("fake_compiler.py")
OUTCOME = {"binary": MAGIC.decode() + "kernel add"}


class Scene:
    """A cache, a counter and a gate that others than the owner of the test can reach."""

    def __init__(self, folder: Path) -> None:
        folder.chmod(0o755)
        self.cache, self.counter, self.gate = folder / "cache", folder / "calls", folder / "gate"
        for file in (self.counter, self.gate):
            file.touch()
            file.chmod(0o666)
        self.processes: list[subprocess.Popen[str]] = []

    def start(self, user: int = 0, file_bytes: int | None = None) -> subprocess.Popen[str]:
        def limit() -> None:
            if file_bytes is not None:
                resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, file_bytes))

        process = subprocess.Popen(
            [sys.executable, str(PROGRAM), str(self.counter), str(self.gate), str(user)],
            env={**os.environ, "MORI_JIT_CACHE_DIR": str(self.cache)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=limit,
        )
        self.processes.append(process)
        return process

    @contextmanager
    def closed_gate(self) -> Iterator[None]:
        """Compilations that begin in the block end after it."""
        with open(self.gate) as gate:
            fcntl.flock(gate, fcntl.LOCK_EX)
            yield

    def calls(self) -> list[int]:
        """Process ids of those that compiled, one per compilation."""
        return [int(line) for line in self.counter.read_text().split()]


@pytest.fixture
def scene() -> Iterator[Scene]:
    with tempfile.TemporaryDirectory() as folder:
        made = Scene(Path(folder))
        yield made
        for process in made.processes:
            process.kill()
            process.communicate()


def asking(process: subprocess.Popen[str]) -> None:
    assert process.stdout
    assert process.stdout.readline() == "asking\n", process.communicate()[1]


def outcome(process: subprocess.Popen[str]) -> tuple[dict[str, str], str]:
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    return json.loads(output.splitlines()[-1]), errors


def test_eight_processes_and_an_empty_cache_compile_once(scene: Scene) -> None:
    with scene.closed_gate():
        processes = [scene.start() for _ in range(8)]
        for process in processes:
            asking(process)
    assert [outcome(process) for process in processes] == [(OUTCOME, "")] * 8
    assert len(scene.calls()) == 1
    assert sorted(file.suffix for file in scene.cache.iterdir()) == [".code", ".json"]


def test_a_killed_compilation_is_taken_over(scene: Scene) -> None:
    with scene.closed_gate():
        first = scene.start()
        asking(first)
        while not scene.calls():  # it says so in the file when it is inside
            assert first.poll() is None
            os.sched_yield()
        second = scene.start()
        asking(second)
        first.kill()
        first.wait(60)
    assert outcome(second) == (OUTCOME, "")
    assert scene.calls() == [first.pid, second.pid]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody who may not write")
def test_a_read_only_cache_serves_and_warns_only_when_it_lacks_something(scene: Scene) -> None:
    scene.cache.mkdir(mode=0o755)
    result, errors = outcome(scene.start(user=65534))
    assert result == OUTCOME and errors.count("CacheWarning") == 1 and "cannot be written (Permission denied)" in errors
    assert list(scene.cache.iterdir()) == []

    outcome(scene.start())  # root fills it
    for file in scene.cache.iterdir():
        file.chmod(0o644)
    assert outcome(scene.start(user=65534)) == (OUTCOME, "")
    assert len(scene.calls()) == 2


def test_a_disk_that_fills_up_while_writing_is_one_warning(scene: Scene) -> None:
    result, errors = outcome(scene.start(file_bytes=10))
    assert result == OUTCOME and errors.count("CacheWarning") == 1 and "cannot be written (File too large)" in errors
    assert list(scene.cache.iterdir()) == []
