"""The two enums of the v1 API: which kernel family an op uses, and how combine packs rows for the wire."""

from __future__ import annotations

import enum


class _NativeEnum(enum.Enum):
    """Like the enums of a native module: singletons, `int()` works, `str()` is the bare name, never equal to an int."""

    def __int__(self) -> int:
        return int(self.value)

    __index__ = __int__

    def __str__(self) -> str:
        return self.name


class EpDispatchCombineKernelType(_NativeEnum):
    """Kernel family by topology and latency. Compare members with `is` or `==`."""

    IntraNode = 0
    InterNode = 1
    InterNodeV1 = 2
    InterNodeV1LL = 3
    AsyncLL = 4
    IntraNodeLL = 5


class EpDispatchCombineQuantType(_NativeEnum):
    """What combine does to rows before they travel."""

    None_ = 0
    Fp8DirectCast = 1
    Fp8BlockwiseQuant = 2
    Fp4BlockwiseQuant = 3


# Kernel families that serve one node only.
SINGLE_NODE = frozenset({EpDispatchCombineKernelType.IntraNode, EpDispatchCombineKernelType.IntraNodeLL})

QUANT_TYPE_MAP = {
    "none": EpDispatchCombineQuantType.None_,
    "fp8_direct_cast": EpDispatchCombineQuantType.Fp8DirectCast,
    "fp8_blockwise": EpDispatchCombineQuantType.Fp8BlockwiseQuant,
    "fp4_blockwise": EpDispatchCombineQuantType.Fp4BlockwiseQuant,
}
QUANT_NAMES = {member: name for name, member in QUANT_TYPE_MAP.items()}


def normalize_quant_type(quant_type: str | EpDispatchCombineQuantType) -> EpDispatchCombineQuantType:
    """The member for a string (trimmed, any case) or a member. ValueError lists the accepted strings."""
    if isinstance(quant_type, EpDispatchCombineQuantType):
        return quant_type
    member = QUANT_TYPE_MAP.get(quant_type.strip().lower()) if isinstance(quant_type, str) else None
    if member is None:
        raise ValueError(f"invalid quant_type {quant_type!r}, expected one of {list(QUANT_TYPE_MAP)}")
    return member


def normalize_kernel_type(kernel_type: EpDispatchCombineKernelType | int) -> EpDispatchCombineKernelType:
    """The member for a member or its number. ValueError lists the names."""
    try:
        return EpDispatchCombineKernelType(kernel_type)
    except ValueError:
        names = ", ".join(f"{member.name} ({member.value})" for member in EpDispatchCombineKernelType)
        raise ValueError(f"unknown kernel_type {kernel_type!r}, expected one of {names}") from None
