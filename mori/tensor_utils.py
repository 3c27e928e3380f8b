"""Tensors over memory that somebody else owns."""

from __future__ import annotations

import contextlib
import ctypes
import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.utils.dlpack

from mori import target

# Numbers by which native code names element types.
_DTYPE_NUMBERS = {
    "float32": 0,
    "bfloat16": 1,
    "float8_e4m3fn": 2,
    "float8_e4m3fnuz": 3,
    "int32": 4,
    "float4_e2m1fn_x2": 5,
}


def dtype_to_int(dtype: torch.dtype) -> int:
    """Native number of an element type; ValueError for a type without one."""
    name = str(dtype).removeprefix("torch.")
    if name not in _DTYPE_NUMBERS:
        raise ValueError(f"Unsupported dtype {dtype}; known: {', '.join(_DTYPE_NUMBERS)}")
    return _DTYPE_NUMBERS[name]


def from_gpu_ptr(ptr: int, shape: Sequence[int], dtype: torch.dtype, framework: str = "torch") -> torch.Tensor:
    """A contiguous tensor over `shape` elements at address `ptr`, without copy and without ownership.

    The memory must outlive the tensor: nothing keeps it alive. `ptr` is memory that the current GPU reaches on GPU
    targets, host memory else.
    ValueError: a null pointer for a shape with elements, or a framework other than "torch".
    """
    if framework != "torch":
        raise ValueError(f"framework {framework!r} is not supported: mori makes torch tensors only")
    shape = tuple(shape)
    nbytes = math.prod(shape) * dtype.itemsize
    here = target.current()
    if nbytes == 0:
        return torch.empty(shape, dtype=dtype, device=here.device_type)
    if not ptr:
        raise ValueError(f"null pointer for a tensor of shape {shape}")
    if here.is_device:
        from mori import _core

        raw = torch.utils.dlpack.from_dlpack(_core.gpu_memory(here.name, ptr, nbytes, torch.cuda.current_device()))
        return raw.view(dtype).view(shape)
    memory = (ctypes.c_uint8 * nbytes).from_address(ptr)
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).view(shape)


def on_stream(stream: int) -> contextlib.AbstractContextManager[Any]:
    """Within it torch works on the stream of that handle (0: the default one); no effect on CPUs."""
    if not target.current().is_device:
        return contextlib.nullcontext()
    return torch.cuda.stream(torch.cuda.ExternalStream(stream) if stream else torch.cuda.default_stream())


class GpuTensorView:
    """Raw memory as an object that array libraries understand: through DLPack, and on GPUs through
    `__cuda_array_interface__`. As `from_gpu_ptr`, it owns nothing."""

    def __init__(self, ptr: int, shape: Sequence[int], dtype: torch.dtype) -> None:
        self.ptr = ptr
        self.shape = tuple(shape)
        self.dtype = dtype
        self._tensor = from_gpu_ptr(ptr, self.shape, dtype)

    def __dlpack__(self, **options: Any) -> Any:
        return self._tensor.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self._tensor.__dlpack_device__()

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """Version 2: whoever reads it sees to the order of streams. Element types that numpy does not have (bf16, fp8,
        fp4) appear as unsigned integers of their size. AttributeError for host memory, as the protocol wants it."""
        if self._tensor.device.type == "cpu":
            raise AttributeError("host memory has no __cuda_array_interface__: use DLPack")
        return {"shape": self.shape, "typestr": _typestr(self.dtype), "data": (self.ptr, False), "version": 2}


def _typestr(dtype: torch.dtype) -> str:
    try:
        return torch.empty(0, dtype=dtype).numpy().dtype.str
    except TypeError:
        return "|u1" if dtype.itemsize == 1 else f"<u{dtype.itemsize}"


def gpu_tensor_view(ptr: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """As `from_gpu_ptr` for torch."""
    return from_gpu_ptr(ptr, shape, dtype)
