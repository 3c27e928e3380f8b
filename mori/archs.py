"""What the kernels need to know of an instruction set: one table, the same facts that csrc/device/ has as macros."""

from __future__ import annotations

import re
from typing import NamedTuple


class Arch(NamedTuple):
    """`lanes` is the width of a wave as kernels see it, `contract_wave` the one that the public API rounds sizes to.

    `fp8`: flavours of e4m3 that rows can be added up in. `fp4`: how elements of e2m1 become numbers, None if they do
    not; rows of either kind can be moved everywhere. `block_memory_bytes`: scratch memory that a block may have.
    """

    name: str
    target: str
    lanes: int
    contract_wave: int
    fp8: frozenset[str]
    fp4: str | None
    block_memory_bytes: int | None


_BOTH, _FNUZ, _OCP = frozenset({"fnuz", "ocp"}), frozenset({"fnuz"}), frozenset({"ocp"})

ARCHS = {
    arch.name: arch
    for arch in (
        Arch("host", "host", 1, 64, _BOTH, "arithmetic", None),
        Arch("sm_90", "cuda", 32, 32, _OCP, "arithmetic", 227 << 10),
        Arch("gfx942", "hip", 64, 64, _FNUZ, None, 64 << 10),
        Arch("gfx950", "hip", 64, 64, _OCP, "instructions", 160 << 10),
        Arch("gfx1250", "hip", 32, 32, _OCP, "instructions", 320 << 10),
    )
}


def find(name: str) -> Arch:
    """The row of an arch; later NVIDIA archs are like sm_90. ValueError for one that no kernel is made for."""
    if name in ARCHS:
        return ARCHS[name]
    later = re.fullmatch(r"sm_(\d+)[af]?", name)
    if later and int(later[1]) > 90:
        return ARCHS["sm_90"]._replace(name=name)
    raise ValueError(f"arch {name!r}: there are kernels for {', '.join(ARCHS)} and later NVIDIA archs")


# What a kernel of csrc/kernels/table.hpp does arithmetic on, by a part of its name, and where it can.
_ARITHMETIC = {
    "fp8_ocp": lambda arch: "ocp" in arch.fp8,
    "fp8_fnuz": lambda arch: "fnuz" in arch.fp8,
    "fp4": lambda arch: arch.fp4 is not None,
}


def runs_on(kernel: str, arch: Arch) -> bool:
    """Whether there is a kernel of that name for the arch: a flavour that it lacks is not made up for by arithmetic."""
    return all(possible(arch) for part, possible in _ARITHMETIC.items() if part in kernel)
