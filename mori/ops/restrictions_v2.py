"""What v2 refuses: configs that make no sense anywhere, then what the ops of each backend do not serve."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from mori import target
from mori.errors import ConfigMismatch, UnsupportedDtype

from .dtypes import DTYPE_SUFFIX, dtype_names
from .restriction import INT32_MAX, MAX_24_BITS, Case, Restriction, int_row, is_int, range_row

QUANT_TYPES = ("none", "fp8_direct_cast", "fp8_blockwise", "fp4_blockwise", "fp4_blockwise_fp32")
FP4_QUANT_TYPES = ("fp4_blockwise", "fp4_blockwise_fp32")
# Those that leave the dtype of a dispatch free: rows are quantised before they travel back, whatever came.
PUSH_QUANT_TYPES = (*FP4_QUANT_TYPES, "fp8_blockwise")
INTERNODE_KERNELS = ("auto", "v2", "v2_ll")
COMBINE_MODES = ("gather", "scatter")

# Backends that are part of this version.
BUILT_BACKENDS = ("hip",)

_FP8_FLAVOURS = {torch.float8_e4m3fn: "ocp", torch.float8_e4m3fnuz: "fnuz"}
_WIDE = (torch.bfloat16, torch.float32)
_FP8_BLOCK = 128

_in_config = partial(Restriction, api="v2", stage="config")
_at_construction = partial(Restriction, api="v2", stage="construction")
_on_flydsl = partial(_at_construction, backends=("flydsl",))
_on_hip = partial(_at_construction, backends=("hip",))
_at_call_on_hip = partial(Restriction, api="v2", stage="call", backends=("hip",), error=NotImplementedError)


def _is_payload(dtype: object) -> bool:
    return isinstance(dtype, torch.dtype) and dtype in DTYPE_SUFFIX


def _is_fp4(dtype: torch.dtype) -> bool:
    return DTYPE_SUFFIX.get(dtype) == "fp4"


def _has_other_combine(case: Case) -> bool:
    return bool(case.config.dispatch_dtype != case.config.combine_dtype)


def _quantises(case: Case) -> bool:
    return bool(case.config.quant_type != "none")


def _combine_threads(case: Case) -> int | None:
    """Of the smallest block; None while launch sizes are not settled."""
    warps = case.config.fewest_combine_warps
    return None if warps is None else warps * target.of(case.arch.name).contract_wave


def _has_narrow_block(case: Case) -> bool:
    threads = _combine_threads(case)
    return not case.config.is_internode and threads is not None and threads < case.config.world_size


def _is_schedule(schedule: Any) -> bool:
    """Buckets of five whole numbers, the first one ascending; only the last may be without a bound."""
    if not isinstance(schedule, tuple | list):
        return False
    buckets = list(schedule)
    if not all(isinstance(bucket, tuple | list) and len(bucket) == 5 for bucket in buckets):
        return False
    bounds = [bucket[0] for bucket in buckets]
    if bounds and bounds[-1] is None:
        bounds.pop()
    whole = all(is_int(number) and number >= 0 for number in (*bounds, *(n for b in buckets for n in b[1:])))
    return whole and bounds == sorted(set(bounds))


def _widest_element(case: Case) -> int:
    return int(max(case.config.elem_size, case.config.combine_elem_size))


def _scale_bytes(case: Case) -> int:
    return int(case.config.scale_dim * case.config.scale_type_size)


def _largest_tokens(case: Case) -> int:
    return int(INT32_MAX // case.config.world_size**2)


# Fields that are numbers: False where None leaves them open.
INT_FIELDS = {
    "rank": True,
    "world_size": True,
    "hidden_dim": True,
    "max_num_inp_token_per_rank": True,
    "num_experts_per_rank": True,
    "num_experts_per_token": True,
    "scale_dim": True,
    "scale_type_size": True,
    "dispatch_block_num": False,
    "combine_block_num": False,
    "warp_num_per_block": False,
    "combine_warp_num_per_block": False,
    "max_total_recv_tokens": True,
    "gpu_per_node": False,
    "num_qp_per_pe": True,
    "max_token_type_size": False,
    "dispatch_rdma_block_num": False,
    "combine_rdma_block_num": False,
    "internode_auto_ll_max_tokens": True,
}
# First, because the others calculate with them.
INTS = tuple(int_row("v2", "config", field, ValueError, or_none=not needed) for field, needed in INT_FIELDS.items())

CONFIG: tuple[Restriction, ...] = (
    _in_config(
        id="v2-gpu-per-node",
        statement="`gpu_per_node` divides `world_size`",
        fields=("gpu_per_node", "world_size"),
        broken=lambda x: (
            x.config.gpu_per_node is not None
            and (x.config.gpu_per_node <= 0 or x.config.world_size % x.config.gpu_per_node != 0)
        ),
        message="gpu_per_node {c.gpu_per_node} does not divide world_size {c.world_size}",
        remedy="set it to the number of ranks on one node, None for all",
        source="contract of the config",
    ),
    _in_config(
        id="v2-num-qp-per-pe",
        statement="`num_qp_per_pe` is at least 1",
        fields=("num_qp_per_pe",),
        broken=lambda x: x.config.num_qp_per_pe < 1,
        message="num_qp_per_pe is {c.num_qp_per_pe}",
        remedy="set it to 1 or more",
        source="contract of the config",
    ),
    _in_config(
        id="v2-leg-dtypes",
        statement="`dispatch_data_type` and `combine_data_type` are given together or not at all",
        fields=("dispatch_data_type", "combine_data_type"),
        broken=lambda x: (x.config.dispatch_data_type is None) != (x.config.combine_data_type is None),
        message="dispatch_data_type is {c.dispatch_data_type} and combine_data_type is {c.combine_data_type}",
        remedy="give both, or neither and data_type for the two of them",
        source="contract of the config",
    ),
    _in_config(
        id="v2-quant-type",
        statement="`quant_type` is one of " + ", ".join(QUANT_TYPES),
        fields=("quant_type",),
        broken=lambda x: x.config.quant_type not in QUANT_TYPES,
        message="quant_type is {c.quant_type!r}",
        remedy="use one of " + ", ".join(QUANT_TYPES),
        source="contract of the config",
    ),
    _in_config(
        id="v2-internode-kernel",
        statement="`internode_kernel` is one of " + ", ".join(INTERNODE_KERNELS),
        fields=("internode_kernel",),
        broken=lambda x: x.config.internode_kernel not in INTERNODE_KERNELS,
        message="internode_kernel is {c.internode_kernel!r}",
        remedy="use one of " + ", ".join(INTERNODE_KERNELS),
        source="guide: choice by the tokens of the call",
    ),
    _in_config(
        id="v2-auto-ll-tokens",
        statement="`internode_auto_ll_max_tokens` is not negative",
        fields=("internode_auto_ll_max_tokens",),
        broken=lambda x: x.config.internode_auto_ll_max_tokens < 0,
        message="internode_auto_ll_max_tokens is {c.internode_auto_ll_max_tokens}",
        remedy="set it to 0 or more",
        source="contract of the config",
    ),
    _in_config(
        id="v2-combine-mode",
        statement="`combine_mode` is gather or scatter",
        fields=("combine_mode",),
        broken=lambda x: x.config.combine_mode not in COMBINE_MODES,
        message="combine_mode is {c.combine_mode!r}",
        remedy="use gather or scatter",
        source="contract of the config",
    ),
    _in_config(
        id="v2-quant-between-nodes",
        statement="no quantised combine between nodes, whatever the backend",
        fields=("quant_type", "world_size", "gpu_per_node"),
        broken=lambda x: x.config.is_internode and x.config.quant_type != "none",
        message="quant_type {c.quant_type!r} with world_size {c.world_size} over gpu_per_node {c.gpu_per_node}",
        remedy='between nodes it must be "none"',
        source="guide: restriction of the path between nodes",
    ),
    _in_config(
        id="v2-payload-dtype",
        statement="rows are " + dtype_names(DTYPE_SUFFIX),
        fields=("dispatch_dtype", "combine_dtype"),
        broken=lambda x: not all(_is_payload(dtype) for dtype in (x.config.dispatch_dtype, x.config.combine_dtype)),
        message="rows of {c.dispatch_dtype} in dispatch and {c.combine_dtype} in combine",
        remedy="use two of " + dtype_names(DTYPE_SUFFIX),
        source="contract of the config",
        error=UnsupportedDtype,
    ),
    _in_config(
        id="v2-row-bytes",
        statement="rows of dispatch are a multiple of 16 bytes",
        fields=("hidden_dim", "token_nbytes"),
        broken=lambda x: x.config.token_nbytes % 16 != 0 or (x.config.is_fp4 and x.config.hidden_dim % 2 != 0),
        message="hidden_dim {c.hidden_dim}: dispatch rows have token_nbytes {c.token_nbytes}, no multiple of 16",
        remedy="pad hidden_dim, or use the v1 API, which takes rows of any size",
        source="contract of the config; v1 has no such rule",
    ),
    _in_config(
        id="v2-two-dtypes",
        statement="dispatch and combine of different dtypes: without standard-MoE, with a gather or a block-wise "
        "combine",
        fields=("dispatch_dtype", "combine_dtype", "combine_mode", "quant_type", "enable_std_moe"),
        broken=lambda x: (
            _has_other_combine(x)
            and (
                x.config.enable_std_moe
                or not (
                    (x.config.combine_mode == "gather" and x.config.quant_type == "none")
                    or x.config.quant_type in PUSH_QUANT_TYPES
                )
            )
        ),
        message="dispatch of {c.dispatch_dtype} and combine of {c.combine_dtype} with combine_mode {c.combine_mode!r}, "
        "quant_type {c.quant_type!r} and enable_std_moe {c.enable_std_moe}",
        remedy='use combine_mode="gather", quant_type="none" and enable_std_moe=False, or one dtype',
        source="contract of the config",
    ),
    _in_config(
        id="v2-combine-fp4-of-others",
        statement="combine is not fp4 where dispatch is something else",
        fields=("dispatch_dtype", "combine_dtype"),
        broken=lambda x: _has_other_combine(x) and _is_fp4(x.config.combine_dtype),
        message="dispatch of {c.dispatch_dtype} and combine of {c.combine_dtype}",
        remedy="combine in bfloat16 or float32, or dispatch fp4 too",
        source="contract of the config",
    ),
    _in_config(
        id="v2-combine-row-bytes",
        statement="rows of combine are a multiple of 16 bytes",
        fields=("hidden_dim", "combine_token_nbytes"),
        broken=lambda x: x.config.combine_token_nbytes % 16 != 0,
        message="hidden_dim {c.hidden_dim}: combine rows have combine_token_nbytes {c.combine_token_nbytes}, no "
        "multiple of 16",
        remedy="pad hidden_dim, or use the v1 API, which takes rows of any size",
        source="contract of the config; v1 has no such rule",
    ),
    _in_config(
        id="v2-max-token-type-size",
        statement="`max_token_type_size` covers the wider leg",
        fields=("max_token_type_size",),
        broken=lambda x: x.config.max_token_type_size is not None and x.config.max_token_type_size < _widest_element(x),
        message="max_token_type_size is {c.max_token_type_size}, elements have up to {value} bytes",
        remedy="set it to {value} or more, or to None",
        source="contract of the config",
        value=_widest_element,
    ),
    _in_config(
        id="v2-fp8-flavour",
        statement="fp8 rows that are added up have the arch's flavour; moving either is possible everywhere",
        fields=("combine_dtype",),
        broken=lambda x: (
            x.config.combine_dtype in _FP8_FLAVOURS and _FP8_FLAVOURS[x.config.combine_dtype] not in x.arch.fp8
        ),
        message="combine_dtype {c.combine_dtype} cannot be added up on {arch.name}, which has fp8 of flavour {value}",
        remedy="combine in the other flavour, or in bfloat16: dispatch_data_type fp8, combine_data_type bfloat16",
        source="guide: the representation of fp8 differs by target",
        value=lambda x: " and ".join(sorted(x.arch.fp8)),
    ),
    _in_config(
        id="v2-schedule",
        statement="`schedule` is buckets of five numbers with ascending bounds, the last bound may be None",
        fields=("schedule",),
        broken=lambda x: x.config.schedule is not None and not _is_schedule(x.config.schedule),
        message="schedule is {c.schedule!r}",
        remedy="use (most tokens or None, dispatch blocks, dispatch warps, combine blocks, combine warps), ascending",
        source="contract of the config",
    ),
    _in_config(
        id="v2-world-size-of-a-block",
        statement="on one node a block of combine has a thread for every rank",
        fields=("world_size",),
        broken=_has_narrow_block,
        message="world_size {c.world_size} exceeds the {value} threads of the smallest combine block",
        value=_combine_threads,
        remedy="raise combine_warp_num_per_block, and the warps of combine in every bucket of schedule",
        source="contract of the config",
    ),
)

_RANGES = (
    "world_size",
    "hidden_dim",
    "max_num_inp_token_per_rank",
    "num_experts_per_rank",
    "num_experts_per_token",
    "scale_dim",
    "scale_type_size",
    "max_total_recv_tokens",
)
RANGE_ROWS = tuple(range_row("v2", "construction", field) for field in _RANGES)

EVERY_BACKEND: tuple[Restriction, ...] = (
    _at_construction(
        id="v2-flat-index",
        statement="int32 can name every flat token index: `world_size`^2 x `max_num_inp_token_per_rank` fits",
        fields=("world_size", "max_num_inp_token_per_rank"),
        broken=lambda x: x.config.max_num_inp_token_per_rank > _largest_tokens(x),
        message="world_size {c.world_size} with max_num_inp_token_per_rank {c.max_num_inp_token_per_rank} exceeds what "
        "int32 flat token indices can name",
        remedy="max_num_inp_token_per_rank may be at most {value}",
        source="releases let such indices wrap around",
        value=_largest_tokens,
    ),
    _at_construction(
        id="v2-expert-ids",
        statement="int32 can name every expert",
        fields=("world_size", "num_experts_per_rank"),
        broken=lambda x: x.config.world_size * x.config.num_experts_per_rank > INT32_MAX,
        message="world_size {c.world_size} x num_experts_per_rank {c.num_experts_per_rank} exceeds what int32 expert "
        "ids can name",
        remedy="num_experts_per_rank may be at most {value}",
        source="ids are int32",
        value=lambda x: INT32_MAX // x.config.world_size,
    ),
    _at_construction(
        id="v2-row-bytes-of-a-header",
        statement=f"rows have at most {MAX_24_BITS} bytes",
        fields=("hidden_dim",),
        broken=lambda x: max(x.config.token_nbytes, x.config.combine_token_nbytes) > MAX_24_BITS,
        message="hidden_dim {c.hidden_dim} gives rows of {value} bytes",
        remedy=f"lower it until rows have at most {MAX_24_BITS} bytes",
        source="headers carry row bytes in 24 bits",
        value=lambda x: max(x.config.token_nbytes, x.config.combine_token_nbytes),
    ),
    _at_construction(
        id="v2-communicator",
        statement="`rank` and `world_size` are those of the communicator",
        fields=("rank", "world_size"),
        broken=lambda x: (
            x.communicator is not None
            and (x.config.rank, x.config.world_size) != (x.communicator.rank, x.communicator.nranks)
        ),
        message="rank {c.rank} of world_size {c.world_size} on a communicator where this is rank {value}",
        remedy="pass the rank and nranks of the communicator",
        source="guide: the grouping of the communicator has to match the config",
        value=lambda x: f"{x.communicator.rank} of {x.communicator.nranks}",
    ),
    _at_construction(
        id="v2-agreement",
        statement="ranks agree on every field that shapes memory or what travels; `rank` and launch sizes may differ",
        fields=(),
        broken=None,
        message="ranks disagree",
        remedy="Pass the same value on every rank",
        source="releases run on with mixed layouts",
        error=ConfigMismatch,
        where="the communicator, when memory is allocated",
    ),
)

FLYDSL: tuple[Restriction, ...] = (
    _on_flydsl(
        id="flydsl-not-built",
        statement="the flydsl backend is not part of this version",
        fields=("backend",),
        broken=lambda x: x.backend not in BUILT_BACKENDS,
        message="kernel_backend {backend!r} is not built in this version of mori",
        remedy='kernel_backend="hip" or MORI_V2_KERNEL_BACKEND=hip takes the native one',
        source="not built",
        error=ImportError,
    ),
    _on_flydsl(
        id="flydsl-nodes",
        statement="one node only",
        fields=("world_size", "gpu_per_node"),
        broken=lambda x: x.config.is_internode,
        message="world_size {c.world_size} over gpu_per_node {c.gpu_per_node} spans nodes",
        remedy='leave gpu_per_node out where all ranks share a node; other paths belong to kernel_backend="hip"',
        source="guide: FlyDSL is intra-node only",
    ),
    _on_flydsl(
        id="flydsl-fp4-quant",
        statement="no fp4 block-wise combine",
        fields=("quant_type",),
        broken=lambda x: x.config.quant_type in FP4_QUANT_TYPES,
        message="quant_type {c.quant_type!r}",
        remedy='use "fp8_blockwise", or the v1 API, which has fp4_blockwise',
        source="as in releases",
    ),
    _on_flydsl(
        id="flydsl-two-dtypes-quant",
        statement="dispatch and combine of different dtypes: not with a quantised combine",
        fields=("dispatch_dtype", "combine_dtype", "quant_type"),
        broken=lambda x: _has_other_combine(x) and _quantises(x),
        message="dispatch of {c.dispatch_dtype} and combine of {c.combine_dtype} with quant_type {c.quant_type!r}",
        remedy='use quant_type="none", or one dtype',
        source="as in releases",
    ),
    _on_flydsl(
        id="flydsl-scatter-dtype",
        statement="a scatter combine without quantisation takes bfloat16 or float32 rows",
        fields=("combine_mode", "combine_dtype"),
        broken=lambda x: x.config.is_scatter and not _quantises(x) and x.config.combine_dtype not in _WIDE,
        message="combine_mode {c.combine_mode!r} with rows of {c.combine_dtype}",
        remedy='use combine_mode="gather", or bfloat16 or float32 rows',
        source="as in releases",
    ),
    _on_flydsl(
        id="flydsl-quant-dtype",
        statement="a quantised combine takes bfloat16 rows",
        fields=("quant_type", "combine_dtype"),
        broken=lambda x: _quantises(x) and x.config.combine_dtype != torch.bfloat16,
        message="quant_type {c.quant_type!r} with rows of {c.combine_dtype}",
        remedy='use bfloat16 rows, or quant_type="none"',
        source="releases take other rows and return bfloat16 all the same",
    ),
    _on_flydsl(
        id="flydsl-quant-block",
        statement="fp8_blockwise: `hidden_dim` is a multiple of 128",
        fields=("hidden_dim", "quant_type"),
        broken=lambda x: x.config.fp8_blockwise and x.config.hidden_dim % _FP8_BLOCK != 0,
        message="quant_type {c.quant_type!r} with hidden_dim {c.hidden_dim}, no multiple of 128",
        remedy='pad hidden_dim, or use "fp8_direct_cast", or the v1 API, whose blocks may be short',
        source="scales belong to 128 elements; an AssertionError in releases",
    ),
    _on_flydsl(
        id="flydsl-std-moe-dtype",
        statement="standard-MoE conversions take bfloat16 rows",
        fields=("enable_std_moe", "dispatch_dtype"),
        broken=lambda x: x.config.enable_std_moe and x.config.dispatch_dtype != torch.bfloat16,
        message="enable_std_moe {c.enable_std_moe} with rows of {c.dispatch_dtype}",
        remedy="use bfloat16 rows, or enable_std_moe=False",
        source="an AssertionError in releases",
    ),
    _on_flydsl(
        id="flydsl-fp4-combine",
        statement="a combine of fp4 rows needs an arch that converts fp4; not gfx942",
        fields=("combine_dtype",),
        broken=lambda x: _is_fp4(x.config.combine_dtype) and x.arch.fp4 is None,
        message="combine_dtype {c.combine_dtype} on {arch.name}, which cannot convert fp4",
        remedy="use combine_data_type bfloat16 with dispatch_data_type fp4, which only moves such rows",
        source="guide: FP4 conversion requires gfx950 or gfx1250; here sm_90 and CPUs do it by arithmetic",
    ),
)

HIP: tuple[Restriction, ...] = (
    _on_hip(
        id="hip-nodes",
        statement="one node: the preview between nodes is not built in this version",
        fields=("world_size", "gpu_per_node"),
        broken=lambda x: x.config.is_internode,
        message="world_size {c.world_size} over gpu_per_node {c.gpu_per_node} spans nodes, and the path between nodes "
        "is not built in this version of mori",
        remedy="leave gpu_per_node out where all ranks share a node",
        source="not built",
    ),
    _on_hip(
        id="hip-combine-dtype",
        statement="on one node combine takes bfloat16 or float32 rows",
        fields=("combine_dtype",),
        broken=lambda x: not x.config.is_internode and x.config.combine_dtype not in _WIDE,
        message="combine of {c.combine_dtype}",
        remedy="set combine_data_type to bfloat16 or float32 and dispatch_data_type to what travels",
        source="guide: gather combine in BF16/FP32",
    ),
    _on_hip(
        id="hip-nodes-fp4",
        statement="no fp4 between nodes",
        fields=("dispatch_dtype", "combine_dtype"),
        broken=lambda x: (
            x.config.is_internode and (_is_fp4(x.config.dispatch_dtype) or _is_fp4(x.config.combine_dtype))
        ),
        message="dispatch of {c.dispatch_dtype} and combine of {c.combine_dtype} between nodes",
        remedy="use bfloat16, float32 or fp8",
        source="guide: BF16/FP32/FP8 between nodes",
    ),
    _on_hip(
        id="hip-nodes-topk",
        statement="between nodes a token has at least as many experts as there are nodes",
        fields=("num_experts_per_token",),
        broken=lambda x: x.config.is_internode and x.config.num_experts_per_token < x.config.nodes,
        message="num_experts_per_token {c.num_experts_per_token} over {c.nodes} nodes",
        remedy="use no more nodes than experts per token",
        source="as in releases",
    ),
    _on_hip(
        id="hip-scatter",
        statement="gather combine only",
        fields=("combine_mode",),
        broken=lambda x: x.config.is_scatter and not _quantises(x),
        message="combine_mode {c.combine_mode!r}",
        remedy='use combine_mode="gather"',
        source="guide: gather combine",
    ),
    _on_hip(
        id="hip-quant",
        statement="no quantised combine; payloads that are quantised already are carried",
        fields=("quant_type",),
        broken=_quantises,
        message="quant_type {c.quant_type!r}",
        remedy='use "none", or the v1 API, which quantises on every target',
        source="guide: the table of paths",
    ),
    _on_hip(
        id="hip-std-moe",
        statement="no standard-MoE conversions",
        fields=("enable_std_moe",),
        broken=lambda x: x.config.enable_std_moe,
        message="enable_std_moe {c.enable_std_moe}",
        remedy="use enable_std_moe=False, or the v1 API",
        source="guide: the table of paths",
    ),
    _on_hip(
        id="hip-scale-bytes",
        statement="scales of a token have a multiple of 4 bytes",
        fields=("scale_dim", "scale_type_size"),
        broken=lambda x: _scale_bytes(x) % 4 != 0,
        message="scale_dim {c.scale_dim} x scale_type_size {c.scale_type_size} is {value} bytes, no multiple of 4",
        remedy="pad scale_dim",
        source="results show scales as int32",
        value=_scale_bytes,
    ),
    _on_hip(
        id="hip-receive-cap",
        statement="on one node there is room for all tokens of all ranks: no receive cap",
        fields=("max_total_recv_tokens",),
        broken=lambda x: not x.config.is_internode and x.config.effective_max_recv < x.config.max_recv,
        message="max_total_recv_tokens {c.max_total_recv_tokens} is below the {c.max_recv} rows that may come",
        remedy="set it to 0, or use the v1 API, which has a cap",
        source="releases: tokens are never dropped",
    ),
)


def _lacks(feature: str, meaning: str, remedy: str) -> Restriction:
    return _at_call_on_hip(
        id=f"hip-call-{feature.replace('_', '-')}",
        statement=f"no {meaning}",
        fields=("feature",),
        broken=lambda x: x.feature == feature,
        message=f"feature {{feature}}: the {{backend}} backend has no {meaning}",
        remedy=remedy,
        source="guide: the table of paths",
    )


CALL: tuple[Restriction, ...] = (
    _lacks("replay", "replay of a routing", "dispatch without routing=, or use the v1 API"),
    _lacks("local_expert_count", "local_expert_count", "count the received ids, or use the v1 API"),
    _lacks("std_moe", "standard-MoE conversions", "use the v1 API"),
)
FEATURES = ("replay", "local_expert_count", "std_moe")

ROWS = (*INTS, *CONFIG, *RANGE_ROWS, *EVERY_BACKEND, *FLYDSL, *HIP, *CALL)
