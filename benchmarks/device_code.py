"""Small kernels of benchmarks and tests: compiled by mori.jit, launched through the CUDA driver on a torch stream."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import torch

from mori import jit

_MAX_DYNAMIC_SHARED_BYTES = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_STATIC_SHARED_LIMIT = 48 << 10
_SHARED_BYTES_PER_BLOCK_OPTIN = 97  # CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _check(status: int, call: str) -> None:
    if status:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(status, ctypes.byref(text))
        raise RuntimeError(f"{call} failed: {(text.value or b'unknown').decode()} ({status})")


def arch(device: torch.device | int) -> str:
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


def most_shared_bytes(ordinal: int) -> int:
    """The most shared memory that one block can have; nothing else then fits on its multiprocessor."""
    device, value = ctypes.c_int(), ctypes.c_int()
    _check(_driver().cuDeviceGet(ctypes.byref(device), ordinal), "cuDeviceGet")
    status = _driver().cuDeviceGetAttribute(ctypes.byref(value), _SHARED_BYTES_PER_BLOCK_OPTIN, device)
    _check(status, "cuDeviceGetAttribute")
    return value.value


class Kernel:
    """An `extern "C"` kernel, loaded on the current device. Its integer arguments are passed as 64 bits."""

    def __init__(
        self, name: str, source: str, symbol: str, shared_bytes: int = 0, include_dirs: tuple[str | Path, ...] = ()
    ) -> None:
        device = torch.cuda.current_device()
        torch.cuda.current_stream()  # makes torch's context of this device the current one
        torch.zeros(1, device=device)
        spec = jit.Spec(name, source=source, kernels=(symbol,), include_dirs=include_dirs, arch=arch(device))
        code = jit.compile(spec)
        module, self._function = ctypes.c_void_p(), ctypes.c_void_p()
        _check(_driver().cuModuleLoadData(ctypes.byref(module), code), "cuModuleLoadData")
        _check(
            _driver().cuModuleGetFunction(ctypes.byref(self._function), module, symbol.encode()), "cuModuleGetFunction"
        )
        self._shared_bytes = shared_bytes
        if shared_bytes > _STATIC_SHARED_LIMIT:
            status = _driver().cuFuncSetAttribute(self._function, _MAX_DYNAMIC_SHARED_BYTES, shared_bytes)
            _check(status, "cuFuncSetAttribute")

    def __call__(self, blocks: int, threads: int, *arguments: int | torch.cuda.Stream) -> None:
        """The last argument is the stream."""
        *values, stream = arguments
        assert isinstance(stream, torch.cuda.Stream)
        held = [ctypes.c_uint64(value) for value in values]  # type: ignore[arg-type]
        pointers = (ctypes.c_void_p * len(held))(*(ctypes.addressof(value) for value in held))
        status = _driver().cuLaunchKernel(
            self._function, blocks, 1, 1, threads, 1, 1, self._shared_bytes, ctypes.c_void_p(stream.cuda_stream),
            pointers, None,
        )  # fmt: skip
        _check(status, "cuLaunchKernel")


def copy_async(target: int, source: int, size_bytes: int, stream: torch.cuda.Stream) -> None:
    """A copy between addresses of any device, by a copy engine."""
    status = _driver().cuMemcpyAsync(
        ctypes.c_uint64(target),
        ctypes.c_uint64(source),
        ctypes.c_size_t(size_bytes),
        ctypes.c_void_p(stream.cuda_stream),
    )
    _check(status, "cuMemcpyAsync")
