"""What can go wrong when device code is compiled. All are `MoriError`s; attributes survive pickling."""

from __future__ import annotations

from collections.abc import Iterable

from mori.errors import MoriError

# Compilers repeat one mistake once per template instantiation; the message keeps the first, `log` has all.
_LOG_CHARACTERS_SHOWN = 6000


class CompileError(MoriError):
    """A compiler refused the source, or its result lacks a kernel that the spec names.

    `source_name` is the spec's name or the path of its source, `compiler` who refused, `command` the options it was
    given (for nvcc the whole command line), `log` all it said. `kept` is the folder with the files of the failed
    compilation when MORI_JIT_KEEP_FAILED is on, else "".
    """

    def __init__(
        self,
        message: str = "",
        *,
        source_name: str = "",
        compiler: str = "",
        command: Iterable[str] = (),
        log: str = "",
    ) -> None:
        self.source_name = source_name
        self.compiler = compiler
        self.command = tuple(command)
        self.log = log
        self.kept = ""
        super().__init__(message or f"{compiler} cannot compile {source_name}")

    def __str__(self) -> str:
        parts = [super().__str__(), self.log.strip()[:_LOG_CHARACTERS_SHOWN]]
        if self.command:
            parts.append("options: " + " ".join(self.command))
        if self.kept:
            parts.append(f"its files are in {self.kept}")
        return "\n".join(part for part in parts if part)


class CompilerNotFound(MoriError):
    """No compiler for this target and arch; the message says where it was looked for and what to install."""


class CompilationDisabled(MoriError):
    """MORI_DISABLE_JIT is on and the cache does not hold what was asked for."""


class SourcesNotFound(MoriError, FileNotFoundError):
    """The device sources are not where they should be; the message says where, and names MORI_SOURCE_ROOT."""


class CacheWarning(RuntimeWarning):
    """The cache of device code cannot be used, or not be written; compilation works without it."""
