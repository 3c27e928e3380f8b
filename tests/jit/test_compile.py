"""Which of memory, disk and compiler answers, and what is said when none can."""

from __future__ import annotations

import os
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from mori import jit
from mori.jit import compilers
from mori.jit.toolchain import Unavailable
from tests.jit.fake_compiler import MAGIC, FakeCompiler

ADD = jit.Spec("add", "kernel add", kernels=("add",))


def missing_row(name: str) -> compilers.Row:
    def find(arch: str) -> FakeCompiler:
        raise Unavailable(f"{name} is not here")

    return compilers.Row(name, "cuda", find, set, f"the package of {name}")


def test_memory_then_disk_then_compiler(fake: FakeCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    assert jit.compile(ADD) == MAGIC + b"kernel add"
    assert fake.calls == 1
    with monkeypatch.context() as patch:
        patch.setattr(compilers, "choose", None)  # memory asks nobody
        assert jit.compile(jit.Spec("add", "kernel add", kernels=("add",))) == MAGIC + b"kernel add"
    jit.forget()
    assert jit.compile(ADD) == MAGIC + b"kernel add"
    assert fake.calls == 1
    assert jit.compile(jit.Spec("add", "kernel add  kernel more")) != MAGIC + b"kernel add"
    assert fake.calls == 2


def test_an_edited_header_is_compiled_anew(fake: FakeCompiler, tmp_path: Path) -> None:
    header = tmp_path / "x.hpp"
    spec = jit.Spec("k", '#include "x.hpp"', include_dirs=(tmp_path,))
    for text, calls in (("int a;", 1), ("int b;", 2), ("int a;", 2)):
        header.write_text(text)
        jit.forget()
        jit.compile(spec)
        assert fake.calls == calls


def test_variables_act_without_a_new_process(fake: FakeCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    jit.compile(ADD)
    monkeypatch.setenv("MORI_JIT_EXTRA_FLAGS", "-lineinfo")
    jit.compile(ADD)
    assert fake.calls == 2


def test_a_failure_carries_all_that_is_known_and_is_not_kept(fake: FakeCompiler) -> None:
    spec = jit.Spec("broken", "a mistake", constants={"N": 1})
    for calls in (1, 2):
        with pytest.raises(jit.CompileError, match="(?s)broken.*there is a mistake.*-DN=1") as caught:
            jit.compile(spec)
        assert fake.calls == calls
    error = pickle.loads(pickle.dumps(caught.value))
    assert (error.source_name, error.compiler, error.kept) == ("broken", "fake 1.0", "")
    assert error.log == "line 1: there is a mistake" and error.command == ("-arch=sm_90", "-DN=1")
    assert str(error) == str(caught.value)


def test_a_kernel_that_is_not_in_the_result_is_named(fake: FakeCompiler, cache_folder: Path) -> None:
    with pytest.raises(jit.CompileError, match="lacks sub, mul; it has add") as caught:
        jit.compile(jit.Spec("add", "kernel add", kernels=("sub", "add", "mul")))
    assert caught.value.source_name == "add"
    assert list(cache_folder.iterdir()) == []


def test_a_result_that_is_no_code_object_is_refused(fake: FakeCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fake, "compile", lambda job: b"nonsense")
    with pytest.raises(jit.CompileError, match="no fake code"):
        jit.compile(ADD)


def test_files_of_a_failure_are_kept_on_request(
    fake: FakeCompiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MORI_JIT_KEEP_FAILED", "1")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(jit.CompileError) as caught:
        jit.compile(jit.Spec("broken", "a mistake"))
    kept = Path(caught.value.kept)
    assert str(kept) in str(caught.value)
    texts = {file.name: file.read_text() for file in kept.iterdir()}
    assert texts == {
        "source.cu": "a mistake",
        "log.txt": "line 1: there is a mistake",
        "options.txt": "-arch=sm_90\n",
    }


def test_verbose_shows_options_and_where_code_came_from(
    fake: FakeCompiler, cache_folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    jit.compile(ADD)
    assert capfd.readouterr().err == ""
    monkeypatch.setenv("MORI_JIT_VERBOSE", "1")
    jit.compile(jit.Spec("other", "kernel other"))
    assert "other for sm_90 by fake 1.0" in capfd.readouterr().err
    jit.forget()
    jit.compile(ADD)
    assert f"add for sm_90: 20 bytes from {cache_folder}" in capfd.readouterr().err


def test_without_compilation_the_cache_alone_answers(fake: FakeCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MORI_DISABLE_JIT", "1")
    with pytest.raises(jit.CompilationDisabled, match="MORI_DISABLE_JIT.*does not hold add for sm_90"):
        jit.compile(ADD)
    monkeypatch.setenv("MORI_DISABLE_JIT", "0")
    jit.compile(ADD)
    jit.forget()
    monkeypatch.setenv("MORI_DISABLE_JIT", "1")
    monkeypatch.setattr(fake, "identity", "fake 2.0")
    assert jit.compile(ADD) == MAGIC + b"kernel add"
    assert fake.calls == 1


def test_no_compiler_says_why_and_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compilers, "COMPILERS", [missing_row("one"), missing_row("two")])
    with pytest.raises(jit.CompilerNotFound) as caught:
        jit.compile(ADD)
    assert str(caught.value).splitlines() == [
        "no compiler for cuda code of sm_90:",
        "  one: one is not here. Install the package of one.",
        "  two: two is not here. Install the package of two.",
    ]


def test_a_filled_cache_serves_where_there_is_no_compiler(fake: FakeCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    jit.compile(ADD)
    jit.forget()
    monkeypatch.setattr(compilers, "COMPILERS", [missing_row("one")])
    assert jit.compile(ADD) == MAGIC + b"kernel add"


def test_the_first_compiler_that_is_there_is_taken(fake: FakeCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compilers, "COMPILERS", [missing_row("one"), fake.row()])
    assert jit.compile(ADD) == MAGIC + b"kernel add"
    assert jit.compile(ADD, compiler="fake") == MAGIC + b"kernel add"
    with pytest.raises(ValueError, match="compiler='three': target cuda has one, fake"):
        jit.compile(ADD, compiler="three")
    with pytest.raises(jit.CompilerNotFound, match="one is not here"):
        jit.compile(jit.Spec("other", "kernel other"), compiler="one")


def test_sources_that_change_meanwhile_are_read_again(fake: FakeCompiler, tmp_path: Path) -> None:
    header = tmp_path / "x.hpp"
    header.write_text("old")
    spec = jit.Spec("k", '#include "x.hpp"', include_dirs=(tmp_path,))
    fake.during = lambda: header.write_text("new")
    jit.compile(spec)
    assert fake.calls == 2
    jit.forget()
    jit.compile(spec)
    assert fake.calls == 2
    header.write_text("old")
    jit.forget()
    jit.compile(spec)
    assert fake.calls == 3  # what came of the half-edited source was not stored under the old one's key

    fake.during = lambda: header.write_text(header.read_text() + "x")
    jit.forget()
    with pytest.raises(jit.CompileError, match="changed during each of 3"):
        jit.compile(jit.Spec("other", '#include "x.hpp"', include_dirs=(tmp_path,)))


def test_a_mistake_that_is_corrected_meanwhile_is_none(fake: FakeCompiler, tmp_path: Path) -> None:
    source = tmp_path / "k.cu"
    source.write_text("half a mistake")
    fake.during = lambda: source.write_text("kernel k")
    # The compiler is handed the text as it was read, so its first answer is about the old one.
    assert jit.compile(jit.Spec("k", source, kernels=("k",))) == MAGIC + b"kernel k"
    assert fake.calls == 2


def test_threads_share_one_compilation(fake: FakeCompiler) -> None:
    inside, go_on = threading.Event(), threading.Event()
    fake.during = lambda: (inside.set(), go_on.wait(60))
    with ThreadPoolExecutor(4) as threads:
        results = [threads.submit(jit.compile, ADD) for _ in range(4)]
        assert inside.wait(60)
        go_on.set()
        assert {result.result(60) for result in results} == {MAGIC + b"kernel add"}
    assert fake.calls == 1


def test_a_forked_child_does_not_wait_for_a_thread_it_lacks(fake: FakeCompiler) -> None:
    inside, go_on = threading.Event(), threading.Event()
    parent = os.getpid()
    fake.during = lambda: (inside.set(), go_on.wait(60)) if os.getpid() == parent else None
    with ThreadPoolExecutor(1) as threads:
        first = threads.submit(jit.compile, ADD)
        assert inside.wait(60)
        child = os.fork()
        if child == 0:
            spec = jit.Spec("add", "kernel add", kernels=("add",))
            os.environ["MORI_JIT_CACHE_DIR"] += "-of-child"  # its parent holds the lock of the other
            os._exit(0 if jit.compile(spec) == MAGIC + b"kernel add" else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        go_on.set()
        assert first.result(60) == MAGIC + b"kernel add"
