"""A spec with everything looked up: the environment's say, the source text, the headers, and a hash over all of it."""

from __future__ import annotations

import hashlib
import json
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mori import env
from mori._version import __version__
from mori.jit import sources
from mori.jit.errors import SourcesNotFound
from mori.jit.spec import Spec, check_arch, check_flags
from mori.jit.toolchain import Compiler

# Raised when entries of older versions of the cache must not be found any more.
_FORMAT = 1


@dataclass(frozen=True)
class Job:
    """`path` is where `text` comes from, None for text given as such. `inputs` is a SHA-256 over everything but the
    compiler: the same inputs under two compilers are two entries of the cache."""

    spec: Spec
    arch: str
    text: str
    path: Path | None
    include_dirs: tuple[Path, ...]
    flags: tuple[str, ...]
    inputs: str

    @property
    def source_name(self) -> str:
        return str(self.path) if self.path else self.spec.name

    def key(self, compiler: Compiler) -> str:
        """The name of the cache entry: SHA-256 of the inputs, then of the compiler and its options."""
        return f"{self.inputs}-{_sha256([compiler.identity, *compiler.options(self)])[:32]}"


def overrides() -> tuple[Any, ...]:
    """What the environment adds to a spec."""
    return env.get("MORI_JIT_ARCH"), env.get("MORI_JIT_EXTRA_FLAGS"), env.get("MORI_SOURCE_ROOT")


def resolve(spec: Spec) -> Job:
    """Reads the source and its headers. SourcesNotFound for a file that is not there; ValueError for a malformed
    MORI_JIT_ARCH or MORI_JIT_EXTRA_FLAGS."""
    arch = env.get("MORI_JIT_ARCH") or spec.arch
    check_arch(spec.target, arch, "MORI_JIT_ARCH")
    extra = _extra_flags()
    include_dirs = [_below_root(folder) for folder in spec.include_dirs]
    text, path = spec.source, None
    if isinstance(text, Path):
        path = _below_root(text)
        if not path.is_file():
            raise SourcesNotFound(f"{spec.name}: the source {path} does not exist")
        if not text.is_absolute():
            include_dirs.append(sources.source_root())
        text = path.read_text(encoding="utf-8")
    reached = sources.headers(text, path.parent if path else None, tuple(include_dirs))
    flags = spec.flags + extra
    inputs = _sha256(
        [_FORMAT, __version__, spec.name, spec.target, arch, spec.kernels, spec.definitions, flags, text, reached]
    )
    return Job(spec, arch, text, path, tuple(dict.fromkeys(include_dirs)), flags, inputs)


def _extra_flags() -> tuple[str, ...]:
    text = env.get("MORI_JIT_EXTRA_FLAGS") or ""
    try:
        flags = tuple(shlex.split(text))
    except ValueError as error:
        raise ValueError(f"MORI_JIT_EXTRA_FLAGS={text!r} cannot be split into flags: {error}") from None
    check_flags(flags, "MORI_JIT_EXTRA_FLAGS")
    return flags


def _below_root(path: str | Path) -> Path:
    """Absolute; only a relative path needs the source root, so text compiles where there are no sources."""
    return Path(path) if Path(path).is_absolute() else (sources.source_root() / path).resolve()


def _sha256(parts: list[Any]) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()
