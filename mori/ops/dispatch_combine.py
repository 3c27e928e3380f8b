"""The v1 API: build an `EpDispatchCombineOp` from an `EpDispatchCombineConfig`, then dispatch and combine.

W: world size, E: experts per rank, K: top-k, M: max_num_inp_token_per_rank, H: hidden_dim, S: scale_dim,
R: `max_num_tokens_to_recv()`, n: tokens this rank dispatches, T: rows it receives, h: columns of a call's rows.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

from mori import archs, env
from mori.errors import NotInitialized
from mori.jit.config import is_gfx125x as _is_gfx125x
from mori.shmem import state as shmem_state

from . import kernels, restrictions
from .calls import CallMemo, CombineCall, DispatchCall
from .config import EpDispatchCombineConfig, check_config
from .construction import build, release
from .dtypes import DTYPE_SUFFIX as _DTYPE_SUFFIX
from .dtypes import TOPK_IDX_DTYPE
from .engine import KERNELS, NO_EXTRAS, CallExtras, CombineWork, DispatchWork, dtype_code
from .kernel_types import QUANT_TYPE_MAP as _QUANT_TYPE_MAP
from .kernel_types import EpDispatchCombineKernelType, EpDispatchCombineQuantType
from .kernel_types import normalize_quant_type as _normalize_quant_type
from .launch import LaunchChooser
from .local_expert_count import count_local_experts
from .op_attributes import OpAttributes
from .routing import EpDispatchRoutingHandle, check_handle, extras_of, new_handle, require_kernel_type
from .standard_moe import StandardMoe
from .validation import (
    COMBINE_RULES,
    DISPATCH_RULES,
    check_arguments,
    check_combine_indices,
    check_expert_ids,
    check_registered_rows,
)
from .views import ViewCache
from .warmup import warmup_jit_kernels

__all__ = [
    "TOPK_IDX_DTYPE",
    "_DTYPE_SUFFIX",
    "_QUANT_TYPE_MAP",
    "EpDispatchCombineConfig",
    "EpDispatchCombineKernelType",
    "EpDispatchCombineOp",
    "EpDispatchCombineQuantType",
    "EpDispatchRoutingHandle",
    "_is_gfx125x",
    "_normalize_quant_type",
    "warmup_jit_kernels",
]

# Five tensors, and the routing handle if one was asked for.
DispatchResult = tuple[Any, ...]
CombineResult = tuple[torch.Tensor, "torch.Tensor | None"]


_NO_QUANT = EpDispatchCombineQuantType.None_


class EpDispatchCombineOp(OpAttributes, StandardMoe):
    """Dispatch and combine for one shape. Construction is collective over the ranks of `mori.shmem`.

    An op owns symmetric memory for its outputs; all results are views of it with fixed addresses, valid memory even
    after the op and shmem are gone. `del op` marks the memory free; it is reused inside a later collective call, once
    no rank holds a view. Calls on one op must come in the same order on all ranks.

    On CPUs calls are synchronous. On GPUs they are enqueued on the current stream of the GPU that `mori.shmem` was
    initialised on, never wait for it, and can be captured into graphs; results are there in stream order. What goes
    wrong on the GPU shows in `check()` or, if the communicator is lost, in the next call.

    Kernel types give the same results, bit for bit. AsyncLL splits each call in two: `dispatch` and `combine` only send
    and wait for nobody, `dispatch_recv` and `combine_recv` complete them.

    Construction raises NotInitialized before shmem init, ValueError / TypeError for a config that is out of range or
    names another rank or world size than shmem has, NotImplementedError for ranks on several nodes, ConfigMismatch (all
    ranks) when ranks disagree, HeapExhausted (all ranks) when the heap is too small.
    """

    def __init__(self, config: EpDispatchCombineConfig) -> None:
        limits = check_config(config)
        self.config = config
        self._launches = LaunchChooser(config, limits)
        self._limits = limits
        self._fp8_blockwise_combine_scale_dim = int(env.get("MORI_FP8_COMBINE_SCALE_DIM"))
        self._validates_ids = env.get("MORI_EP_VALIDATE")
        self._ignores_combine_indices = env.get("MORI_EP_LENIENT_INDICES")
        self._outstanding: str | None = None
        self._splits = limits.kernel_type is EpDispatchCombineKernelType.AsyncLL
        self._split_extras = CallExtras(split=True) if self._splits else NO_EXTRAS
        self._routing: EpDispatchRoutingHandle | None = None  # of the last dispatch, also of one that ends in a fault
        self._placed = False  # whether its rows have been put into the places of their experts
        self._counts_experts = False  # when the second half comes
        self._dispatch_dtype: torch.dtype | None = None
        self._combine_dtype: torch.dtype | None = None
        self._quantised: set[tuple[torch.dtype, bool]] = set()  # what block-wise combines are known to take

        memory = build(config, limits)
        self._plan = memory.plan
        self._synchronous = memory.plan.synchronous
        self._session = memory.session
        self._device = memory.session.communicator.device
        self._registered_begin, self._registered_end = memory.registered
        self.local_expert_count = torch.zeros(limits.experts_per_rank, dtype=torch.int32, device=self._device)
        # What stands in for weights without rows: a row of zeros.
        self._no_weights = torch.zeros(1, limits.topk, dtype=torch.float32, device=self._device)
        # Not at interpreter exit: by then shmem has left, or tells its peers so itself.
        weakref.finalize(self, release, memory.plan, memory.allocation).atexit = False
        caching = not env.get("MORI_EP_DISABLE_VIEW_CACHE")
        self._views = ViewCache(self._plan, self._device, enabled=caching)
        self._dispatch_calls: CallMemo[DispatchCall] = CallMemo(enabled=caching)
        self._combine_calls: CallMemo[CombineCall] = CallMemo(enabled=caching)

    # ---- dispatch

    def dispatch(
        self,
        input: torch.Tensor,
        weights: torch.Tensor | None,
        scales: torch.Tensor | None,
        indices: torch.Tensor,
        block_num: int = -1,
        rdma_block_num: int = -1,
        warp_per_block: int = -1,
        call_local_expert_count: bool = False,
        *,
        routing: EpDispatchRoutingHandle | None = None,
        return_routing: bool = False,
    ) -> DispatchResult:
        """Send every token once to each distinct rank among its experts. Collective; n may differ and be 0.

        input: (n, h) float32, bfloat16, float8_e4m3fn, float8_e4m3fnuz or float4_e2m1fn_x2; n <= M, h <= H.
        weights: (n, K) float32, or None: received weights are then zeros.
        scales: (n, S) of any dtype of scale_type_size bytes, moved as bytes; None or (n, 0): no scales.
        indices: (n, K) int32 global expert ids. Ids outside [0, W*E) are "no expert": dropped, counted in `stats()`.
        block_num, rdma_block_num, warp_per_block: launch sizes, used in MANUAL mode if > 0. See docs/tuning.md.
        call_local_expert_count: also fill `local_expert_count`; AsyncLL does so in `dispatch_recv`.
        return_routing: also return a new `EpDispatchRoutingHandle` as sixth value.
        routing: send the rows the way that handle notes, whatever `indices` say; they travel as data. n must be the
            handle's. Received row i then belongs to the same token as in the dispatch that made the handle.
            With either of the two, the count returned is the handle's own tensor. IntraNode and InterNodeV1 only.

        Returns (rows (R, h), weights (R, K) float32, scales (R, S), ids (R, K) int32, count (1,) int32): views of the
        op's memory, never trimmed. Rows below count are valid and ordered by (source rank, token). The content stays
        until this rank enters its next dispatch on this op. scales is None for None and (R, 0) for (n, 0). With AsyncLL
        they may be read after `dispatch_recv`.

        Raises before anything is sent, on this rank only: TypeError (dtype), ValueError (shape, device, contiguity,
        size, an argument that overlaps this op's own receive memory). During the call, on every rank alike:
        ReceiveOverflow, RowMismatch; PeerLost, PeerTimeout, OutOfStep end the communicator. On GPUs the latter show in
        `check()`, in this call with MORI_EP_SYNC_ERRORS=1.
        """
        self._require_shmem()
        call, addresses = self._prepared_dispatch(input, weights, scales, indices)
        launch = self._launches.dispatch(input, block_num, rdma_block_num, warp_per_block)
        self._cached_dispatch_launch = launch
        self._dispatch_dtype = input.dtype
        work, extras = call.work, self._split_extras
        if routing is not None or return_routing:
            work, routing = self._follow(work, routing, return_routing)
            extras = extras_of(routing)
        self._routing, self._placed = routing, False
        self._plan.dispatch(
            work, addresses, extras=extras, block_num=launch.block_num, warp_per_block=launch.warp_per_block
        )
        results: Any = call.results
        if routing is not None:
            results = (*results[:4], routing.total_recv_token_num)
        if self._splits:
            self._outstanding, self._counts_experts = "dispatch_recv", call_local_expert_count
        elif call_local_expert_count:
            count_local_experts(results[3], results[4], self._limits.rank, self.local_expert_count)
        if return_routing:
            rows = self._limits.receive_rows
            source = self._views.get("dispatch_source", (rows,), torch.int32)
            routing.disp_tok_id_to_src_tok_id_local[:rows].copy_(source)  # type: ignore[union-attr]
            return (*results, routing)
        return results

    def dispatch_send(
        self,
        input: torch.Tensor,
        weights: torch.Tensor | None,
        scales: torch.Tensor | None,
        indices: torch.Tensor,
        block_num: int = -1,
        warp_per_block: int = -1,
        call_local_expert_count: bool = False,
    ) -> DispatchResult:
        """First half of a dispatch, to be followed by `dispatch_recv`. Arguments and results as in `dispatch`.

        AsyncLL: sends and waits for nobody; when it has ended, the arguments are not needed any more. For every other
        kernel type it is the whole dispatch. RuntimeError while a receive half is missing.
        """
        self._require_no_half("dispatch_send")
        results = self.dispatch(
            input,
            weights,
            scales,
            indices,
            block_num,
            -1,
            warp_per_block,
            call_local_expert_count=call_local_expert_count,
        )
        self._outstanding = "dispatch_recv"
        return results

    def dispatch_recv(
        self, block_num: int = -1, warp_per_block: int = -1, call_local_expert_count: bool = False
    ) -> None:
        """Second half of `dispatch_send`: the views it returned may be read now. RuntimeError without a send.

        Launch sizes are those of the send. `local_expert_count` is filled if either half asks for it.
        """
        self._finish_half("dispatch_recv", "dispatch_send")
        if self._splits:
            self._plan.receive()
        if call_local_expert_count or self._counts_experts:
            self._counts_experts = False
            shape = (self._limits.receive_rows, self._limits.topk)
            ids = self._views.get("dispatch_indices", shape, torch.int32)
            received = self._views.get("received_count", (1,), torch.int32)
            count_local_experts(ids, received, self._limits.rank, self.local_expert_count)

    # ---- combine

    def combine(
        self,
        input: torch.Tensor,
        weights: torch.Tensor | None,
        indices: torch.Tensor,
        block_num: int = -1,
        rdma_block_num: int = -1,
        warp_per_block: int = -1,
        use_external_inp_buf: int | bool = -1,
        call_reset: bool = False,
        *,
        routing: EpDispatchRoutingHandle | None = None,
    ) -> CombineResult:
        """Return one row per received row to the token's owner, which adds them. Collective.

        input: (>= T, h) of any dtype that dispatch moves; row i is this rank's contribution for received row i of the
            last dispatch, already multiplied by router weights: combine applies none. GPUs take missing rows for zeros.
        weights: None or (any rows, K) float32, added up like the rows; missing rows count as zeros. Each rank decides.
        indices: the (n, K) ids given to this rank's last dispatch; only its shape is looked at, and not even that
            before the first dispatch or with MORI_EP_LENIENT_INDICES=1.
        use_external_inp_buf: 1: read `input`; 0: zero copy, read the registered buffer (an `input` that is another
            tensor is copied there first); negative: as in the config.
        block_num, rdma_block_num, warp_per_block: as in `dispatch`. call_reset: call `reset()` afterwards.
        routing: combine rows of the dispatch that made this handle; without it, those of the last dispatch.

        Returns (rows (M, h) of input's dtype, weights (M, K) float32 or None when none were passed): views of the op's
        memory, overwritten by the next combine. Row t < n is the float32 sum over the distinct ranks of token t, in
        ascending k from +0.0, rounded once (fp8 and fp4 saturate); zeros if it went nowhere. With a quant_type the bf16
        rows that are passed, this rank's own included, are first rounded to what travels: docs/numerics.md. Rows from n
        on are stale. The received count and the other views of the dispatch stay as they are. Before any dispatch the
        result is zeros.

        Raises before anything is sent, on this rank only: TypeError (dtype), ValueError (shape, device, contiguity,
        size, row counts that do not belong to the last dispatch); during the call as in `dispatch`.
        """
        self._require_shmem()
        if self._splits:
            self._require_no_half("combine")
        tensors = (input, weights) if self._ignores_combine_indices else (input, weights, indices)
        call, addresses = self._combine_calls.find(self._prepare_combine, *tensors)
        if routing is None:
            routing = self._routing
        else:
            check_handle(routing, self._limits, self._device)
        tokens = self._plan.dispatched_tokens if routing is None else routing.cur_rank_num_token
        if tokens is None or tokens != call.ids:
            tokens = self._combine_tokens(indices, routing)
        external = self.config.use_external_inp_buf if use_external_inp_buf < 0 else bool(use_external_inp_buf)
        if self._limits.quant_type is not _NO_QUANT:
            self._check_quantised(input, external, weighted=weights is not None)
        work = call.passed if external else call.in_place
        registered = addresses[0] == self._registered_begin
        zero_copy = registered and (not external or work == call.in_place)
        if not zero_copy:
            if self._synchronous:
                self._refuse_short_input(work.input_rows, routing)
            if registered:
                input = input.clone()  # what travels would be written over what is still to be read
            elif addresses[0] < self._registered_end and addresses[0] + call.input_bytes > self._registered_begin:
                raise ValueError(
                    "combine: input overlaps the registered combine buffer but does not start at its first row: "
                    "pass the buffer itself, or a tensor elsewhere"
                )
        launch = self._launches.combine(input, tokens, zero_copy, block_num, rdma_block_num, warp_per_block)
        self._cached_combine_launch = launch
        self._combine_dtype = input.dtype
        self._plan.combine(
            work,
            (
                0 if zero_copy else input.data_ptr() if registered else addresses[0],
                self._no_weights.data_ptr() if call.weightless else addresses[1],
            ),
            tokens=tokens,
            extras=self._split_extras if routing is None else extras_of(routing),
            block_num=launch.block_num,
            warp_per_block=launch.warp_per_block,
        )
        if self._splits:
            self._outstanding = "combine_recv"
        if call_reset:
            self.reset()
        return call.out, call.out_weights

    def combine_send(
        self,
        input: torch.Tensor,
        weights: torch.Tensor | None,
        indices: torch.Tensor,
        block_num: int = -1,
        warp_per_block: int = -1,
    ) -> CombineResult:
        """First half of a combine, to be followed by `combine_recv`. Arguments and results as in `combine`.

        AsyncLL: sends and, after a dispatch, waits for nobody; after another combine it waits until all ranks have
        ended that one. For every other kernel type it is the whole combine. RuntimeError while a receive half is
        missing.
        """
        self._require_no_half("combine_send")
        results = self.combine(input, weights, indices, block_num, -1, warp_per_block)
        self._outstanding = "combine_recv"
        return results

    def combine_recv(self, block_num: int = -1, warp_per_block: int = -1) -> None:
        """Second half of `combine_send`: the views it returned may be read now. RuntimeError without a send."""
        self._finish_half("combine_recv", "combine_send")
        if self._splits:
            self._plan.receive()

    def get_registered_combine_input_buffer(self, dtype: torch.dtype, hidden_dim: int = -1) -> torch.Tensor:
        """The buffer that a zero-copy combine reads, as a new (R, hidden_dim or H) tensor of `dtype`; fixed address.

        Its row stride is the h of the combine call: with h < H ask for `hidden_dim=h`. Write the T rows, then combine
        with `use_external_inp_buf=0`. It may be written again once a later dispatch of this op has completed.
        TypeError for an unsupported dtype, ValueError for rows larger than the op was built for.
        """
        columns = self._limits.hidden_dim if hidden_dim < 0 else hidden_dim
        check_registered_rows(dtype, columns, self._limits)
        return self._views.fresh("combine_in_rows", (self._limits.receive_rows, columns), dtype)

    # ---- what happened

    def get_dispatch_src_token_pos(self) -> torch.Tensor:
        """(T,) int32 view: flat index `rank * (W*M) + token` of the token in each received row of the last dispatch.

        Reads the received count on the host (synchronises on GPUs). See `decode_send_flat_idx`.
        """
        self._require_shmem()
        positions = self._views.get("dispatch_source", (self._limits.receive_rows,), torch.int32)
        return positions[: self._received(self._routing)]

    def stats(self) -> dict[str, Any]:
        """Counters of this rank since construction or `reset()`; synchronises on GPUs.

        dispatches, combines: calls. rows_sent, rows_received: by dispatches, lists by peer. bytes_sent, bytes_received:
        of those rows with their scales, weights, ids and source. no_expert_ids (-1), out_of_range_ids and their sum
        dropped_ids: entries of `indices` that went nowhere. last_received: rows that each rank got in the last
        dispatch; imbalance: the most of them over their mean, 1.0 when all are equal, 0.0 when there are none.
        """
        self._require_shmem()
        counters = self._plan.stats()
        last = counters["last_received"]
        return {
            **counters,
            "dropped_ids": counters["no_expert_ids"] + counters["out_of_range_ids"],
            "imbalance": max(last) * len(last) / sum(last) if sum(last) else 0.0,
        }

    def check(self) -> None:
        """Raise the fault of the last faulty call, if nobody has seen it yet; synchronises on GPUs."""
        self._require_shmem()
        self._plan.check()

    def reset(self) -> None:
        """Zero the counters of `stats()`. Never needed between calls, allowed at any time; not collective."""
        self._require_shmem()
        self._plan.reset_stats()

    # ---- checks of each call

    def _require_shmem(self) -> None:
        if not shmem_state.is_current(self._session):
            raise NotInitialized(
                "this op was built before mori.shmem was finalised (or in the parent of this forked process): its "
                "views are still readable; to dispatch or combine, initialise mori.shmem here and build a new op"
            )

    def _prepared_dispatch(
        self,
        input: torch.Tensor,
        weights: torch.Tensor | None,
        scales: torch.Tensor | None,
        indices: torch.Tensor,
    ) -> tuple[DispatchCall, tuple[int, ...]]:
        if self._splits:
            self._require_no_half("dispatch")
        call, addresses = self._dispatch_calls.find(self._prepare_dispatch, input, weights, scales, indices)
        if self._validates_ids and not self._plan.capturing:
            check_expert_ids(indices.view(torch.int32), self._limits)  # waits for the stream
        return call, addresses

    def _prepare_dispatch(
        self,
        input: torch.Tensor,
        weights: torch.Tensor | None,
        scales: torch.Tensor | None,
        indices: torch.Tensor,
    ) -> DispatchCall:
        tensors = {"input": input, "weights": weights, "scales": scales, "indices": indices}
        check_arguments("dispatch", DISPATCH_RULES, tensors, self._limits, self._device)
        rows, topk = self._limits.receive_rows, self._limits.topk
        scale_columns = 0 if scales is None or scales.dim() < 2 else scales.shape[1]
        view = self._views.get
        return DispatchCall(
            results=(
                view("dispatch_rows", (rows, input.shape[1]), input.dtype),
                view("dispatch_weights", (rows, topk), torch.float32),
                None if scales is None else view("dispatch_scales", (rows, scale_columns), scales.dtype),
                view("dispatch_indices", (rows, topk), torch.int32),
                view("received_count", (1,), torch.int32),
            ),
            work=DispatchWork(
                KERNELS["dispatch"],
                input.shape[0],
                input.shape[1] * input.itemsize,
                scale_columns * scales.itemsize if scales is not None else 0,
                dtype_code(input.dtype),
            ),
        )

    def _prepare_combine(
        self, input: torch.Tensor, weights: torch.Tensor | None, indices: torch.Tensor | None = None
    ) -> CombineCall:
        # A tensor without rows is harmless whatever else it is: it asks for the sum of what the other ranks give.
        weightless = isinstance(weights, torch.Tensor) and weights.numel() == 0
        tensors = {"input": input, "weights": None if weightless else weights}
        if not self._ignores_combine_indices:
            tensors["indices"] = indices
        check_arguments("combine", COMBINE_RULES, tensors, self._limits, self._device)
        tokens, topk, view = self._limits.max_tokens, self._limits.topk, self._views.get
        rows, columns = input.shape

        def work(zero_copy: bool) -> CombineWork:
            kernel = kernels.combine_kernel(input.dtype, self._limits.quant_type, zero_copy)
            weight_rows = 0 if weights is None else 1 if weightless else weights.shape[0]
            return CombineWork(KERNELS[kernel], rows, weight_rows, columns * input.itemsize, dtype_code(input.dtype))

        return CombineCall(
            out=view("combine_rows", (tokens, columns), input.dtype),
            out_weights=None if weights is None else view("combine_weights", (tokens, topk), torch.float32),
            input_bytes=input.numel() * input.itemsize,
            ids=0 if indices is None else indices.shape[0],
            weightless=weightless,
            passed=work(zero_copy=False),
            in_place=work(zero_copy=True),
        )

    def _follow(
        self, work: DispatchWork, routing: EpDispatchRoutingHandle | None, return_routing: bool
    ) -> tuple[DispatchWork, EpDispatchRoutingHandle]:
        """The work of a dispatch along a handle, or of one that fills a new handle."""
        if routing is None:
            require_kernel_type(self._limits.kernel_type)
            return work, new_handle(self._limits, self._device, work.tokens)
        if return_routing:
            raise ValueError("dispatch: routing and return_routing exclude each other: a replay makes no new handle")
        check_handle(routing, self._limits, self._device)
        if work.tokens != routing.cur_rank_num_token:
            raise ValueError(
                f"dispatch: input has {work.tokens} rows, the routing handle was made for "
                f"{routing.cur_rank_num_token} tokens: pass as many rows (from_tensors takes the count as well)"
            )
        return work._replace(kernel=KERNELS["dispatch_replay"]), routing

    def _combine_tokens(self, indices: torch.Tensor | None, routing: EpDispatchRoutingHandle | None) -> int:
        """Rows of the result: the tokens of the dispatch. Before any, and where graphs hold dispatches so that the host
        cannot know, the rows of `indices` as far as they fit."""
        dispatched = self._plan.dispatched_tokens if routing is None else routing.cur_rank_num_token
        if dispatched is None:
            return 0 if indices is None else min(indices.shape[0], self._limits.max_tokens)
        if not self._ignores_combine_indices:
            check_combine_indices(indices, dispatched)  # type: ignore[arg-type]
        return dispatched

    def _received(self, routing: EpDispatchRoutingHandle | None) -> int:
        """Rows received; waits on GPUs."""
        return self._plan.received if routing is None else int(routing.total_recv_token_num)

    def _check_quantised(self, input: torch.Tensor, external: bool, weighted: bool) -> None:
        """ValueError where block-wise quantisation is not offered, as in releases; else note the kernel's name."""
        limits = self._limits
        if limits.quant_type not in kernels.BLOCKWISE_KERNEL_TYPES:
            return
        if (input.dtype, external) not in self._quantised:
            arch = archs.find(self._session.communicator.target.arch)
            case = restrictions.Case(self.config, arch, dtype=input.dtype, external=external)
            restrictions.require("v1", "call", case)
            self._quantised.add((input.dtype, external))
        scales = self._fp8_blockwise_combine_scale_dim
        self._last_combine_kernel_name = kernels.released_name(limits, input.shape[1], scales, weighted)

    def _refuse_short_input(self, rows: int, routing: EpDispatchRoutingHandle | None) -> None:
        """Where the host knows how many are needed without waiting; a GPU takes missing rows for zeros."""
        received = self._received(routing)
        if rows < received:
            raise ValueError(
                f"combine: input has {rows} rows but this rank received {received}: "
                "pass one row per received row, in that order"
            )

    def _require_no_half(self, call: str) -> None:
        if self._outstanding is not None:
            raise RuntimeError(
                f"{call}: this op has a call in flight, {self._outstanding} is missing: one op has one call in flight"
            )

    def _finish_half(self, half: str, send: str) -> None:
        if self._outstanding != half:
            also = f"; the half that is missing is {self._outstanding}" if self._outstanding else ""
            raise RuntimeError(f"{half} without a {send} before it{also}")
        self._outstanding = None
