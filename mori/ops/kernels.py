"""Which kernel a call runs, by its dtype and the op's quantisation. Names are those of csrc/kernels/table.hpp."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from .dtypes import DTYPE_SUFFIX
from .kernel_types import QUANT_NAMES
from .kernel_types import EpDispatchCombineKernelType as KernelType
from .kernel_types import EpDispatchCombineQuantType as QuantType

if TYPE_CHECKING:
    from .config import EpDispatchCombineConfig, Limits

# Where block-wise quantisation is offered, as in other releases; a direct cast is offered everywhere.
_SLOTTED = frozenset({KernelType.IntraNode, KernelType.IntraNodeLL})
BLOCKWISE_KERNEL_TYPES: dict[QuantType, frozenset[KernelType]] = {
    QuantType.Fp8BlockwiseQuant: _SLOTTED | {KernelType.AsyncLL},
    QuantType.Fp4BlockwiseQuant: _SLOTTED,
}


def is_blockwise(limits: Limits) -> bool:
    """Whether combines of an op may send scales."""
    return limits.kernel_type in BLOCKWISE_KERNEL_TYPES.get(limits.quant_type, ())


def spell(kernel_types: frozenset[KernelType]) -> str:
    """ "IntraNode/IntraNodeLL/AsyncLL", for messages."""
    order = (KernelType.IntraNode, KernelType.IntraNodeLL, KernelType.AsyncLL)
    return "/".join(member.name for member in order if member in kernel_types)


def combine_kernel(dtype: torch.dtype, quant_type: QuantType, zero_copy: bool) -> str:
    """A direct cast is for bf16 rows that are passed; others travel as they are."""
    if quant_type is QuantType.None_ or zero_copy or dtype != torch.bfloat16:
        return f"combine_{DTYPE_SUFFIX[dtype]}"
    return f"combine_{QUANT_NAMES[quant_type]}"


def initial(config: EpDispatchCombineConfig, limits: Limits) -> tuple[str, ...]:
    """Those that an op will most likely run: to be compiled when it is built."""
    dtype = config.data_type if config.data_type in (torch.bfloat16, torch.float32) else torch.bfloat16
    return "dispatch", combine_kernel(dtype, limits.quant_type, zero_copy=not config.use_external_inp_buf)


def released_name(limits: Limits, columns: int, block_scales: int, weighted: bool) -> str:
    """What other releases call the kernel of a block-wise combine: programs look at `op._last_combine_kernel_name`."""
    name = f"EpCombineIntraNodeKernel_bf16_nop2p_{QUANT_NAMES[limits.quant_type]}"
    block = -(-columns // block_scales)
    vectorised = limits.topk in (8, 9) and limits.world_size > 4 and columns % 512 == 0 and block in (128, 256)
    if weighted or not vectorised:
        return name
    return f"{name}_noweight_block{block}_vec8{'_top9' if limits.topk == 9 else ''}"
