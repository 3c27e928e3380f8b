"""Which launch sizes a call gets: `(block_num, rdma_block_num, warp_per_block)`.

MANUAL (default): a per-call value above 0, else the config's. AUTO (`MORI_EP_LAUNCH_CONFIG_MODE=AUTO`): the table
below; per-call values are ignored. Sizes describe GPU grids; results never depend on them.
"""

from __future__ import annotations

from typing import NamedTuple

from mori import env

from .config import EpDispatchCombineConfig
from .kernel_types import EpDispatchCombineKernelType as KernelType


class Launch(NamedTuple):
    block_num: int
    rdma_block_num: int
    warp_per_block: int


_TWO_LEVEL = Launch(block_num=96, rdma_block_num=64, warp_per_block=8)
_ONE_LEVEL = Launch(block_num=128, rdma_block_num=0, warp_per_block=16)
AUTO_LAUNCH: dict[KernelType, Launch] = {
    KernelType.IntraNode: _ONE_LEVEL,
    KernelType.IntraNodeLL: _ONE_LEVEL,
    KernelType.InterNode: _ONE_LEVEL,
    KernelType.InterNodeV1: _TWO_LEVEL,
    KernelType.InterNodeV1LL: _TWO_LEVEL,
    KernelType.AsyncLL: _ONE_LEVEL,
}


def launch_mode() -> str:
    """MANUAL or AUTO; ValueError for anything else in MORI_EP_LAUNCH_CONFIG_MODE."""
    return str(env.get("MORI_EP_LAUNCH_CONFIG_MODE"))


def resolve_launch(
    config: EpDispatchCombineConfig,
    auto: Launch | None,
    block_num: int = -1,
    rdma_block_num: int = -1,
    warp_per_block: int = -1,
) -> Launch:
    """Launch sizes of one call; `auto` is the op's table entry in AUTO mode, None in MANUAL mode."""
    if auto is not None:
        return auto
    return Launch(
        block_num if block_num > 0 else config.block_num,
        rdma_block_num if rdma_block_num > 0 else config.rdma_block_num,
        warp_per_block if warp_per_block > 0 else config.warp_num_per_block,
    )
