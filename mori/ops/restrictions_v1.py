"""What v1 ops refuse, and what kernels of either API cannot do on an arch."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch

from mori import archs
from mori.errors import ConfigMismatch

from .kernel_types import (
    QUANT_NAMES,
    SINGLE_NODE,
    EpDispatchCombineQuantType,
    normalize_kernel_type,
    normalize_quant_type,
)
from .kernels import BLOCKWISE_KERNEL_TYPES, spell
from .restriction import INT32_MAX, MAX_24_BITS, RANGES, Case, Restriction, int_row, range_row

_at_construction = partial(Restriction, api="v1", stage="construction")
_at_call = partial(Restriction, api="v1", stage="call")


def ranks_of_a_node(case: Case) -> int:
    """A node that could hold more ranks than there are holds all of them: the default 8 serves every smaller world."""
    return int(min(case.config.gpu_per_node, case.config.world_size))


def _nodes(case: Case) -> int:
    return int(case.config.world_size // ranks_of_a_node(case))


def _quant_name(case: Case) -> str:
    return QUANT_NAMES[normalize_quant_type(case.config.quant_type)]


def _is_blockwise(case: Case) -> bool:
    return normalize_quant_type(case.config.quant_type) in BLOCKWISE_KERNEL_TYPES


def _offers_blockwise(case: Case) -> bool:
    kernel_type = normalize_kernel_type(case.config.kernel_type)
    return kernel_type in BLOCKWISE_KERNEL_TYPES[normalize_quant_type(case.config.quant_type)]


def _quantises_to_fp4(case: Case) -> bool:
    quant_type = normalize_quant_type(case.config.quant_type)
    return quant_type is EpDispatchCombineQuantType.Fp4BlockwiseQuant and case.config.use_external_inp_buf


class _Blockwise(NamedTuple):
    name: str
    kernel_types: str


def _blockwise(case: Case) -> _Blockwise:
    return _Blockwise(_quant_name(case), spell(BLOCKWISE_KERNEL_TYPES[normalize_quant_type(case.config.quant_type)]))


def _largest_tokens(case: Case) -> int:
    return int(INT32_MAX // case.config.world_size**2)


def _arithmetic(case: Case) -> str:
    fp4 = "fp4" if case.arch.fp4 else "no fp4"
    return f"{' or '.join(sorted(case.arch.fp8))}, and {fp4}"


RANGE_ROWS = tuple(
    row
    for field in RANGES
    for row in (int_row("v1", "construction", field, TypeError), range_row("v1", "construction", field))
)

CONSTRUCTION: tuple[Restriction, ...] = (
    _at_construction(
        id="v1-rank",
        statement="`rank` is below `world_size`",
        fields=("rank", "world_size"),
        broken=lambda x: x.config.rank >= x.config.world_size,
        message="rank {c.rank} is outside 0..{value} for world_size {c.world_size}",
        remedy="pass shmem_mype() and shmem_npes()",
        source="contract of the config",
        value=lambda x: x.config.world_size - 1,
    ),
    _at_construction(
        id="v1-gpu-per-node",
        statement="`gpu_per_node` divides `world_size`, or is at least that",
        fields=("gpu_per_node", "world_size"),
        broken=lambda x: x.config.world_size % ranks_of_a_node(x) != 0,
        message="gpu_per_node {c.gpu_per_node} does not divide world_size {c.world_size}",
        remedy="set it to the number of ranks on one node ({c.world_size} if they share one)",
        source="nodes have equally many ranks; the default 8 serves smaller worlds",
    ),
    _at_construction(
        id="v1-row-bytes",
        statement=f"the largest row, `hidden_dim` x `max_token_type_size`, has at most {MAX_24_BITS} bytes",
        fields=("hidden_dim", "max_token_type_size"),
        broken=lambda x: x.config.hidden_dim * x.config.max_token_type_size > MAX_24_BITS,
        message="hidden_dim {c.hidden_dim} x max_token_type_size {c.max_token_type_size} exceeds the largest row, "
        f"{MAX_24_BITS} bytes",
        remedy="with this element size hidden_dim may be at most {value}",
        source="headers carry row bytes in 24 bits",
        value=lambda x: MAX_24_BITS // x.config.max_token_type_size,
    ),
    _at_construction(
        id="v1-expert-ids",
        statement="int32 can name every expert",
        fields=("world_size", "num_experts_per_rank"),
        broken=lambda x: x.config.world_size * x.config.num_experts_per_rank > INT32_MAX,
        message="world_size {c.world_size} x num_experts_per_rank {c.num_experts_per_rank} exceeds what int32 expert "
        "ids can name",
        remedy="num_experts_per_rank may be at most {value}",
        source="ids are int32",
        value=lambda x: INT32_MAX // x.config.world_size,
    ),
    # The null index is world_size * (world_size * M); it and every index below it must fit.
    _at_construction(
        id="v1-flat-index",
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
        id="v1-nodes",
        statement="all ranks share a node: nothing travels between nodes in this version",
        fields=("kernel_type", "world_size", "gpu_per_node"),
        broken=lambda x: _nodes(x) > 1 and normalize_kernel_type(x.config.kernel_type) not in SINGLE_NODE,
        message="kernel_type {c.kernel_type} over {value} nodes (world_size {c.world_size}, gpu_per_node "
        "{c.gpu_per_node}) is not built in this version of mori, on one node it is",
        remedy="gpu_per_node={c.world_size} says that all ranks share a node",
        source="not built",
        error=NotImplementedError,
        value=_nodes,
    ),
    _at_construction(
        id="v1-fp4-wire",
        statement="`quant_type` fp4_blockwise needs an arch that converts fp4; not gfx942",
        fields=("quant_type",),
        broken=lambda x: _quantises_to_fp4(x) and x.arch.fp4 is None,
        message="quant_type {value} on {arch.name}, which cannot convert fp4",
        remedy='use "fp8_blockwise" or "none"; fp4 rows can still be dispatched',
        source="guide: FP4 conversion requires gfx950 or gfx1250; here sm_90 and CPUs do it by arithmetic",
        value=_quant_name,
    ),
    _at_construction(
        id="v1-agreement",
        statement="ranks agree on every field that shapes memory or what travels: not on `rank`, launch sizes, "
        "`data_type` and `use_external_inp_buf`",
        fields=(),
        broken=None,
        message="ranks disagree",
        remedy="Pass the same value on every rank",
        source="releases run on with mixed layouts",
        error=ConfigMismatch,
        where="the communicator, when memory is allocated",
    ),
)

CALL: tuple[Restriction, ...] = (
    _at_call(
        id="arithmetic",
        api="both",
        statement="rows of fp8 are added up in the flavour of the arch, rows of fp4 where the arch converts them; "
        "moving either is possible everywhere",
        fields=("kernel",),
        broken=lambda x: x.kernel is not None and not archs.runs_on(x.kernel, x.arch),
        message="{arch.name} cannot run {kernel}: it adds up fp8 of flavour {value}",
        remedy="combine rows of another dtype, or without this quant_type; moving rows is possible for all",
        source="guide: representations differ by target, gfx942 lacks the conversion of fp4",
        error=TypeError,
        value=_arithmetic,
    ),
    _at_call(
        id="v1-blockwise-kernel-type",
        statement="block-wise combines: fp8_blockwise in IntraNode, IntraNodeLL and AsyncLL, fp4_blockwise in "
        "IntraNode and IntraNodeLL",
        fields=("kernel_type", "quant_type"),
        broken=lambda x: x.config is not None and _is_blockwise(x) and not _offers_blockwise(x),
        message="{value.name} combine currently only supports {value.kernel_types} combine, got kernel_type "
        "{c.kernel_type}",
        remedy="use quant_type 'none' or 'fp8_direct_cast'",
        source="as in releases",
        value=_blockwise,
    ),
    _at_call(
        id="v1-blockwise-dtype",
        statement="block-wise combines take bfloat16 rows",
        fields=("dtype",),
        broken=lambda x: x.dtype not in (None, torch.bfloat16) and _is_blockwise(x),
        message="{value} combine only supports bf16, got {dtype}",
        remedy="pass input.to(torch.bfloat16)",
        source="as in releases",
        value=_quant_name,
    ),
    _at_call(
        id="v1-blockwise-in-place",
        statement="block-wise combines take rows that are passed, not those of the registered buffer",
        fields=(),
        broken=lambda x: x.external is False and _is_blockwise(x),
        message="{value} combine currently requires --zero-copy 0 (useExternalInpBuffer=True)",
        remedy="rows in the registered buffer cannot be quantised in place, pass use_external_inp_buf=1",
        source="as in releases",
        value=_quant_name,
    ),
    _at_call(
        id="int32-ids",
        api="both",
        statement="expert ids are int32 (or uint32), in both APIs",
        fields=("indices",),
        broken=None,
        message="must be int32 (or uint32), got torch.int64",
        remedy="pass indices.to(torch.int32)",
        source="releases read int64 ids as pairs of int32",
        error=TypeError,
        where="the rules for tensors of a call, mori/ops/validation.py",
    ),
)
ROWS = (*RANGE_ROWS, *CONSTRUCTION, *CALL)
