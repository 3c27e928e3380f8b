"""The native kernel backend: the C++ core of mori, on AMD and NVIDIA GPUs and on CPUs. Named after its first target.

It moves rows of any supported dtype and adds up bfloat16 and float32. The protocol needs none of the barrier and signal
regions that other backends have: the control region holds all of it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from mori import _core

from ..dtypes import DTYPE_SUFFIX
from ..engine import KERNELS, NO_EXTRAS, CallExtras, CombineWork, DispatchWork, EpPlan, EpShape, dtype_code, layout
from .arguments import scale_row_bytes, scale_stride_bytes
from .config import EpDispatchCombineConfig
from .dispatch_combine_op import CombineResults, DispatchCall, EpDispatchCombineOp
from .kernel_set import KernelSet, Spec
from .routing import EpDispatchRoutingHandle
from .symm_arena import SymmArena

__all__ = ["REGION_NAMES", "EpDispatchCombineOpHip", "scale_stride_bytes", "shape_of"]

# What v2 calls the regions of the engine's layout; others keep their names.
REGION_NAMES = {
    "dispatch_rows": "disp_out",
    "dispatch_weights": "out_wts",
    "dispatch_scales": "out_scales",
    "dispatch_indices": "out_idx",
    "dispatch_source": "recv_to_src_token",
    "received_count": "total_recv",
    "combine_in_rows": "out_tok",
    "combine_rows": "combine_out",
    "combine_weights": "combine_out_weights",
    "sender_map": "token_dest_map",
}
_SUMMARY_WORDS = 4  # before the row counts of all ranks: csrc/layout/ep_layout.hpp, RoutingSummary
_RECEIVED_WORD = 1
_OPEN_GRID: Spec = (0, 0)


def shape_of(cfg: EpDispatchCombineConfig) -> EpShape:
    """What memory and kernels of an op with this config are made for."""
    return EpShape(
        world_size=cfg.world_size,
        rank=cfg.rank,
        max_tokens=cfg.max_num_inp_token_per_rank,
        hidden_dim=cfg.hidden_dim,
        max_element_bytes=max(cfg.elem_size, cfg.combine_elem_size),
        scale_dim=scale_row_bytes(cfg) // 4,
        scale_element_bytes=4,
        experts_per_rank=cfg.num_experts_per_rank,
        topk=cfg.num_experts_per_token,
        max_recv_tokens=cfg.effective_max_recv,
        slot_stride=cfg.effective_max_recv,
        source_stride=cfg.max_num_inp_token_per_rank,
    )


class _CombineCall(NamedTuple):
    """What a combine of inputs with this metadata does, without and with weights."""

    input_bytes: int
    plain: CombineWork
    weighted: CombineWork


def combine_kernel(cfg: EpDispatchCombineConfig) -> str:
    return f"combine_{DTYPE_SUFFIX[cfg.combine_dtype]}"


class EpDispatchCombineOpHip(EpDispatchCombineOp, backend="hip"):
    """See `EpDispatchCombineOp`. Beyond it: `check()` and `stats()`."""

    _plan: EpPlan | None = None

    def _regions(self, cfg: EpDispatchCombineConfig) -> list[tuple[str, int]]:
        regions = layout(shape_of(cfg)).regions
        return [(REGION_NAMES.get(region.name, region.name), region.bytes) for region in regions if region.bytes]

    def _send_map_words(self, cfg: EpDispatchCombineConfig) -> int:
        return _SUMMARY_WORDS + cfg.world_size

    def _build_kernels(self, cfg: EpDispatchCombineConfig, arena: SymmArena) -> KernelSet:
        shape = shape_of(cfg)
        self._plan = plan = EpPlan(shape, self.comm, arena.memory, ("dispatch", combine_kernel(cfg)))
        self._synchronous = plan.synchronous
        self._own_routing = CallExtras(
            sender_map=self.routing_dest_map.data_ptr(),
            received_count=self.total_recv.data_ptr(),
            summary=self._send_map.data_ptr(),
        )
        self._in_begin = arena.local_ptr("out_tok")
        self._in_end = self._in_begin + arena.size("out_tok")
        self._weights_address = self._recv_weights.data_ptr()

        def grids(specs: list[Spec]) -> dict[Spec, Spec]:
            return {spec: _OPEN_GRID if cfg.leaves_grid_open else spec for spec in specs}

        return KernelSet(
            dispatch=grids(self._dispatch_specs),
            combine=grids(self._combine_specs),
            stages_in_kernel=True,
            capabilities=frozenset({"gather", "scales"}),
        )

    def _prepare_dispatch(self, *tensors: Any) -> DispatchCall:
        call, cfg = super()._prepare_dispatch(*tensors), self.cfg
        scale_bytes = scale_row_bytes(cfg) if call.scaled else 0
        code = dtype_code(cfg.dispatch_dtype)
        work = DispatchWork(KERNELS["dispatch"], call.tokens, cfg.token_nbytes, scale_bytes, code)
        return call._replace(kernel=_launch(self._live_plan.dispatch, call.kernel, work))

    def _enqueue_dispatch(
        self, call: DispatchCall, addresses: tuple[int, ...], tensors: tuple[Any, ...], dest_map: torch.Tensor
    ) -> None:
        # The op's other map is the engine's own.
        call.kernel(addresses, extras=self._own_routing if dest_map is self.routing_dest_map else NO_EXTRAS)

    def _prepare_combine(self, input: torch.Tensor) -> _CombineCall:
        super()._prepare_combine(input)
        cfg, rows = self.cfg, input.shape[0]
        kernel, code = KERNELS[combine_kernel(cfg)], dtype_code(cfg.combine_dtype)
        plain = CombineWork(kernel, rows, 0, cfg.combine_token_nbytes, code)
        weighted = plain._replace(weight_rows=cfg.effective_max_recv)
        return _CombineCall(rows * cfg.combine_token_nbytes, plain, weighted)

    def _prepare_results(self, tokens: int) -> CombineResults:
        results = super()._prepare_results(tokens)
        launch = _launch(self._live_plan.combine, results.kernel, tokens=tokens)
        self._results[tokens] = results = results._replace(kernel=launch)
        return results

    def _enqueue_combine(
        self,
        kernel: Any,
        call: _CombineCall,
        address: int,
        input: torch.Tensor,
        routing: EpDispatchRoutingHandle,
        wants_weights: bool,
    ) -> None:
        if self._synchronous:
            self._refuse_short_input(input, routing)
        if address == self._in_begin:
            address = 0  # the rows are where the kernel would stage them
        elif address < self._in_end and address + call.input_bytes > self._in_begin:
            raise ValueError(
                "combine: input overlaps combine_in_view() but does not start at its first row: pass the view itself, "
                "its first rows, or a tensor elsewhere"
            )
        extras = self._own_routing
        if routing.disp_dest_tok_id_map is not self.routing_dest_map:
            extras = _extras_of(routing)
        weights = 0
        if wants_weights:
            kept = routing._received_weights
            weights = self._weights_address if kept is None else kept.data_ptr()
        kernel(call.weighted if wants_weights else call.plain, (address, weights), extras=extras)

    def _refuse_short_input(self, input: torch.Tensor, routing: EpDispatchRoutingHandle) -> None:
        """Where the host knows how many rows are needed without waiting; a GPU takes missing rows for zeros."""
        received = int(routing.inter_node_disp_send_map[_RECEIVED_WORD])
        if not received <= input.shape[0]:
            raise ValueError(
                f"combine: input has {input.shape[0]} rows but this rank received {received}: pass one row per "
                "received row, in that order"
            )

    def _check_handle(self, routing: EpDispatchRoutingHandle) -> None:
        super()._check_handle(routing)
        # Of a GPU the host does not know the count without waiting.
        if self.dev.type == "cpu":
            received = int(routing.inter_node_disp_send_map[_RECEIVED_WORD])
            if not 0 <= received <= self.cfg.effective_max_recv:
                raise ValueError(
                    f"routing: the handle is one of {received} received rows, this op holds "
                    f"{self.cfg.effective_max_recv}: it comes from an op with another config"
                )

    @property
    def _knows_only_captures(self) -> bool:
        return self._capturing or (self._plan is not None and self._plan.has_captured)

    def check(self) -> None:
        self._require_usable()
        self._live_plan.check()

    def stats(self) -> dict[str, Any]:
        self._require_usable()
        return self._live_plan.stats()

    @property
    def _live_plan(self) -> EpPlan:
        assert self._plan is not None
        return self._plan

    def _reset_kernels(self) -> None:
        plan = self._live_plan
        # Two beyond the furthest rank, because words of its last call and of one begun may be about; never back, for
        # old words must stay old.
        furthest = max(self.comm.allgather(plan.call_number, "EpDispatchCombineOp.reset"))
        plan.set_call_number(furthest + 2)

    def _close_kernels(self) -> None:
        if self._plan is not None:
            self._plan.close()


def _launch(enqueue: Callable[..., None], grid: Any, *work: Any, **facts: int) -> Callable[..., None]:
    """What is left to give is what differs between calls of the same metadata: addresses and the handle."""
    blocks, warps = grid
    return functools.partial(enqueue, *work, block_num=blocks, warp_per_block=warps, **facts)


def _extras_of(routing: EpDispatchRoutingHandle) -> _core.CallExtras:
    return CallExtras(
        sender_map=routing.disp_dest_tok_id_map.data_ptr(),
        received_count=routing.total_recv_token_num.data_ptr(),
        summary=routing.inter_node_disp_send_map.data_ptr(),
    )
