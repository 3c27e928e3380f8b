"""What is to be compiled, as one value."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import NamedTuple

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}")
_MACRO = re.compile(r"[A-Za-z_]\w*")


class DeviceTarget(NamedTuple):
    """How archs of a target are written, and the usual ending of its source files."""

    arch: re.Pattern[str]
    example: str
    suffix: str


TARGETS = {
    "cuda": DeviceTarget(re.compile(r"sm_\d{2,3}[af]?"), "sm_90", ".cu"),
    "hip": DeviceTarget(re.compile(r"gfx[0-9a-f]{3,4}"), "gfx942", ".hip"),
    "host": DeviceTarget(re.compile("host"), "host", ".cpp"),
}


@dataclass(frozen=True)
class Spec:
    """Everything that the result depends on and that the caller decides. Hashable and picklable.

    `name`: letters, digits, `_`, `.` and `-`; appears in messages and listings.
    `source`: C++ text (str), or a `Path`: absolute, or relative to `sources.source_root()`.
    `kernels`: symbol names that the result must hold; write kernels `extern "C"` so that a symbol is its name.
    `target`: "cuda", "hip" or "host" (a shared object for CPUs). For hip, write `__attribute__((global))`: words like
    `__global__` are known to some compilers only.
    `include_dirs`: absolute, or relative to the source root ("." is the root itself, which a source that is a path
    below it gets as a matter of course). Only what is found there, or beside the including file, is part of the cache
    key: pass no `-I` in `flags`.
    `constants`: macro name -> int, bool (1 or 0) or str (taken as it is); kept as sorted pairs of names and texts.
    `flags`: further compiler flags, in order.

    ValueError or TypeError for what cannot be right, whatever compiler is used.
    """

    name: str
    source: str | Path
    kernels: tuple[str, ...] = ()
    include_dirs: tuple[str | Path, ...] = ()
    constants: Mapping[str, int | str] | tuple[tuple[str, str], ...] = ()
    flags: tuple[str, ...] = ()
    target: str = "cuda"
    arch: str = "sm_90"

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ValueError(f"name={self.name!r}: expected up to 64 letters, digits, '_', '.' or '-'")
        if isinstance(self.source, str) and self.source.endswith((".cu", ".hip", ".cpp", ".hpp")):
            raise ValueError(
                f"source={self.source!r} is taken as C++ text: pass pathlib.Path({self.source!r}) for a file"
            )
        if isinstance(self.source, str) and "\0" in self.source:
            raise ValueError(f"the source of {self.name} holds a NUL character, where a compiler would stop reading")
        if not isinstance(self.source, (str, PurePath)):
            raise TypeError(f"source is a {type(self.source).__name__}: expected C++ text or a pathlib.Path")
        for field in ("kernels", "include_dirs", "flags"):
            value = getattr(self, field)
            if isinstance(value, (str, PurePath)):
                raise TypeError(f"{field}={str(value)!r}: expected a tuple, ({str(value)!r},)")
            object.__setattr__(self, field, tuple(value))
        object.__setattr__(self, "constants", tuple(sorted(_constant(*pair) for pair in dict(self.constants).items())))
        check_flags(self.flags, "flags")
        check_arch(self.target, self.arch, "arch")

    @property
    def definitions(self) -> tuple[str, ...]:
        """The constants as compiler options."""
        return tuple(f"-D{name}={text}" for name, text in dict(self.constants).items())


def _constant(name: str, value: int | str) -> tuple[str, str]:
    if not _MACRO.fullmatch(name):
        raise ValueError(f"constant {name!r} is no macro name")
    if not isinstance(value, (int, str)):
        raise TypeError(f"constant {name}={value!r} is a {type(value).__name__}: expected int, bool or str")
    return name, value if isinstance(value, str) else str(int(value))


def check_arch(target: str, arch: str, where: str) -> None:
    """ValueError unless `arch`, which came from `where`, is written as archs of the target are."""
    if target not in TARGETS:
        raise ValueError(f"target={target!r}: device code is compiled for {', '.join(TARGETS)}")
    if not TARGETS[target].arch.fullmatch(arch):
        raise ValueError(f"{where}={arch!r} is no arch of target {target}: expected one like {TARGETS[target].example}")


def check_flags(flags: tuple[str, ...], where: str) -> None:
    """ValueError for a flag that brings in files that the cache would know nothing of."""
    for flag in flags:
        if re.match(r"-I|--?(include|pre-include|include-path|isystem|system-include)\b", flag):
            raise ValueError(
                f"{where} holds {flag!r}, but the cache has to see every file that goes in: "
                "name folders in Spec.include_dirs and write #include in the source"
            )
