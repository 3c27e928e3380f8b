"""Nothing unsound is ever loaded, and no fault of the file system is more than a warning."""

from __future__ import annotations

import errno
import json
import os
import stat
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

from mori import jit
from mori.jit import cache
from tests.jit.fake_compiler import MAGIC, FakeCompiler

ADD = jit.Spec("add", "kernel add", kernels=("add",))
CODE = MAGIC + b"kernel add"
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")


def file_of(folder: Path, suffix: str) -> Path:
    (found,) = folder.glob(f"*{suffix}")
    return found


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def with_meta(folder: Path, **changes: object) -> None:
    path = file_of(folder, ".json")
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def replaced(path: Path, make: Callable[[Path], object]) -> None:
    path.unlink()
    make(path)


def compiled_anew(times: int) -> set[bytes]:
    """What comes when this process remembers nothing."""
    results = set()
    for _ in range(times):
        jit.forget()
        results.add(jit.compile(ADD))
    return results


DAMAGE: dict[str, Callable[[Path], object]] = {
    "binary cut": lambda f: os.truncate(file_of(f, ".code"), 5),
    "binary empty": lambda f: os.truncate(file_of(f, ".code"), 0),
    "binary altered": lambda f: flip(file_of(f, ".code")),
    "binary longer": lambda f: file_of(f, ".code").write_bytes(CODE + b"!"),
    "binary gone": lambda f: file_of(f, ".code").unlink(),
    "binary is a folder": lambda f: replaced(file_of(f, ".code"), Path.mkdir),
    "binary is a link": lambda f: replaced(
        file_of(f, ".code"), lambda path: ((f / "real").write_bytes(CODE), path.symlink_to(f / "real"))
    ),
    "binary is a pipe": lambda f: replaced(file_of(f, ".code"), os.mkfifo),
    "meta gone": lambda f: file_of(f, ".json").unlink(),
    "meta cut": lambda f: os.truncate(file_of(f, ".json"), 20),
    "meta no text": lambda f: file_of(f, ".json").write_bytes(b"\xff\xfe"),
    "meta a list": lambda f: file_of(f, ".json").write_text("[]"),
    "meta of another key": lambda f: with_meta(f, key="0" * 64 + "-" + "0" * 32),
    "meta without hash": lambda f: with_meta(f, sha256=None),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_an_unsound_entry_is_compiled_anew(damage: str, fake: FakeCompiler, cache_folder: Path) -> None:
    jit.compile(ADD)
    DAMAGE[damage](cache_folder)
    jit.forget()
    if damage == "binary is a folder":  # nothing can be renamed over it
        with pytest.warns(jit.CacheWarning, match="cannot be written"):
            assert jit.compile(ADD) == CODE
        return
    assert jit.compile(ADD) == CODE
    assert fake.calls == 2
    jit.forget()
    assert jit.compile(ADD) == CODE
    assert fake.calls == 2


@as_root
@pytest.mark.parametrize("suffix", [".code", ".json"])
def test_files_of_another_user_are_not_believed(suffix: str, fake: FakeCompiler, cache_folder: Path) -> None:
    jit.compile(ADD)
    os.chown(file_of(cache_folder, suffix), 65534, 65534)
    jit.forget()
    assert jit.compile(ADD) == CODE
    assert fake.calls == 2
    assert file_of(cache_folder, suffix).stat().st_uid == 0


def test_the_folder_and_its_files_are_private(fake: FakeCompiler, cache_folder: Path) -> None:
    previous = os.umask(0)
    try:
        jit.compile(ADD)
    finally:
        os.umask(previous)
    assert stat.S_IMODE(cache_folder.stat().st_mode) == 0o700
    files = list(cache_folder.iterdir())
    assert sorted(file.suffix for file in files) == [".code", ".json"]
    assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o600}


def unfit_folder(path: Path, mode: int = 0o700, owner: int = -1) -> None:
    path.mkdir()
    path.chmod(mode)
    os.chown(path, owner, -1)


@pytest.mark.parametrize(
    "prepare, message",
    [
        (lambda path: unfit_folder(path, mode=0o770), r"others can write to it \(mode 0770"),
        (lambda path: unfit_folder(path, mode=0o702), r"others can write to it \(mode 0702"),
        pytest.param(lambda path: unfit_folder(path, owner=65534), "belongs to user 65534", marks=as_root),
        (lambda path: path.write_text(""), "it is no folder"),
        (lambda path: path.symlink_to(path.parent / "nowhere"), "No such file"),
    ],
    ids=["group", "world", "foreign", "file", "dangling link"],
)
def test_an_unfit_folder_is_refused_once_and_work_goes_on(
    prepare: Callable[[Path], object], message: str, fake: FakeCompiler, cache_folder: Path
) -> None:
    prepare(cache_folder)
    with pytest.warns(jit.CacheWarning, match=f"{message}.*Set MORI_JIT_CACHE_DIR") as warned:
        assert compiled_anew(3) == {CODE}
    assert len(warned) == 1
    assert fake.calls == 3
    assert not cache_folder.is_dir() or list(cache_folder.iterdir()) == []


@pytest.mark.parametrize("call", ["write", "fsync", "rename"])
def test_a_full_disk_is_one_warning_and_leaves_nothing_half(
    call: str, fake: FakeCompiler, cache_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if call == "write":
        monkeypatch.setattr(os, "fdopen", full)
    else:
        monkeypatch.setattr(os, call, full)
    with pytest.warns(jit.CacheWarning, match="No space left") as warned:
        assert compiled_anew(2) == {CODE}
    assert len(warned) == 1
    monkeypatch.undo()
    assert list(cache_folder.iterdir()) == []


def test_a_crash_between_the_two_files_leaves_no_entry(
    fake: FakeCompiler, cache_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rename, renamed = os.rename, []

    def once(source: str, target: Path) -> None:
        if renamed:
            raise KeyboardInterrupt
        renamed.append(target)
        rename(source, target)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(os, "rename", once)
        jit.compile(ADD)
    assert [path.suffix for path in renamed] == [".code"]
    assert jit.compile(ADD) == CODE
    assert fake.calls == 2


def test_the_default_is_in_the_home_folder(fake: FakeCompiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MORI_JIT_CACHE_DIR")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    jit.compile(ADD)
    assert len(list((tmp_path / "home" / ".cache" / "mori").iterdir())) == 2


def test_clear_removes_what_is_ours(fake: FakeCompiler, cache_folder: Path) -> None:
    jit.compile(ADD)
    opened = cache.open_cache()
    assert opened is not None
    (key,) = opened.keys()
    young, old = cache_folder / f".{key}.young_1.tmp", cache_folder / f".{key}.old_1.tmp"
    kept = [cache_folder / "notes.json", opened.lock_path(key), young]
    for file in (*kept, old):
        file.write_text("")
    os.utime(old, (0, 0))
    assert opened.clear() == 1
    assert sorted(cache_folder.iterdir()) == sorted(kept)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jit.forget()
        assert jit.compile(ADD) == CODE
