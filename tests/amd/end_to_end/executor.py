"""Gives what the stand-in for the HIP runtime is asked to load and launch to the simulator, inside the rank's process.

Each rank simulates its own device, on the memory that its process has mapped; the other ranks do so at the same time.
"""

from __future__ import annotations

import ctypes
import gc
import hashlib
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from mori.jit import hip_clang
from mori.jit.job import Job
from tests.amd.end_to_end.host_memory import HostMemory, ProcessLock, pages
from tests.amd.sim.code_object import CodeObject, Kernel
from tests.amd.sim.machine import Code, Launch, Machine
from tests.amd.sim.memory import Memory
from tests.amd.sim.program import Program
from tests.amd.sim.toolchain import Compiled, annotate

CODE_BASE, CODE_STRIDE = 0x1_0000_0000, 0x1000_0000
MOST_INSTRUCTIONS = 50_000_000  # a rank may wait long for one that compiles
NS_PER_TICK = 10  # csrc/device/target_hip.hpp
REFUSED = 70  # exit status

_Load = ctypes.CFUNCTYPE(ctypes.c_uint64, ctypes.c_void_p)
_Find = ctypes.CFUNCTYPE(ctypes.c_uint64, ctypes.c_uint64, ctypes.c_char_p)
_Run = ctypes.CFUNCTYPE(None, ctypes.c_uint64)


class _Launch(ctypes.Structure):
    _fields_ = (
        ("arguments", ctypes.c_void_p),
        ("blocks", ctypes.c_uint32),
        ("threads", ctypes.c_uint32),
        ("scratch_bytes", ctypes.c_uint32),
    )


_Enqueue = ctypes.CFUNCTYPE(ctypes.c_uint64, ctypes.c_uint64, ctypes.POINTER(_Launch))


class _Functions(ctypes.Structure):
    _fields_ = (("load", _Load), ("find", _Find), ("enqueue", _Enqueue), ("run", _Run))


class _Range(ctypes.Structure):
    _fields_ = (("address", ctypes.c_uint64), ("bytes", ctypes.c_uint64))


class Work(NamedTuple):
    """A launch, and the tensors that may be its arguments: nothing frees them before it is done."""

    launch: Launch
    tensors: list[torch.Tensor]
    memory: list[HostMemory]


class Executor:
    """`driver`: the stand-in. `folder` is common to all ranks: a lock, and the assembly of code objects."""

    def __init__(self, driver: Path, folder: Path, seed: int) -> None:
        self.driver = ctypes.CDLL(str(driver))  # the package finds it by its name from now on
        self.driver.fake_driver_mapped.restype = ctypes.c_size_t
        self._lock = ProcessLock(folder / "memory.lock")
        self._folder = folder
        self._seed = seed
        self._codes: list[Code] = []
        self._functions: list[tuple[Code, Kernel]] = []
        self._works: list[Work | None] = []
        self.executed = 0
        """Instructions, by all launches so far."""
        keep_assembly(folder)
        self._table = _Functions(
            _Load(_or_exit(self._load)),
            _Find(_or_exit(self._find)),
            _Enqueue(_or_exit(self._enqueue)),
            _Run(_or_exit(self._run)),
        )
        self.driver.fake_driver_use(ctypes.byref(self._table))

    # What the driver calls. Numbers that it gets are positions plus one.

    def _load(self, image: int) -> int:
        binary = _code_object_at(image)
        assembly = (self._folder / assembly_name(binary)).read_text(encoding="utf-8")
        listing = annotate(assembly, CodeObject(binary).arch)
        compiled = Compiled(binary, listing)
        self._codes.append(Code(Program(compiled, CODE_BASE + CODE_STRIDE * len(self._codes))))
        return len(self._codes)

    def _find(self, module: int, name: bytes) -> int:
        code = self._codes[module - 1]
        kernel = code.program.kernels.get(name.decode())
        if kernel is None:
            return 0
        self._functions.append((code, kernel))
        return len(self._functions)

    def _enqueue(self, function: int, given: Any) -> int:
        code, kernel = self._functions[function - 1]
        launch = given.contents
        arguments = ctypes.string_at(launch.arguments, kernel.argument_bytes)
        tensors = living_tensors()
        self._works.append(
            Work(
                Launch(code, kernel.name, launch.blocks, launch.threads, arguments, launch.scratch_bytes),
                tensors,
                self._reachable(tensors),
            )
        )
        return len(self._works)

    def _run(self, number: int) -> None:
        work, self._works[number - 1] = self._works[number - 1], None
        assert work is not None
        memory = Memory()
        for arena in work.memory:
            memory.add(arena)
        # The others are on clocks of their own, so it is time that they have in common.
        machine = Machine(memory, self._seed + number, clock=lambda: time.monotonic_ns() // NS_PER_TICK)
        self.executed += machine.run([work.launch], most_instructions=MOST_INSTRUCTIONS)

    def _reachable(self, tensors: list[torch.Tensor]) -> list[HostMemory]:
        count = self.driver.fake_driver_mapped(None, 0)
        ranges = (_Range * count)()
        self.driver.fake_driver_mapped(ranges, count)
        mapped = [(one.address, one.bytes) for one in ranges]
        found = [page for address, size in mapped for page in pages("mapped memory", address, size, self._lock)]
        with torch._C.DisableTorchFunction():
            storages = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in tensors}
        for address, size in storages.items():
            if size and not any(start <= address < start + length for start, length in mapped):
                found += pages("a tensor", address, size, self._lock)
        return found


def living_tensors() -> list[torch.Tensor]:
    """All of this process that lie in host memory: here, that is a device's too."""
    with torch._C.DisableTorchFunction():
        return [one for one in gc.get_objects() if type(one) is torch.Tensor and one.device.type == "cpu"]


def keep_assembly(folder: Path) -> None:
    """Makes ziglang's clang leave behind what it assembles, in this process from now on: there is no disassembler."""
    command = hip_clang.ZigClang.command

    def keeping(self: hip_clang.ZigClang, job: Job, source: Path, output: Path, used: Path) -> list[str]:
        kept = f"{folder}/$(sha256sum < {output} | cut -c-64).s"
        script = f'"$@" -save-temps=obj && cp {used}/*.s {kept}'
        return ["/bin/sh", "-c", script, "sh", *command(self, job, source, output, used)]

    hip_clang.ZigClang.command = keeping  # type: ignore[method-assign]


def assembly_name(binary: bytes) -> str:
    return f"{hashlib.sha256(binary).hexdigest()}.s"


def _code_object_at(image: int) -> bytes:
    """An ELF file ends with its section headers."""
    header = ctypes.string_at(image, 64)
    table, entry, count = (int.from_bytes(header[at:end], "little") for at, end in ((40, 48), (58, 60), (60, 62)))
    return ctypes.string_at(image, table + entry * count)


def _or_exit(function: Callable[..., Any]) -> Callable[..., Any]:
    """No exception leaves a callback, so the process ends: its peers take notice of that as of any death."""

    def guarded(*arguments: Any) -> Any:
        try:
            return function(*arguments)
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(REFUSED)

    return guarded
