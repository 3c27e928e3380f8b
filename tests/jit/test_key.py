"""The name of a cache entry changes with everything that can change the code, and with nothing else."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mori.jit import Spec, job
from tests.jit.fake_compiler import FakeCompiler


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    folder = tmp_path / "tree"
    (folder / "deep").mkdir(parents=True)
    (folder / "near.hpp").write_text('#include "deep/far.hpp"\n')
    (folder / "deep" / "far.hpp").write_text("int far;\n")
    (folder / "unreached.hpp").write_text("int other;\n")
    return folder


def key(tree: Path, compiler: FakeCompiler, **changes: Any) -> str:
    arguments = {"name": "k", "source": '#include "near.hpp"\n', "include_dirs": (tree / "first", tree), **changes}
    return job.resolve(Spec(**arguments)).key(compiler)


@pytest.mark.parametrize(
    "changes",
    [
        {"source": '#include "near.hpp"\n\n'},
        {"name": "other"},
        {"kernels": ("add",)},
        {"constants": {"N": 1}},
        {"flags": ("-G",)},
        {"flags": ("-G", "-lineinfo")},
        {"flags": ("-lineinfo", "-G")},
        {"arch": "sm_100"},
    ],
    ids=str,
)
def test_every_field_of_the_spec_counts(changes: dict[str, Any], tree: Path, fake: FakeCompiler) -> None:
    others = [key(tree, fake), key(tree, fake, flags=("-lineinfo",)), key(tree, fake, constants={"N": 2})]
    assert key(tree, fake, **changes) not in others


@pytest.mark.parametrize(
    "change",
    [
        lambda tree, fake, patch: (tree / "near.hpp").write_text('#include "deep/far.hpp" \n'),
        lambda tree, fake, patch: (tree / "deep" / "far.hpp").write_text("int Far;\n"),
        lambda tree, fake, patch: ((tree / "first").mkdir(), (tree / "first" / "near.hpp").write_text("")),
        lambda tree, fake, patch: patch.setattr(fake, "identity", "fake 1.1"),
        lambda tree, fake, patch: patch.setattr(fake, "extra", ["-std=c++17"]),
        lambda tree, fake, patch: patch.setattr(job, "__version__", "0.0.0.other"),
        lambda tree, fake, patch: patch.setenv("MORI_JIT_ARCH", "sm_100"),
        lambda tree, fake, patch: patch.setenv("MORI_JIT_EXTRA_FLAGS", "-DX='a b'"),
    ],
    ids=["header", "header of a header", "shadowing header", "compiler", "options", "mori", "arch", "extra flags"],
)
def test_everything_around_the_spec_counts(
    change: Callable[..., object], tree: Path, fake: FakeCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = key(tree, fake)
    change(tree, fake, monkeypatch)
    assert key(tree, fake) != before


def test_where_the_files_are_does_not_count(tree: Path, tmp_path: Path, fake: FakeCompiler) -> None:
    before = key(tree, fake)
    moved = tmp_path / "moved"
    shutil.move(tree, moved)
    (moved / "unreached.hpp").write_text("int changed;\n")
    assert key(moved, fake) == before


def test_a_source_that_is_a_path_finds_its_neighbours_and_the_root(
    tree: Path, fake: FakeCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tree / "device").mkdir()
    (tree / "device" / "base.hpp").write_text("")
    (tree / "deep" / "k.cu").write_text('#include "far.hpp"\n#include "near.hpp"\n')
    monkeypatch.setenv("MORI_SOURCE_ROOT", str(tree))
    spec = Spec("k", Path("deep/k.cu"))
    resolved = job.resolve(spec)
    assert resolved.path == tree / "deep" / "k.cu" and resolved.include_dirs == (tree,)
    (tree / "deep" / "far.hpp").write_text("int changed;\n")
    assert job.resolve(spec).inputs != resolved.inputs


@pytest.mark.parametrize(
    "name, value, message",
    [
        ("MORI_JIT_ARCH", "gfx942", "MORI_JIT_ARCH='gfx942' is no arch of target cuda"),
        ("MORI_JIT_EXTRA_FLAGS", "-DA='", "MORI_JIT_EXTRA_FLAGS.*cannot be split"),
        ("MORI_JIT_EXTRA_FLAGS", "-I /opt", "MORI_JIT_EXTRA_FLAGS holds '-I'"),
    ],
)
def test_malformed_variables_are_named(name: str, value: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=message):
        job.resolve(Spec("k", "text"))
