"""Where kernels run, and what differs between such places: one table, to which every further target adds a row.

The *contract wave* is the wave width that sizes and roundings of the public API refer to. It is no statement about the
kernels: host kernels run one lane per thread.
"""

from __future__ import annotations

from dataclasses import dataclass
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


TARGETS = {"host": Target(name="host", arch="host", device_type="cpu", contract_wave=64)}


def current() -> Target:
    """The target of this process: MORI_TARGET, else "host".

    NotImplementedError for a target that this version does not have. ValueError if MORI_TARGET is malformed.
    """
    name = env.get("MORI_TARGET") or "host"
    if name not in TARGETS:
        raise NotImplementedError(
            f"MORI_TARGET={name} is not there yet: this version has {', '.join(TARGETS)}. "
            "Unset MORI_TARGET or set it to one of these"
        )
    return TARGETS[name]
