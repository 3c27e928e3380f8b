"""How an op comes into being and goes: agreement on the config, symmetric memory, the plan over it."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, NamedTuple

from mori import env
from mori.shmem import state as shmem_state

from . import kernels
from .config import EpDispatchCombineConfig, Limits, agreed_fields
from .kernel_types import EpDispatchCombineKernelType

if TYPE_CHECKING:
    from mori.cco.resources import AllocatedMemory

    from .engine import EpPlan, EpShape


class OpMemory(NamedTuple):
    """What an op holds. `registered`: [begin, end) addresses of the registered combine buffer."""

    session: shmem_state.Session
    plan: EpPlan
    allocation: AllocatedMemory
    registered: tuple[int, int]


def build(config: EpDispatchCombineConfig, limits: Limits) -> OpMemory:
    """Collective: agree on the config, get symmetric memory for its layout and a plan over it. Unwinds on errors."""
    session = shmem_state.current()
    made_for = session.arguments
    if (limits.rank, limits.world_size) != (made_for.rank, made_for.nranks):
        raise ValueError(
            f"EpDispatchCombineConfig has rank {limits.rank} of world_size {limits.world_size}, but mori.shmem was "
            f"initialised as rank {made_for.rank} of {made_for.nranks}: they must be equal"
        )
    from . import engine

    if env.get("MORI_ENABLE_SDMA"):
        warnings.warn("MORI_ENABLE_SDMA has no effect: mori moves rows by kernels only", RuntimeWarning, stacklevel=4)
    path = _dispatch_path()
    shape = shape_of(config, limits)
    agreed = agreed_fields(config, limits) | {"MORI_EP_PATH": path, "MORI_FP8_COMBINE_SCALE_DIM": shape.block_scales}
    layout = engine.layout(shape)
    allocation = session.communicator.allocate_symmetric(layout.total_bytes, what="EpDispatchCombineOp", agree=agreed)
    try:
        plan = engine.EpPlan(shape, session.communicator, allocation, kernels.initial(config, limits))
        plan.set_path(path)
    except BaseException:
        allocation.close()
        raise

    registered = layout.region("combine_in_rows")
    begin = allocation.ptr + registered.offset
    return OpMemory(session, plan, allocation, registered=(begin, begin + registered.bytes))


def shape_of(config: EpDispatchCombineConfig, limits: Limits) -> EpShape:
    """What the memory and the kernels of an op with this config are made for."""
    from .engine import EpShape  # the native core, not needed before the first op

    return EpShape(
        world_size=limits.world_size,
        rank=limits.rank,
        max_tokens=limits.max_tokens,
        hidden_dim=limits.hidden_dim,
        max_element_bytes=int(config.max_token_type_size),
        scale_dim=limits.scale_dim,
        scale_element_bytes=limits.scale_type_size,
        experts_per_rank=limits.experts_per_rank,
        topk=limits.topk,
        max_recv_tokens=limits.receive_rows,
        may_stage=_dispatch_path() != "direct" or limits.kernel_type is EpDispatchCombineKernelType.AsyncLL,
        block_scales=int(env.get("MORI_FP8_COMBINE_SCALE_DIM")) if kernels.is_blockwise(limits) else 0,
    )


def _dispatch_path() -> str:
    return env.get("MORI_EP_PATH") or "direct"


def release(plan: EpPlan, allocation: AllocatedMemory) -> None:
    """Marks the memory free; the communicator takes it back inside a later collective call."""
    plan.close()
    allocation.close()
