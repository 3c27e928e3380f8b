"""The standard-MoE methods of the v1 op: received rows ordered by local expert, [E, P, h] with P = W * M, and back.

E: experts per rank, K: top-k, h: columns of a row, R: `max_num_tokens_to_recv()`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from mori import env

from .dtypes import DTYPE_SUFFIX
from .engine import KERNELS, CallExtras, CombineWork, dtype_code
from .kernel_types import EpDispatchCombineKernelType as KernelType
from .routing import extras_of
from .validation import COMBINE_RULES, DISPATCH_RULES, PACKED_RULES, check_arguments

if TYPE_CHECKING:
    from collections.abc import Callable

    from .calls import DispatchCall
    from .config import Limits
    from .engine import EpPlan
    from .launch import LaunchChooser
    from .routing import EpDispatchRoutingHandle
    from .views import ViewCache

_KERNEL_TYPES = frozenset({KernelType.IntraNode, KernelType.InterNodeV1LL})
_MOST_PLACES = 2**32 - 1  # places are named by u32, the last one is "none"

# packed rows, their counts, their sources, and a tensor without elements
PackedResult = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


class StandardMoe:
    """Rows by expert. Kernel types IntraNode and InterNodeV1LL, else ValueError.

    With ENABLE_STANDARD_MOE_ADAPT=OFF in the environment every method raises RuntimeError.
    """

    _limits: Limits
    _plan: EpPlan
    _device: torch.device
    _views: ViewCache
    _launches: LaunchChooser
    _routing: EpDispatchRoutingHandle | None
    _placed: bool
    _registered_begin: int
    _registered_end: int
    _require_shmem: Callable[[], None]
    _prepared_dispatch: Callable[..., tuple[DispatchCall, tuple[int, ...]]]
    _combine_tokens: Callable[[torch.Tensor | None, EpDispatchRoutingHandle | None], int]
    _received: Callable[[EpDispatchRoutingHandle | None], int]
    reset: Callable[[], None]

    def dispatch_standard_moe(
        self,
        input: torch.Tensor,
        weights: torch.Tensor | None,
        scales: torch.Tensor | None,
        indices: torch.Tensor,
        block_num: int = -1,
        rdma_block_num: int = -1,
        warp_per_block: int = -1,
    ) -> PackedResult:
        """`dispatch` and `convert_dispatch_output` in one launch; arguments and errors as there. Collective.

        Scales travel, but are not put into places.
        """
        self._require_standard_moe("dispatch_standard_moe")
        call, addresses = self._prepared_dispatch(input, weights, scales, indices)
        packed = self._new_packed(input.shape[1], input.dtype)
        launch = self._launches.dispatch(input, block_num, rdma_block_num, warp_per_block)
        self._routing, self._placed = None, True
        self._plan.dispatch(
            call.work._replace(kernel=KERNELS["dispatch_packed"]),
            addresses,
            extras=CallExtras(packed_rows=packed[0].data_ptr(), packed_sources=packed[2].data_ptr()),
            block_num=launch.block_num,
            warp_per_block=launch.warp_per_block,
        )
        return packed

    def convert_dispatch_output(
        self,
        dispatch_out_x: torch.Tensor,
        dispatch_out_topk_idx: torch.Tensor,
        block_num: int = -1,
        warp_per_block: int = -1,
    ) -> PackedResult:
        """Copy the rows of the last dispatch into the places of their local experts. Local; on the current stream.

        dispatch_out_x: value 0 of `dispatch`, (R, h); on CPUs (T, h) is enough. dispatch_out_topk_idx: as many rows of
        K int32 ids, value 3 of `dispatch`.

        Returns (rows (E, P, h), counts (E,) int32, sources (E, P) int32, an int64 tensor without elements). Row (e, s)
        for s < counts[e] is the s-th received row, in the order of `dispatch`, that names local expert e; a row that
        names several is in each, one that names an expert twice is there once. sources: flat index
        `rank * (W*M) + token`. Rows and sources are new tensors, undefined from counts[e] on; counts is a view of the
        op's memory, overwritten by the next conversion.
        """
        self._require_standard_moe("convert_dispatch_output")
        tensors = {"input": dispatch_out_x, "indices": dispatch_out_topk_idx}
        limits = self._limits._replace(max_tokens=self._limits.receive_rows)
        rules = {name: DISPATCH_RULES[name] for name in tensors}
        check_arguments("convert_dispatch_output", rules, tensors, limits, self._device)
        rows = dispatch_out_x.shape[0]
        needed = self._received(self._routing) if self._plan.synchronous else self._limits.receive_rows
        if rows < needed:
            raise ValueError(
                f"convert_dispatch_output: input has {rows} rows, must have at least {needed}: pass values 0 and 3 of "
                "dispatch as they are"
            )
        packed = self._new_packed(dispatch_out_x.shape[1], dispatch_out_x.dtype)
        launch = self._launches.untuned(block_num, 0, warp_per_block)
        self._plan.convert(
            KERNELS["pack"],
            dispatch_out_x.shape[1] * dispatch_out_x.itemsize,
            (
                dispatch_out_x.data_ptr(),
                dispatch_out_topk_idx.data_ptr(),
                packed[0].data_ptr(),
                packed[2].data_ptr(),
            ),
            launch.block_num,
            launch.warp_per_block,
        )
        self._placed = True
        return packed

    def combine_standard_moe(
        self,
        input: torch.Tensor,
        weights: torch.Tensor | None,
        indices: torch.Tensor,
        block_num: int = -1,
        rdma_block_num: int = -1,
        warp_per_block: int = -1,
        call_reset: bool = False,
    ) -> tuple[torch.Tensor, None]:
        """`convert_combine_input` and `combine` in one launch. Collective.

        input: (E, P, h), rows in the places that the last conversion gave them. weights: without effect. indices: as in
        `combine`. Returns (rows (M, h), None), as `combine` does; never quantised. RuntimeError if the rows of the
        last dispatch have no places.
        """
        self._require_standard_moe("combine_standard_moe")
        self._check_packed("combine_standard_moe", input, indices)
        tokens = self._combine_tokens(indices, self._routing)
        columns = input.shape[2]
        work = CombineWork(
            KERNELS[f"combine_packed_{DTYPE_SUFFIX[input.dtype]}"],
            0,
            0,
            columns * input.itemsize,
            dtype_code(input.dtype),
        )
        launch = self._launches.untuned(block_num, rdma_block_num, warp_per_block)
        self._plan.combine(
            work,
            (0, 0),
            tokens=tokens,
            extras=extras_of(self._routing, packed_rows=input.data_ptr()),
            block_num=launch.block_num,
            warp_per_block=launch.warp_per_block,
        )
        if call_reset:
            self.reset()
        return self._views.get("combine_rows", (self._limits.max_tokens, columns), input.dtype), None

    def convert_combine_input(
        self,
        packed_recv_x: torch.Tensor,
        packed_recv_src_info: torch.Tensor | None,
        packed_recv_layout_range: torch.Tensor | None,
        block_num: int = -1,
        warp_per_block: int = -1,
    ) -> torch.Tensor:
        """Add up each received row's expert outputs, times the weights that its dispatch brought. Local.

        packed_recv_x: (E, P, h), in the places that the last conversion gave them; the other two are not looked at.
        Writes the registered combine buffer (`get_registered_combine_input_buffer` says when that is allowed) and
        returns it as (R, h): go on with `combine(view, None, indices, use_external_inp_buf=0)`. Row i is the float32
        sum over its local experts, in ascending k from +0.0, rounded once. RuntimeError as in `combine_standard_moe`.
        """
        self._require_standard_moe("convert_combine_input")
        self._check_packed("convert_combine_input", packed_recv_x)
        columns = packed_recv_x.shape[2]
        launch = self._launches.untuned(block_num, 0, warp_per_block)
        self._plan.convert(
            KERNELS[f"unpack_{DTYPE_SUFFIX[packed_recv_x.dtype]}"],
            columns * packed_recv_x.itemsize,
            (0, 0, packed_recv_x.data_ptr(), 0),
            launch.block_num,
            launch.warp_per_block,
        )
        return self._views.get("combine_in_rows", (self._limits.receive_rows, columns), packed_recv_x.dtype)

    def _require_standard_moe(self, method: str) -> None:
        if not env.get("ENABLE_STANDARD_MOE_ADAPT"):
            raise RuntimeError(
                f"{method} is not available. Rebuild with ENABLE_STANDARD_MOE_ADAPT=ON. Here that is a variable of the "
                "running process: unset it"
            )
        limits = self._limits
        if limits.kernel_type not in _KERNEL_TYPES:
            names = ", ".join(sorted(member.name for member in _KERNEL_TYPES))
            raise ValueError(f"{method} only supports {names}, got kernel_type {limits.kernel_type}")
        places = limits.experts_per_rank * limits.world_size * limits.max_tokens
        if places >= _MOST_PLACES:
            raise ValueError(
                f"{method}: {limits.experts_per_rank} experts x {limits.world_size} ranks x {limits.max_tokens} tokens "
                f"are {places} places, at most {_MOST_PLACES - 1} can be named: lower max_num_inp_token_per_rank"
            )
        self._require_shmem()

    def _new_packed(self, columns: int, dtype: torch.dtype) -> PackedResult:
        limits = self._limits
        places = (limits.experts_per_rank, limits.world_size * limits.max_tokens)
        return (
            torch.empty((*places, columns), dtype=dtype, device=self._device),
            self._views.get("expert_counts", (limits.experts_per_rank,), torch.int32),
            torch.empty(places, dtype=torch.int32, device=self._device),
            torch.empty(0, dtype=torch.int64, device=self._device),
        )

    def _check_packed(self, call: str, packed: torch.Tensor, indices: torch.Tensor | None = None) -> None:
        # Graphs may hold what the host does not know of: `dispatched_tokens` is None then.
        if not self._placed and self._plan.dispatched_tokens is not None:
            raise RuntimeError(
                f"{call}: the rows of the last dispatch were not put into places: call convert_dispatch_output after "
                "dispatch, or dispatch_standard_moe"
            )
        tensors = {"input": packed} | ({} if indices is None else {"indices": indices})
        check_arguments(call, PACKED_RULES, tensors, self._limits, self._device)
        check_arguments(call, {"input": COMBINE_RULES["input"]}, {"input": packed[0]}, self._limits, self._device)
        begin = packed.data_ptr()
        if begin < self._registered_end and begin + packed.numel() * packed.itemsize > self._registered_begin:
            raise ValueError(f"{call}: input overlaps the registered combine buffer, which this call writes")
