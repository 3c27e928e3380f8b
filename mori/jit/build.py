"""From a spec to a binary: out of this process's memory, the cache on disk, or a compiler, whichever is first."""

from __future__ import annotations

import os
import shlex
import sys
import tempfile
import threading
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from mori import env
from mori._version import __version__
from mori.jit import compilers, locks
from mori.jit.cache import Cache, folder, open_cache
from mori.jit.compilers import Row
from mori.jit.errors import CompilationDisabled, CompileError, CompilerNotFound
from mori.jit.job import Job, overrides, resolve
from mori.jit.spec import TARGETS, Spec
from mori.jit.toolchain import Compiler

# After this long with another process at work on the same code, it is compiled here too.
LOCK_LIMIT_S = 300.0
_ATTEMPTS = 3

_memory: dict[tuple[Any, ...], Future[bytes]] = {}
_mutex = threading.Lock()


class _SourcesChanged(Exception):
    """A file was edited while the compiler read it: whatever came out belongs to no key."""


def compile(spec: Spec, *, compiler: str | None = None) -> bytes:
    """The code object of `spec`, a cubin on cuda: complete and with every kernel that the spec names.

    A second call with an equal spec is a dictionary lookup, threads that ask at the same time share one compilation,
    and so do processes with a common cache. Sources and the compiler are looked at once per process (`forget` undoes
    that); MORI_JIT_ARCH, MORI_JIT_EXTRA_FLAGS and MORI_SOURCE_ROOT are looked at in each call. `compiler` names the
    one row of `compilers.COMPILERS` to use; by default it is the first that can be used.

    Raises CompileError, CompilerNotFound (a cache filled by any compiler of the same inputs is good enough before it
    comes to that), CompilationDisabled, SourcesNotFound, and ValueError for malformed variables.
    """
    wanted = (spec, compiler, *overrides())
    with _mutex:
        future = _memory.get(wanted)
        ours = future is None
        if future is None:
            future = _memory[wanted] = Future()
    if ours:
        try:
            future.set_result(_build(spec, compiler))
        except BaseException as error:
            with _mutex:
                _memory.pop(wanted, None)
            future.set_exception(error)
            raise
    return future.result()


def forget() -> None:
    """Makes the next `compile` of anything look at the sources again, and at the cache on disk."""
    with _mutex:
        _memory.clear()


def _start_afresh() -> None:
    # A forked child has no thread that would ever finish what the parent was compiling.
    global _mutex
    _mutex = threading.Lock()
    _memory.clear()


os.register_at_fork(after_in_child=_start_afresh)


def _build(spec: Spec, only: str | None) -> bytes:
    for _ in range(_ATTEMPTS):
        job = resolve(spec)
        try:
            return _fetch(job, only)
        except _SourcesChanged:
            continue
    raise CompileError(
        f"the sources of {spec.name} changed during each of {_ATTEMPTS} compilations: compile again when they rest",
        source_name=job.source_name,
    )


def _fetch(job: Job, only: str | None) -> bytes:
    cache = open_cache()
    if env.get("MORI_DISABLE_JIT"):
        return _from_cache_alone(job, cache)
    try:
        row, compiler = compilers.choose(job.spec.target, job.arch, only)
    except CompilerNotFound:
        binary = cache.load_any(job.inputs) if cache else None
        if binary is None:
            raise
        return binary
    if cache is None:
        return _make(job, row, compiler)
    key = job.key(compiler)
    binary = cache.load(key)
    if binary is None:
        what = f"{job.spec.name} for {job.arch}"
        with locks.held(cache.lock_path(key), what, LOCK_LIMIT_S):
            binary = cache.load(key)  # whoever held the lock before us has probably published it
            if binary is None:
                binary = _make(job, row, compiler)
                cache.store(key, binary, _meta(job, compiler))
                return binary
    _say(f"{job.spec.name} for {job.arch}: {len(binary)} bytes from {cache.path}")
    return binary


def _from_cache_alone(job: Job, cache: Cache | None) -> bytes:
    binary = cache.load_any(job.inputs) if cache else None
    if binary is None:
        raise CompilationDisabled(
            f"MORI_DISABLE_JIT is on and {folder()} does not hold {job.spec.name} for {job.arch} as these sources and "
            "flags would give it: unset MORI_DISABLE_JIT, or fill the cache with the same version of mori first"
        )
    return binary


def _make(job: Job, row: Row, compiler: Compiler) -> bytes:
    """Compiles and checks the result."""
    begin_s = time.monotonic()
    try:
        binary = compiler.compile(job)
        _check_kernels(job, row, compiler, binary)
    except CompileError as error:
        if _changed(job):
            raise _SourcesChanged from error
        if env.get("MORI_JIT_KEEP_FAILED"):
            error.kept = _keep(job, error)
        raise
    finally:
        elapsed_s = time.monotonic() - begin_s
        options = shlex.join(compiler.options(job))
        _say(f"{job.source_name} for {job.arch} by {compiler.identity} in {elapsed_s:.2f} s: {options}")
    if _changed(job):
        raise _SourcesChanged
    return binary


def _changed(job: Job) -> bool:
    return resolve(job.spec).inputs != job.inputs


def _check_kernels(job: Job, row: Row, compiler: Compiler, binary: bytes) -> None:
    details: dict[str, Any] = {
        "source_name": job.source_name,
        "compiler": compiler.identity,
        "command": compiler.options(job),
    }
    try:
        present = row.kernels_in(binary)
    except ValueError as error:
        raise CompileError(
            f"{compiler.identity} made something of {job.source_name} that is {error}", **details
        ) from error
    if missing := [kernel for kernel in job.spec.kernels if kernel not in present]:
        raise CompileError(
            f"{job.source_name} compiles, but lacks {', '.join(missing)}; "
            f"it has {', '.join(sorted(present)) or 'none'}. "
            'A kernel has its plain name as symbol when it is declared extern "C" __global__',
            **details,
        )


def _meta(job: Job, compiler: Compiler) -> dict[str, Any]:
    """For people and listings; only `key`, `bytes` and `sha256`, which the cache adds, are ever compared."""
    return {
        "name": job.spec.name,
        "target": job.spec.target,
        "arch": job.arch,
        "compiler": compiler.identity,
        "options": compiler.options(job),
        "kernels": job.spec.kernels,
        "mori": __version__,
        "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def _keep(job: Job, error: CompileError) -> str:
    """Source, log and options of a failed compilation in a new folder; "" if there is no room for them."""
    try:
        kept = Path(tempfile.mkdtemp(prefix=f"mori-jit-{job.spec.name}-"))
        (kept / f"source{TARGETS[job.spec.target].suffix}").write_text(job.text, encoding="utf-8")
        (kept / "log.txt").write_text(error.log, encoding="utf-8")
        (kept / "options.txt").write_text("\n".join(error.command) + "\n", encoding="utf-8")
        return str(kept)
    except OSError as failure:
        _say(f"files of the failed compilation are not kept: {failure}")
        return ""


def _say(what: str) -> None:
    if env.get("MORI_JIT_VERBOSE"):
        print(f"mori.jit: {what}", file=sys.stderr, flush=True)
