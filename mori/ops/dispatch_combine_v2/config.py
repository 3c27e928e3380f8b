"""`EpDispatchCombineConfig` of v2, the sizes that follow from it, and the launch sizes it settles on."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from operator import index
from typing import Any

import torch

from mori import archs, env, target

from .. import restrictions
from ..config import receive_rows_per_rank
from ..dtypes import DTYPE_SUFFIX
from ..restrictions_v2 import INT_FIELDS
from . import hip_tuning_configs, tuning_configs
from .tuning_configs import KEYS, Schedule

_FP8_DTYPES = tuple(dtype for dtype, suffix in DTYPE_SUFFIX.items() if suffix.startswith("fp8"))
_FP8_BLOCK = 128  # elements of a scale of fp8_blockwise

_BETWEEN_NODES = {
    "dispatch_block_num": 96,
    "combine_block_num": 96,
    "warp_num_per_block": 8,
    "combine_warp_num_per_block": 8,
    "dispatch_rdma_block_num": 64,
    "combine_rdma_block_num": 64,
}
# What stands in for the launch sizes that are left open where others are given.
_BESIDE_GIVEN = {
    "dispatch_block_num": 64,
    "combine_block_num": 80,
    "warp_num_per_block": 16,
    "combine_warp_num_per_block": 4,
}


def _default_backend() -> str:
    """The kernel backend of the target."""
    return "flydsl" if target.current().name == "hip" else "hip"


def default_backend() -> str:
    """The kernel backend of configs that name none: MORI_V2_KERNEL_BACKEND, else the target's."""
    return str(env.get("MORI_V2_KERNEL_BACKEND") or _default_backend())


def backend_of(config: EpDispatchCombineConfig) -> str:
    """The kernel backend that an op with this config gets."""
    return config.kernel_backend or default_backend()


def _suffix(dtype: torch.dtype) -> str:
    """How tuning tables spell a dtype; f32 has no rules of its own."""
    suffix = DTYPE_SUFFIX.get(dtype, "")
    return "fp4" if suffix == "fp4" else "fp8" if suffix.startswith("fp8") else "bf16"


def _row_bytes(hidden_dim: int, dtype: torch.dtype) -> int:
    return hidden_dim // 2 if _suffix(dtype) == "fp4" else hidden_dim * dtype.itemsize


