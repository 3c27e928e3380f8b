"""Where kernels run, and what differs between such places: one table, to which every further target adds a row.

The *contract wave* is the wave width that sizes and roundings of the public API refer to. It is no statement about the
kernels: host kernels run one lane per thread.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from mori import env

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
}


def current() -> Target:
    """The target of this process: MORI_TARGET, else "cuda" where torch is built with CUDA and sees a GPU, else "host".

    On cuda, `arch` is that of the calling thread's current GPU. MORI_WAVE_SIZE replaces the contract wave. May import
    torch. RuntimeError: cuda cannot be used here; NotImplementedError: a target that this version does not have, or a
    GPU older than sm_90. ValueError if either variable is malformed.
    """
    chosen = env.get("MORI_TARGET")
    name = chosen or ("cuda" if _missing_for_cuda() is None else "host")
    if name not in TARGETS:
        raise NotImplementedError(
            f"MORI_TARGET={name} is not there yet: this version has {', '.join(TARGETS)}. "
            "Unset MORI_TARGET or set it to one of these"
        )
    found = TARGETS[name]
    if found.is_device:
        missing = _missing_for_cuda()
        if missing:
            raise RuntimeError(f"MORI_TARGET=cuda, but {missing}. Unset MORI_TARGET, or set it to host to run on CPUs")
        found = replace(found, arch=_cuda_arch())
    return replace(found, contract_wave=env.get("MORI_WAVE_SIZE") or found.contract_wave)


def _missing_for_cuda() -> str | None:
    """What stands in the way of the cuda target; None if nothing does."""
    import torch

    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} sees no GPU (driver, container, CUDA_VISIBLE_DEVICES)"
    return None


def _cuda_arch() -> str:
    import torch

    major, minor = torch.cuda.get_device_capability()
    if (major, minor) < (9, 0):
        raise NotImplementedError(
            f"GPU {torch.cuda.current_device()} ({torch.cuda.get_device_name()}) has compute capability "
            f"{major}.{minor}; the cuda target needs 9.0 or later. MORI_TARGET=host runs on CPUs"
        )
    return f"sm_{major}{minor}"
