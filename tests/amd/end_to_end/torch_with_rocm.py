"""torch as a build with ROCm would look to the package, on a CPU build: its tensors say that they are on a GPU, and lie
in host memory, which the stand-in for the HIP runtime takes for a device's."""

from __future__ import annotations

import contextlib
import ctypes
from types import SimpleNamespace
from typing import Any

import torch
import torch.utils.dlpack
from torch.overrides import TorchFunctionMode

_HOST = torch.device("cpu")
_DEVICE_OF = torch.Tensor.device.__get__  # type: ignore[attr-defined]
_CPU_IN_DLPACK = 1


class _Gpu(TorchFunctionMode):
    """What is asked for on the GPU is made in host memory, and every tensor says to be on the current GPU. There is one
    stream, in whose order everything is: before torch does anything, launches have ended."""

    def __init__(self, driver: ctypes.CDLL) -> None:
        super().__init__()
        self.driver = driver
        self.current = 0

    def set_device(self, device: int | torch.device) -> None:
        self.current = device if isinstance(device, int) else device.index
        self.driver.hipSetDevice(self.current)

    def synchronize(self, device: Any = None) -> None:
        self.driver.hipDeviceSynchronize()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == _DEVICE_OF:
            return torch.device("cuda", self.current)
        self.synchronize()
        return func(*map(_moved, args), **{name: _moved(value) for name, value in (kwargs or {}).items()})


def _moved(value: Any) -> Any:
    return _HOST if isinstance(value, torch.device) else value


class _Managed(ctypes.Structure):
    """How DLPack's DLManagedTensor begins."""

    _fields_ = (("data", ctypes.c_void_p), ("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32))


def install(arch: str, driver: ctypes.CDLL) -> None:
    """In this thread, for the rest of the process. The default process group is to be one of gloo."""
    gpu = _Gpu(driver)
    stream = SimpleNamespace(cuda_stream=0, synchronize=gpu.synchronize)
    properties = SimpleNamespace(
        gcnArchName=f"{arch}:sramecc+:xnack-", multi_processor_count=4, name=f"simulated {arch}"
    )
    stand_ins: dict[str, Any] = {
        "is_available": lambda: True,
        "device_count": lambda: 2,
        "init": lambda: None,
        "set_device": gpu.set_device,
        "current_device": lambda: gpu.current,
        "get_device_properties": lambda device=None: properties,
        "get_device_name": lambda device=None: properties.name,
        "device": lambda device: contextlib.nullcontext(),
        "current_stream": lambda device=None: stream,
        "default_stream": lambda device=None: stream,
        "synchronize": gpu.synchronize,
    }
    for name, stand_in in stand_ins.items():
        setattr(torch.cuda, name, stand_in)
    torch.version.hip = "7.1.0"
    torch.utils.dlpack.from_dlpack = _from_dlpack
    gpu.__enter__()


def _from_dlpack(capsule: Any, original: Any = torch.utils.dlpack.from_dlpack) -> torch.Tensor:
    if type(capsule).__name__ == "PyCapsule":
        pointer = ctypes.pythonapi.PyCapsule_GetPointer
        pointer.restype, pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
        managed = _Managed.from_address(pointer(capsule, b"dltensor"))
        managed.device_type, managed.device_id = _CPU_IN_DLPACK, 0
    return original(capsule)