@dataclass
class EpDispatchCombineConfig:
    """Everything a v2 op is built from. Checked when it is made and again when an op is built, as it is mutable.

    All ranks pass equal values, except for `rank` and launch sizes.

    rank, world_size: as in the communicator.
    hidden_dim: elements of a row (H). Rows have a multiple of 16 bytes. fp4: two elements in a byte, so tensors are
        H / 2 wide.
    max_num_inp_token_per_rank: most tokens a rank may dispatch (M). Between nodes rounded up to a multiple of the wave
        width of the target.
    num_experts_per_rank, num_experts_per_token: E and top-k (K). Expert `e` lives on rank `e // E`.
    data_type: of rows in both legs, unless `dispatch_data_type` and `combine_data_type` are given.
    scale_dim, scale_type_size: scales per token and bytes of one scale; 0 for either means no scales.
    combine_mode: "gather" or "scatter"; becomes "scatter" with a `quant_type` other than "none".
    quant_type: "none", "fp8_direct_cast", "fp8_blockwise", "fp4_blockwise", "fp4_blockwise_fp32".
    dispatch_block_num, combine_block_num, warp_num_per_block (of dispatch), combine_warp_num_per_block: launch sizes.
        Without any of them and without `schedule` the tuning tables of the backend decide.
    schedule: buckets (most tokens or None, dispatch blocks, dispatch warps, combine blocks, combine warps), ascending.
        May also be assigned later, before an op is built.
    enable_std_moe: offer the standard-MoE conversions.
    max_total_recv_tokens: most rows a rank may receive in a call, rounded up to a multiple of world_size; 0: no cap.
    gpu_per_node: ranks per node, None for all. Fewer than world_size select the path between nodes.
    num_qp_per_pe, dispatch_rdma_block_num, combine_rdma_block_num, internode_kernel, internode_auto_ll_max_tokens: of
        the path between nodes. "auto" takes "v2_ll" for calls of at most `internode_auto_ll_max_tokens` tokens, else
        "v2".
    max_token_type_size: bytes of the widest element that travels between nodes, None for that of the legs.
    kernel_backend: "flydsl", "hip", or None for MORI_V2_KERNEL_BACKEND or the default of the target.

    Raises ValueError for a combination that is not offered, UnsupportedDtype (a TypeError and a KeyError) for rows that
    no kernel moves: docs/support-matrix.md lists the rules. What a backend cannot do is said when an op is built.
    """

    rank: int
    world_size: int
    hidden_dim: int
    max_num_inp_token_per_rank: int
    num_experts_per_rank: int
    num_experts_per_token: int
    data_type: torch.dtype = torch.bfloat16
    dispatch_data_type: torch.dtype | None = None
    combine_data_type: torch.dtype | None = None
    scale_dim: int = 0
    scale_type_size: int = 0
    combine_mode: str = "gather"
    quant_type: str = "none"
    dispatch_block_num: int | None = None
    combine_block_num: int | None = None
    warp_num_per_block: int | None = None
    combine_warp_num_per_block: int | None = None
    schedule: Schedule | None = None
    enable_std_moe: bool = False
    max_total_recv_tokens: int = 0
    gpu_per_node: int | None = None
    num_qp_per_pe: int = 2
    max_token_type_size: int | None = None
    dispatch_rdma_block_num: int | None = None
    combine_rdma_block_num: int | None = None
    internode_kernel: str = "auto"
    internode_auto_ll_max_tokens: int = 512
    kernel_backend: str | None = None

    def __post_init__(self) -> None:
        current = target.current()
        case, subject = restrictions.Case(self, archs.find(current.arch)), "EpDispatchCombineConfig: "
        if self.gpu_per_node is None:
            self.gpu_per_node = self.world_size
        restrictions.require("v2", "config", case, subject)
        self._settle_numbers()
        if self.is_internode:
            wave = current.contract_wave
            self.max_num_inp_token_per_rank = -(-self.max_num_inp_token_per_rank // wave) * wave
        if self.quant_type != "none":
            self.combine_mode = "scatter"
        if self.max_token_type_size is None:
            self.max_token_type_size = max(self.elem_size, self.combine_elem_size)
        self._pinned_geometry = frozenset(name for name in _BETWEEN_NODES if getattr(self, name) is not None)
        # Launch sizes that nobody gave and nobody measured, None where somebody did.
        self._untuned: Mapping[str, Any] | None = None
        self._resolve_geometry()
        restrictions.require("v2", "config", case, subject)  # once more, for what depends on launch sizes

    def _settle_numbers(self) -> None:
        """Integers of other libraries become Python's own: those travel, and never overflow."""
        for name in INT_FIELDS:
            if getattr(self, name) is not None:
                setattr(self, name, index(getattr(self, name)))

    def detached(self) -> EpDispatchCombineConfig:
        """A copy that later changes of this config do not reach: what an op goes on with once it has been checked."""
        copied = copy.copy(self)
        copied._settle_numbers()
        return copied

    @classmethod
    def tuned(cls, **kwargs: Any) -> EpDispatchCombineConfig:
        """A config with the launch sizes of the flydsl tables, as if they had been given; given ones stay.

        Between nodes the plain constructor. KeyError without world_size, hidden_dim or num_experts_per_token.
        """
        world_size = kwargs["world_size"]
        if world_size // (kwargs.get("gpu_per_node") or world_size) > 1:
            return cls(**kwargs)
        dtype = _suffix(kwargs.get("data_type", torch.bfloat16))
        found = tuning_configs.lookup(world_size, kwargs["hidden_dim"], kwargs["num_experts_per_token"], dtype)
        return cls(**(found | kwargs))

    def _resolve_geometry(self) -> None:
        if self.is_internode:
            self.schedule = None
            self._fill(_BETWEEN_NODES)
        elif any(getattr(self, name) is not None for name in KEYS):
            self._fill(_BESIDE_GIVEN)
        else:
            found = self._tabled()
            self._fill(found)
            if found["schedule"] is None:
                self._untuned = found

    def _fill(self, values: Mapping[str, Any]) -> None:
        for name, value in values.items():
            if getattr(self, name) is None:
                setattr(self, name, value)

    def _tabled(self) -> dict[str, Any]:
        shape = self.world_size, self.hidden_dim, self.num_experts_per_token
        if backend_of(self) != "hip":
            return tuning_configs.lookup(*shape, dtype=self.dtype_str)
        return hip_tuning_configs.lookup(
            *shape,
            dtype=self.dispatch_dtype_str,
            experts_per_rank=self.num_experts_per_rank,
            quant_type=self.quant_type,
        )

    @property
    def leaves_grid_open(self) -> bool:
        """Whether calls may choose their grids freely: no launch size was given, changed since, or measured.

        The fields then hold the documented sizes all the same. Those are sizes for AMD GPUs, where they count.
        """
        given = {name: getattr(self, name) for name in KEYS}
        return given == self._untuned and target.current().name != "hip"

    @property
    def fewest_combine_warps(self) -> int | None:
        """Warps of the smallest combine block; None while launch sizes are not settled."""
        return min((bucket[4] for bucket in self.schedule or ()), default=self.combine_warp_num_per_block)

    @property
    def nodes(self) -> int:
        return self.world_size // (self.gpu_per_node or self.world_size)

    @property
    def is_internode(self) -> bool:
        return self.nodes > 1

    @property
    def is_scatter(self) -> bool:
        return self.combine_mode == "scatter"

    @property
    def fp8_direct_cast(self) -> bool:
        return self.quant_type == "fp8_direct_cast"

    @property
    def fp8_blockwise(self) -> bool:
        return self.quant_type == "fp8_blockwise"

    @property
    def combine_scale_dim(self) -> int:
        """Scales per token of an fp8_blockwise combine."""
        return self.hidden_dim // _FP8_BLOCK if self.fp8_blockwise else 0

    @property
    def wire_elem_size(self) -> int:
        """Bytes of an element on its way back in a scatter combine."""
        return 1 if self.fp8_direct_cast or self.fp8_blockwise else self.elem_size

    @property
    def dispatch_dtype(self) -> torch.dtype:
        return self.dispatch_data_type or self.data_type

    @property
    def combine_dtype(self) -> torch.dtype:
        return self.combine_data_type or self.data_type

    @property
    def is_fp4(self) -> bool:
        """Of dispatch."""
        return self.dispatch_dtype_str == "fp4"

    @property
    def is_fp8(self) -> bool:
        """Of dispatch."""
        return self.dispatch_dtype_str == "fp8"

    @property
    def elem_size(self) -> int:
        """Bytes of an element of dispatch; 1 for a pair of fp4."""
        return self.dispatch_dtype.itemsize

    @property
    def combine_elem_size(self) -> int:
        """Bytes of an element of combine; 1 for a pair of fp4."""
        return self.combine_dtype.itemsize

    @property
    def token_nbytes(self) -> int:
        """Bytes of a row of dispatch."""
        return _row_bytes(self.hidden_dim, self.dispatch_dtype)

    @property
    def combine_token_nbytes(self) -> int:
        """Bytes of a row of combine."""
        return _row_bytes(self.hidden_dim, self.combine_dtype)

    @property
    def is_asymmetric_dtype(self) -> bool:
        return self.dispatch_dtype != self.combine_dtype

    @property
    def dispatch_dtype_str(self) -> str:
        """Key of the hip tables: "fp4", "fp8", else "bf16"."""
        return _suffix(self.dispatch_dtype)

    @property
    def dtype_str(self) -> str:
        """Key of the flydsl tables: as above, or "fp4_disp_bf16_comb" where only dispatch is fp4."""
        if self.is_fp4 and _suffix(self.combine_dtype) != "fp4":
            return "fp4_disp_bf16_comb"
        return self.dispatch_dtype_str

    @property
    def max_recv(self) -> int:
        """Rows a rank may receive without a cap."""
        return self.world_size * self.max_num_inp_token_per_rank

    @property
    def effective_max_recv_per_rank(self) -> int:
        """Rows a rank may receive from one rank."""
        return receive_rows_per_rank(self.world_size, self.max_num_inp_token_per_rank, self.max_total_recv_tokens)

    @property
    def effective_max_recv(self) -> int:
        """Rows a rank may receive."""
        return self.world_size * self.effective_max_recv_per_rank
