"""The v2 op: dispatch and combine on an explicit communicator, by one of several kernel backends.

W: world size, E: experts per rank, K: top-k, M: max_num_inp_token_per_rank, H: hidden_dim, n: tokens this rank
dispatches, T: rows it receives, cap: `effective_max_recv` of the config, the rows of every receive view.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch

from mori import archs, env, target

from .. import restrictions
from ..calls import CallMemo
from ..dtypes import DTYPE_SUFFIX
from ..restrictions_v2 import FP4_QUANT_TYPES as _FP4_QUANT_TYPES
from ..restrictions_v2 import PUSH_QUANT_TYPES as _PUSH_QUANT_TYPES
from ..restrictions_v2 import QUANT_TYPES as _QUANT_TYPES
from ..validation import check_arguments, check_expert_ids
from . import backends, kernel_set
from .agreement import agreed_fields
from .arguments import COMBINE_RULES, DISPATCH_RULES, limits_of, scale_row_bytes
from .config import _FP8_DTYPES, EpDispatchCombineConfig, _default_backend
from .handle_checks import check_handle
from .kernel_set import KernelSet, Spec
from .routing import EpDispatchRoutingHandle
from .symm_arena import SymmArena

if TYPE_CHECKING:
    from mori.cco import Communicator

__all__ = [
    "_DT",
    "_FP4_QUANT_TYPES",
    "_FP8_DTYPES",
    "_PUSH_QUANT_TYPES",
    "_QUANT_TYPES",
    "EpDispatchCombineConfig",
    "EpDispatchCombineOp",
    "EpDispatchRoutingHandle",
    "KernelSet",
    "_default_backend",
]

# Bytes of an element of each dtype that rows may have; a pair of fp4 is one.
_DT = {dtype: dtype.itemsize for dtype in DTYPE_SUFFIX}


def __getattr__(name: str) -> Any:
    if name == "WAVE":  # asks the target, so not at import
        return target.current().contract_wave
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class DispatchCall(NamedTuple):
    """What a dispatch with this metadata does."""

    tokens: int
    scaled: bool
    kernel: Callable[..., Any]
    results: tuple[torch.Tensor | None, ...]


class CombineResults(NamedTuple):
    """What a combine for so many tokens returns, and by which kernel."""

    kernel: Callable[..., Any]
    out: torch.Tensor
    weights: torch.Tensor


class _Unusable:
    """Takes the place of the calls of an op that is closed: the way to it costs usable ops nothing."""

    def __init__(self, why: str) -> None:
        self._why = why

    def find(self, *arguments: object) -> Any:
        raise RuntimeError(f"this op cannot be called: {self._why}")


class EpDispatchCombineOp:
    """Dispatch and combine for one shape, on `comm`. Construction is collective, with equal configs on all ranks.

    The kernel backend is `cfg.kernel_backend`, else MORI_V2_KERNEL_BACKEND, else the default of the target; naming a
    subclass takes that one. The op owns one window, two tracked resources of the communicator, until `close()` or the
    end of a `with` block. Views stay valid memory after that. `cfg` is copied: changes of it reach later ops only.
    Several ops may share a communicator, also with v1 ops in the same process. Calls on one op come in the same order
    on all ranks; any order is legal, without barriers.

    On CPUs calls are synchronous. On GPUs they are enqueued on the current stream of the communicator's device, never
    wait for it, and can be captured into graphs.

    Raises ValueError for an unknown backend, sizes that no op can have, a rank or world size that is not the
    communicator's, and "`backend` backend cannot serve this config:" with a reason per line; ImportError if the backend
    does not load: all of that before memory is taken. Then, on all ranks, ConfigMismatch when they disagree and
    HeapExhausted when `per_rank_vmm` is too small. After an error nothing is left behind on the communicator.
    """

    backend_name: ClassVar[str] = ""

    def __init_subclass__(cls, *, backend: str | None = None, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        if backend is not None:
            cls.backend_name = backend
            backends.register(backend, cls)

    def __new__(cls, cfg: EpDispatchCombineConfig, comm: Communicator) -> EpDispatchCombineOp:
        return object.__new__(backends.chosen(cfg) if cls is EpDispatchCombineOp else cls)

    def __init__(self, cfg: EpDispatchCombineConfig, comm: Communicator) -> None:
        self._gate(cfg, comm)
        cfg = cfg.detached()
        comm.agree(agreed_fields(cfg, self.backend_name), f"EpDispatchCombineOp({self.backend_name})")
        self.cfg = cfg
        self.comm = comm
        self.dev = comm.device
        self._dispatch_specs, self._combine_specs = kernel_set.specs_from(cfg)
        self._dispatch_limits, self._combine_limits = limits_of(cfg, "dispatch"), limits_of(cfg, "combine")
        self._null_flat = cfg.world_size * cfg.effective_max_recv
        self._identity = object()
        self._handles = 0  # dispatches that returned one
        self._validates_ids = bool(env.get("MORI_EP_VALIDATE"))
        self._dispatch_calls: Any = CallMemo[DispatchCall](enabled=True)
        self._combine_calls: Any = CallMemo[Any](enabled=True)
        self._results: dict[int, CombineResults] = {}
        self.arena = SymmArena(comm, self._regions(cfg))
        try:
            self._make_views()
            self._kernels = self._build_kernels(cfg, self.arena)
            self._refuse(self._kernels.unsupported)
        except BaseException:
            self.close()
            raise
        self.capabilities = self._kernels.capabilities
        _live.add(self)

    @classmethod
    def available_backends(cls) -> list[str]:
        """Names of kernel backends that load here."""
        return backends.available()

    # ---- what a backend provides

    def _unsupported(self, cfg: EpDispatchCombineConfig) -> tuple[str, ...]:
        """Reasons why this backend cannot serve the config; none takes it."""
        return ()

    def _regions(self, cfg: EpDispatchCombineConfig) -> list[tuple[str, int]]:
        """(name, bytes) of what shall be symmetric: at least disp_out, out_wts, out_idx, out_tok, recv_to_src_token
        and, with scales, out_scales. A buffer of the op whose name is among them lies there."""
        raise NotImplementedError

    def _build_kernels(self, cfg: EpDispatchCombineConfig, arena: SymmArena) -> KernelSet:
        """Compile what calls may need."""
        raise NotImplementedError

    def _region(self, name: str) -> str:
        """What the arena calls the region of that name."""
        return name

    def _close_kernels(self) -> None:
        """Let go of everything but the arena."""

    def _reset_kernels(self) -> None:
        """Collective, between two barriers: bring the protocol's state into step on all ranks."""
        self.arena.zero()

    # ---- construction

    def _gate(self, cfg: EpDispatchCombineConfig, comm: Communicator) -> None:
        listed = restrictions.unsupported(cfg, self.backend_name, comm.target.arch, comm)
        self._refuse((*listed, *self._unsupported(cfg)))

    def _refuse(self, reasons: tuple[str, ...]) -> None:
        if reasons:
            lines = "".join(f"\n  {reason}" for reason in reasons)
            raise ValueError(f"{self.backend_name} backend cannot serve this config:{lines}")

    def _make_views(self) -> None:
        cfg, topk = self.cfg, self.cfg.num_experts_per_token
        cap, tokens = cfg.effective_max_recv, cfg.max_num_inp_token_per_rank
        rows, combined = self._dispatch_limits, self._combine_limits
        scale_bytes = scale_row_bytes(cfg)
        self._recv_tokens = self._buffer("disp_out", (cap, rows.columns), rows.dtype)
        self._recv_weights = self._buffer("out_wts", (cap, topk), torch.float32)
        self._recv_scales = self._buffer("out_scales", (cap, scale_bytes // 4), torch.int32) if scale_bytes else None
        self._recv_indices = self._buffer("out_idx", (cap, topk), torch.int32)
        self._recv_source = self._buffer("recv_to_src_token", (cap,), torch.int32)
        self._combine_in = self._buffer("out_tok", (cap, combined.columns), combined.dtype)
        self.total_recv = self._buffer("total_recv", (1,), torch.int32)
        self.token_dest_map = self._buffer("token_dest_map", (tokens * topk,), torch.int32)
        self.routing_dest_map = self._buffer("routing_dest_map", (tokens * topk,), torch.int32).fill_(self._null_flat)
        self._send_map = self._buffer("send_map", (self._send_map_words(cfg),), torch.int32).zero_()
        self._no_map = torch.empty(0, dtype=torch.int32, device=self.dev)
        self.combine_out = self._buffer("combine_out", (tokens, combined.columns), combined.dtype)
        self.combine_out_weights = self._buffer("combine_out_weights", (tokens, topk), torch.float32)

    def _send_map_words(self, cfg: EpDispatchCombineConfig) -> int:
        """int32 words that the backend notes in a handle beside map and count."""
        return 0

    def _buffer(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Of the arena if it has such a region, else local memory."""
        region = self._region(name)
        if self.arena.has(region):
            return self.arena.view(region, shape, dtype)
        return torch.zeros(shape, dtype=torch.uint8 if dtype.itemsize == 1 else dtype, device=self.dev).view(dtype)

    # ---- dispatch

    def dispatch(
        self,
        input: torch.Tensor,
        weights: torch.Tensor | None,
        scales: torch.Tensor | None,
        indices: torch.Tensor,
        *,
        routing: EpDispatchRoutingHandle | None = None,
        return_routing: bool = False,
        snapshot: bool = False,
    ) -> tuple[Any, ...]:
        """Send every token once to each distinct rank among its experts. Collective; n may differ and be 0.

        input: (n, H) of the config's dispatch dtype (fp4: (n, H/2) pairs), contiguous, on the communicator's device.
        weights: (n, K) float32, or None: received weights are then zeros.
        scales: (n, any) rows of `scale_stride_bytes()` bytes of any dtype, moved as bytes; None where the config has
            none. All ranks pass scales, or none does.
        indices: (n, K) int32 global expert ids. Ids outside [0, W*E) are "no expert" and are dropped.
        return_routing: also return the handle that `combine` needs, as sixth value. Without it the rows cannot be
            combined.
        snapshot: let that handle own copies, so that it outlives later dispatches and may be combined several times.
        routing: send along an earlier handle; not offered by every backend.

        Returns (rows (cap, H), weights (cap, K) float32, scales (cap, dwords) int32 or None, ids (cap, K) int32, count
        (1,) int32): the same views of the op's memory in every call, never trimmed. Rows below the count are valid and
        ordered by (source rank, token); they stay until this rank enters its next dispatch on this op.

        Raises before anything is sent, on this rank only: TypeError (dtype, int64 ids), ValueError (shape, device,
        contiguity, n > M, options that exclude each other), NotImplementedError (routing). Else as in v1's `dispatch`.
        """
        if not self.comm.is_valid:
            self._refuse_calls("its communicator has been destroyed")
        call, addresses = self._dispatch_calls.find(self._prepare_dispatch, input, weights, scales, indices)
        if snapshot or routing is not None:
            call = self._unusual(call, routing, return_routing, snapshot)
        if self._validates_ids and not self._capturing:
            check_expert_ids(indices.view(torch.int32), self._dispatch_limits)  # waits for the stream
        dest_map = self.routing_dest_map if return_routing else self.token_dest_map
        if routing is not None:
            dest_map = routing.disp_dest_tok_id_map
        self._enqueue_dispatch(call, addresses, (input, weights, scales, indices), dest_map)
        if not return_routing:
            return call.results
        self._handles += 1
        handle = EpDispatchRoutingHandle(
            dest_map, self._no_map, self._send_map, self.total_recv, None, call.tokens, self._recv_source
        )
        handle._made_by, handle._number = self._identity, self._handles
        return (*call.results, handle.snapshot(self._recv_weights) if snapshot else handle)

    def _enqueue_dispatch(
        self,
        call: DispatchCall,
        addresses: tuple[int, ...],
        tensors: tuple[Any, ...],
        dest_map: torch.Tensor,
    ) -> None:
        """Calls the kernel as `KernelSet` says. A backend may call its own kernels with less: `addresses` are those of
        `tensors` (input, weights, scales, indices), 0 for None."""
        input, weights, scales, indices = tensors
        if not self._kernels.self_resets_counters:
            self.total_recv.zero_()
        call.kernel(
            input=input,
            indices=indices,
            weights=weights,
            scales=scales if call.scaled else None,
            dest_map=dest_map,
            num_tokens=call.tokens,
        )

    def _prepare_dispatch(
        self,
        input: torch.Tensor,
        weights: torch.Tensor | None,
        scales: torch.Tensor | None,
        indices: torch.Tensor,
    ) -> DispatchCall:
        tensors = {"input": input, "weights": weights, "scales": scales, "indices": indices}
        check_arguments("dispatch", DISPATCH_RULES, tensors, self._dispatch_limits, self.dev)
        tokens = input.shape[0]
        return DispatchCall(
            tokens=tokens,
            scaled=scales is not None and scales.dim() == 2 and scales.shape[1] > 0,
            kernel=self._kernels.dispatch[self._pick(tokens)[0]],
            results=(
                self._recv_tokens,
                self._recv_weights,
                self._recv_scales,
                self._recv_indices,
                self.total_recv,
            ),
        )

    def _unusual(
        self,
        call: DispatchCall,
        routing: EpDispatchRoutingHandle | None,
        return_routing: bool,
        snapshot: bool,
    ) -> DispatchCall:
        """The call of a dispatch along a handle, or of one that makes a snapshot."""
        if snapshot and not return_routing:
            raise ValueError("dispatch: snapshot says what the returned handle is like: pass return_routing=True too")
        if routing is None:
            return call
        if return_routing:
            raise ValueError("dispatch: routing and return_routing exclude each other: a replay makes no new handle")
        replays = self._kernels.dispatch_replay
        if replays is None:
            raise self._absent("replay")
        self._check_handle(routing)
        if call.tokens != routing.cur_rank_num_token:
            raise ValueError(
                f"dispatch: input has {call.tokens} rows, the routing handle was made for {routing.cur_rank_num_token} "
                "tokens: pass as many rows"
            )
        return call._replace(kernel=replays[kernel_set.built(replays, self._pick(call.tokens)[0])])

    # ---- combine

    def combine(
        self,
        input: torch.Tensor,
        weights: torch.Tensor | None = None,
        indices: object = None,
        *,
        routing: EpDispatchRoutingHandle,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return one row per received row to the token's owner, which adds them. Collective.

        input: (>= T, H) of the config's combine dtype, contiguous; row i is this rank's contribution for received row
            i, already multiplied by router weights: combine applies none. `combine_in_view()`, or its first rows, is
            read where it is; anything else is staged by the kernel. GPUs take missing rows for zeros.
        weights: None, or anything else to ask for the sum of the received weights as well; contents are not looked at.
            Ask on all ranks: those that do not ask contribute none.
        indices: ignored.
        routing: of the dispatch whose rows these are.

        Returns (rows (n, H) of the combine dtype, weights (n, K) float32 or None): views of the op's memory,
        overwritten by the next combine. Row t is the float32 sum over the distinct ranks of token t in ascending k
        from +0.0, rounded once; zeros if it went nowhere. The received count and the views of the dispatch stay as
        they are.

        Raises before anything is sent, on this rank only: TypeError (dtype, no handle), ValueError (shape, device,
        contiguity, a handle of another op or one whose map a later dispatch has overwritten). Else as in v1's
        `combine`.
        """
        if not self.comm.is_valid:
            self._refuse_calls("its communicator has been destroyed")
        call, (address,) = self._combine_calls.find(self._prepare_combine, input)
        if getattr(routing, "_made_by", None) is not self._identity or routing._number != self._handles:
            self._check_handle(routing)
        tokens = routing.cur_rank_num_token
        results = self._results.get(tokens)
        if results is None:
            results = self._prepare_results(tokens)
        wants_weights = weights is not None
        self._enqueue_combine(results.kernel, call, address, input, routing, wants_weights)
        return results.out, results.weights if wants_weights else None

    def _prepare_combine(self, input: torch.Tensor) -> Any:
        """What is worth knowing of inputs with this metadata."""
        check_arguments("combine", COMBINE_RULES, {"input": input}, self._combine_limits, self.dev)

    def _prepare_results(self, tokens: int) -> CombineResults:
        results = CombineResults(
            self._kernels.combine[self._pick(tokens)[1]], self.combine_out[:tokens], self.combine_out_weights[:tokens]
        )
        self._results[tokens] = results
        return results

    def _enqueue_combine(
        self,
        kernel: Callable[..., Any],
        call: Any,
        address: int,
        input: torch.Tensor,
        routing: EpDispatchRoutingHandle,
        wants_weights: bool,
    ) -> None:
        """Calls the kernel as `KernelSet` says. A backend may call its own kernels otherwise: `call` is what
        `_prepare_combine` gave, `address` that of `input`."""
        if not self._kernels.stages_in_kernel and address != self._combine_in.data_ptr():
            self._combine_in[: input.shape[0]].copy_(input)
        kernel(
            input=input,
            dest_map=routing.disp_dest_tok_id_map,
            total_recv=routing.total_recv_token_num,
            num_tokens=routing.cur_rank_num_token,
            want_weights=wants_weights,
        )

    def _check_handle(self, routing: EpDispatchRoutingHandle) -> None:
        if getattr(routing, "_made_by", None) is not self._identity:
            check_handle(routing, self.cfg, self._send_map.numel(), self.dev)
        elif not routing._is_snapshot and routing._number != self._handles and not self._knows_only_captures:
            raise ValueError(
                f"routing: {self._handles - routing._number} later dispatches of this op returned handles and have "
                "overwritten the map that this one shares with the op: combine first, or dispatch with snapshot=True"
            )

    # ---- launch sizes

    def _specs_from(self, cfg: EpDispatchCombineConfig) -> tuple[list[Spec], list[Spec]]:
        return kernel_set.specs_from(cfg)

    def _pick(self, tokens: int) -> tuple[Spec, Spec]:
        """(blocks, warps) of a dispatch of so many tokens, and of its combine."""
        dispatch, combine = kernel_set.pick(self.cfg, tokens)
        return kernel_set.built(self._kernels.dispatch, dispatch), kernel_set.built(self._kernels.combine, combine)

    # ---- views

    def recv_tokens(self) -> torch.Tensor:
        """(cap, H) of the dispatch dtype, as `dispatch` returns it; so are the next three."""
        return self._recv_tokens

    def recv_weights(self) -> torch.Tensor:
        return self._recv_weights

    def recv_scales(self) -> torch.Tensor | None:
        return self._recv_scales

    def recv_indices(self) -> torch.Tensor:
        return self._recv_indices

    def combine_in_view(self) -> torch.Tensor:
        """(cap, H) of the combine dtype: what a combine without copies reads. It may be written again once a later
        dispatch of this op has completed."""
        return self._combine_in

    def scale_stride_bytes(self) -> int:
        """Bytes from one row of received scales to the next; 0 when scales are off."""
        return self._dispatch_limits.scale_bytes

    # ---- not every backend has these

    def local_expert_count(self) -> torch.Tensor:
        raise self._absent("local_expert_count")

    def convert_dispatch_output(self) -> tuple[torch.Tensor, ...]:
        raise self._absent("std_moe")

    def convert_combine_input(self, routing: EpDispatchRoutingHandle) -> None:
        raise self._absent("std_moe")

    def push_landing(self) -> torch.Tensor:
        raise ValueError(f"push_landing: quant_type {self.cfg.quant_type!r} pushes no rows")

    def check(self) -> None:
        """Raise the fault of the last faulty call, if nobody has seen it yet; synchronises on GPUs."""
        raise self._absent("check")

    def stats(self) -> dict[str, Any]:
        """Counters of this rank since construction, as in v1; synchronises on GPUs."""
        raise self._absent("stats")

    def _absent(self, feature: str) -> NotImplementedError:
        """What to raise for something that the backend does not offer; raises by itself what the table says of it."""
        arch = archs.find(self.comm.target.arch)
        restrictions.require("v2", "call", restrictions.Case(self.cfg, arch, self.backend_name, feature=feature))
        return NotImplementedError(f"{feature}: the {self.backend_name} backend does not offer it; v1 (mori.ops) may")

    # ---- the end

    def reset(self) -> None:
        """Collective: bring all ranks into step, whatever calls some of them made or missed, and empty the maps.

        Never needed between calls. Waits for the device. RuntimeError while capturing.
        """
        if self._capturing:
            raise RuntimeError("reset() waits for the device and for peers, which cannot be captured")
        self._require_usable()
        self._synchronize()
        self.comm.barrier()
        self._reset_kernels()
        self.token_dest_map.fill_(-1)
        self.routing_dest_map.fill_(self._null_flat)
        self._send_map.zero_()
        self.total_recv.zero_()
        self._synchronize()
        self.comm.barrier()

    def close(self) -> None:
        """Give back what the backend holds, then the window. Idempotent; not collective. Calls then raise
        RuntimeError."""
        self._refuse_calls("it has been closed")
        self._close_kernels()
        self.arena.close()

    def _refuse_calls(self, why: str) -> None:
        if not isinstance(self._dispatch_calls, _Unusable):
            self._dispatch_calls = self._combine_calls = _Unusable(why)

    def _require_usable(self) -> None:
        if isinstance(self._dispatch_calls, _Unusable):
            self._dispatch_calls.find()

    @property
    def _capturing(self) -> bool:
        return self.dev.type == "cuda" and torch.cuda.is_current_stream_capturing()

    @property
    def _knows_only_captures(self) -> bool:
        """Whether graphs hold dispatches, so that the host cannot know which one came last."""
        return self._capturing

    def _synchronize(self) -> None:
        if self.dev.type == "cuda":
            torch.cuda.synchronize(self.dev)

    def __enter__(self) -> EpDispatchCombineOp:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __repr__(self) -> str:
        cfg = self.cfg
        return (
            f"{type(self).__name__}(backend={self.backend_name!r}, rank={cfg.rank}/{cfg.world_size}, "
            f"hidden_dim={cfg.hidden_dim}, topk={cfg.num_experts_per_token})"
        )


_live: weakref.WeakSet[EpDispatchCombineOp] = weakref.WeakSet()


def _end_in_child() -> None:
    for op in list(_live):
        op._refuse_calls("this process was forked from the rank that built it")


os.register_at_fork(after_in_child=_end_in_child)
