"""One kernel: from C++ to something that can be launched."""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from mori import _core, jit

if TYPE_CHECKING:
    from mori.cco.communicator import Communicator


class Kernel:
    """What `compile` returns. It stays loaded until the process ends."""

    def __init__(self, name: str, device: torch.device, enqueue: Callable[[bytes, int, int, int], None]) -> None:
        self.name = name
        self.device = device
        self._enqueue = enqueue

    def launch(
        self, arguments: ctypes.Structure, *, blocks: int = 1, threads: int = 256, stream: int | None = None
    ) -> None:
        """Run the kernel on `blocks` blocks of `threads` threads; `arguments` are its struct, laid out as in C++.

        On a GPU the launch is enqueued on `stream` (a raw handle; None: torch's current stream on the device) and the
        arguments are copied first. Blocks that wait for blocks of other ranks must all find room at once: launch no
        more than the GPU has multiprocessors. `threads` is a multiple of the wave width where warps take part in
        something. On CPUs every block is one thread, `threads` and `stream` have no effect,
        and the call returns when all blocks have.
        ValueError for sizes that no launch can have; RuntimeError with the driver's words if it refuses.
        """
        if blocks < 1 or not 1 <= threads <= 1024:
            raise ValueError(f"{self.name}: {blocks} blocks of {threads} threads; at least 1, and at most 1024 threads")
        if stream is None:
            stream = 0 if self.device.type == "cpu" else torch.cuda.current_stream(self.device).cuda_stream
        self._enqueue(bytes(arguments), blocks, threads, stream)


def compile(
    source: str | Path,
    kernel: str,
    communicator: Communicator,
    *,
    include_dirs: tuple[str | Path, ...] = (),
    constants: Mapping[str, int | str] | None = None,
) -> Kernel:
    """The kernel that `CCO_KERNEL(kernel, ...)` defines in `source` (C++ text, or an absolute Path).

    It is compiled for the device of `communicator`, and for the release of mori that runs.
    Results are kept on disk as all of mori.jit's are, so processes of one machine compile once. `include_dirs` are
    absolute and come before the folder of `mori/cco.hpp`; `constants` become macros. On CPUs a C++ compiler is needed.
    Not collective. Errors are those of `mori.jit.compile`: CompileError holds the compiler's log.
    """
    here = communicator.target
    spec = jit.Spec(
        kernel,
        source,
        kernels=(kernel,),
        include_dirs=(*include_dirs, "include", "."),
        constants={**(constants or {}), "MORI_CCO_LIBRARY_VERSION": _core.CCO_VERSION},
        target=here.name,
        arch=here.arch,
    )
    code = jit.compile(spec)
    if here.is_device:
        function = _loaded(here.name, communicator.device.index, kernel, code)
        enqueue = functools.partial(_enqueue_on_gpu, here.name, communicator.device.index, function)
    else:
        enqueue = functools.partial(_run_on_cpu, getattr(_library(code), kernel))
    return Kernel(kernel, communicator.device, enqueue)


# What is compiled again is not loaded again.
_loaded = functools.cache(_core.gpu_function)


def _enqueue_on_gpu(
    api: str, ordinal: int, function: int, arguments: bytes, blocks: int, threads: int, stream: int
) -> None:
    _core.gpu_launch(api, ordinal, function, blocks, threads, 0, stream, arguments)


def _run_on_cpu(
    function: Callable[[bytes, int, int], None], arguments: bytes, blocks: int, threads: int, stream: int
) -> None:
    if blocks == 1:
        function(arguments, 0, 1)
        return
    # A thread for each, for blocks wait for those of other ranks. ctypes lets go of the interpreter meanwhile.
    with ThreadPoolExecutor(blocks) as pool:
        for future in [pool.submit(function, arguments, block, blocks) for block in range(blocks)]:
            future.result()


@functools.cache
def _library(code: bytes) -> ctypes.CDLL:
    """The loader wants a file; one without a name leaves nothing behind.

    It knows what it has loaded by the path, so the descriptor stays open: no other library can get its number.
    """
    descriptor = os.memfd_create("mori-kernel", os.MFD_CLOEXEC)
    os.write(descriptor, code)
    return ctypes.CDLL(f"/proc/self/fd/{descriptor}")
