"""Where kernels run, and what differs between such places: one table, to which every further target adds a row.

The *contract wave* is the wave width that sizes and roundings of the public API refer to. It is no statement about the
kernels: host kernels run one lane per thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from mori import archs, env

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Target:
    """`arch` names the instruction set family as rules and tuning files spell it; `device_type` is torch's word."""

    name: str
    arch: str
    device_type: str
    contract_wave: int

    def accepts(self, tensor: torch.Tensor) -> bool:
        """Whether kernels of this target can read and write the tensor's memory."""
        return tensor.device.type == self.device_type

    @property
    def is_device(self) -> bool:
        """Whether kernels run on a device of its own: calls are enqueued on streams then, not done at once."""
        return self.device_type != "cpu"


# The arch of a GPU target is the oldest that it runs on; `current` puts in that of the GPU.
TARGETS = {
    "host": Target(name="host", arch="host", device_type="cpu", contract_wave=64),
    "cuda": Target(name="cuda", arch="sm_90", device_type="cuda", contract_wave=32),
    "hip": Target(name="hip", arch="gfx942", device_type="cuda", contract_wave=64),  # "cuda" is torch's word here too
}


_assumed: ContextVar[Target | None] = ContextVar("_assumed", default=None)


def of(arch: str) -> Target:
    """The target that an arch belongs to, whether or not there is such a GPU here.

    MORI_WAVE_SIZE replaces the contract wave. ValueError: an unknown arch, or that variable is malformed.
    """
    row = archs.find(arch)
    wave = env.get("MORI_WAVE_SIZE") or row.contract_wave
    return replace(TARGETS[row.target], arch=arch, contract_wave=wave)


@contextmanager
def assume(arch: str) -> Iterator[Target]:
    """Inside, `current()` is the target of `arch`: to ask what a config would come to elsewhere.

    For configs, rules and tuning tables; ops that are built inside would look for kernels of the wrong arch.
    MORI_TARGET has no say inside. ValueError as in `of`.
    """
    found = of(arch)
    token = _assumed.set(found)
    try:
        yield found
    finally:
        _assumed.reset(token)


def current() -> Target:
    """The target of this process: MORI_TARGET, else "cuda" or "hip" where torch is built for it and sees a GPU, else
    "host".

    On GPU targets `arch` is that of the calling thread's current GPU. MORI_WAVE_SIZE replaces the contract wave. May
    import torch. RuntimeError: the target cannot be used here; NotImplementedError: a GPU without kernels for it.
    ValueError if either variable is malformed.
    """
    assumed = _assumed.get()
    if assumed is not None:
        return assumed
    chosen = env.get("MORI_TARGET")
    name = chosen or next((name for name, flavour in _FLAVOURS.items() if _missing(flavour) is None), "host")
    found = TARGETS[name]
    if found.is_device:
        missing = _missing(_FLAVOURS[name])
        if missing:
            raise RuntimeError(
                f"MORI_TARGET={name}, but {missing}. Unset MORI_TARGET, or set it to host to run on CPUs"
            )
        return of(_FLAVOURS[name].arch())
    return of(found.arch)


class _Flavour(NamedTuple):
    """What torch has to be like for a GPU target. `arch()` of the current GPU; NotImplementedError for others."""

    release: Callable[[], str | None]
    toolkit: str
    variable: str
    arch: Callable[[], str]


def _missing(flavour: _Flavour) -> str | None:
    """What stands in the way of a GPU target; None if nothing does."""
    import torch

    if flavour.release() is None:
        return f"torch {torch.__version__} is built without {flavour.toolkit}"
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} sees no GPU (driver, container, {flavour.variable})"
    return None


def _cuda_release() -> str | None:
    import torch

    return torch.version.cuda


def _hip_release() -> str | None:
    import torch

    return torch.version.hip


def _cuda_arch() -> str:
    import torch

    major, minor = torch.cuda.get_device_capability()
    if (major, minor) < (9, 0):
        raise NotImplementedError(
            f"GPU {torch.cuda.current_device()} ({torch.cuda.get_device_name()}) has compute capability "
            f"{major}.{minor}; the cuda target needs 9.0 or later. MORI_TARGET=host runs on CPUs"
        )
    return f"sm_{major}{minor}"


def _hip_arch() -> str:
    import torch

    device = torch.cuda.current_device()
    arch = str(torch.cuda.get_device_properties(device).gcnArchName).partition(":")[0]  # features follow
    known = [name for name, row in archs.ARCHS.items() if row.target == "hip"]
    if arch not in known:
        raise NotImplementedError(
            f"GPU {device} ({torch.cuda.get_device_name()}) is {arch}; the hip target has kernels for "
            f"{', '.join(known)}. MORI_TARGET=host runs on CPUs"
        )
    return arch


_FLAVOURS = {
    "cuda": _Flavour(_cuda_release, "CUDA", "CUDA_VISIBLE_DEVICES", _cuda_arch),
    "hip": _Flavour(_hip_release, "ROCm", "HIP_VISIBLE_DEVICES", _hip_arch),
}
