"""Compilers that are libraries, through ctypes. Those of NVIDIA and AMD have one interface but for the names."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

from mori.jit.errors import CompileError
from mori.jit.job import Job


class RuntimeCompiler:
    """One loaded library. `prefix` is what its functions' names begin with, `product` what they call the binary."""

    prefix: str
    product: str

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self._function("GetErrorString").restype = ctypes.c_char_p
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._call("Version", ctypes.byref(major), ctypes.byref(minor))
        self.version = major.value, minor.value
        self.path = _path_of(ctypes.cast(self._function("Version"), ctypes.c_void_p).value or 0)
        # The version that it reports stops short of the patch level; the size of the file tells those apart.
        self.identity = f"{self.prefix} {major.value}.{minor.value} ({os.path.getsize(self.path)} bytes)"

    def options(self, job: Job) -> list[str]:
        raise NotImplementedError

    def includes(self, job: Job) -> list[str]:
        raise NotImplementedError

    def name_of(self, job: Job) -> Path:
        """What the program is called in messages; it may be where quoted headers are looked for first."""
        raise NotImplementedError

    def compile(self, job: Job) -> bytes:
        program = ctypes.c_void_p()
        text, label = job.text.encode(), os.fsencode(self.name_of(job))
        self._call("CreateProgram", ctypes.byref(program), text, label, 0, None, None)
        try:
            options = [*self.options(job), *self.includes(job)]
            encoded = (ctypes.c_char_p * len(options))(*map(os.fsencode, options))
            status = self._function("CompileProgram")(program, len(options), encoded)
            if status:
                log = self._fetch("ProgramLog", program).rstrip(b"\0").decode(errors="replace")
                raise CompileError(
                    f"{self.identity} cannot compile {job.source_name} for {job.arch}: {self._meaning(status)}",
                    source_name=job.source_name,
                    compiler=self.identity,
                    command=options,
                    log=log,
                )
            return self._fetch(self.product, program)
        finally:
            self._function("DestroyProgram")(ctypes.byref(program))

    def _fetch(self, what: str, program: ctypes.c_void_p) -> bytes:
        size = ctypes.c_size_t()
        self._call(f"Get{what}Size", program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        self._call(f"Get{what}", program, buffer)
        return buffer.raw

    def _meaning(self, status: int) -> str:
        return str(self._function("GetErrorString")(status).decode())

    def _function(self, name: str) -> ctypes._CFuncPtr:  # type: ignore[name-defined]
        return getattr(self._library, self.prefix + name)

    def _call(self, name: str, *arguments: object) -> None:
        status = self._function(name)(*arguments)
        if status:
            raise CompileError(f"{self.prefix}{name} failed: {self._meaning(status)}", compiler=self.prefix)


def _path_of(function: int) -> str:
    """The file that a function was loaded from, which a bare name does not tell."""
    with open("/proc/self/maps", encoding="utf-8") as maps:
        for line in maps:
            low, high = (int(end, 16) for end in line.split(maxsplit=1)[0].split("-"))
            if low <= function < high:
                return line.split(maxsplit=5)[5].rstrip("\n")
    raise OSError("a loaded compiler is backed by no file")
