"""For each row of the table of restrictions: what it refuses, and the nearest thing that it does not."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

import mori
from mori.cco.communicator import _agree
from mori.ops import restrictions
from mori.ops.config import check_config
from mori.ops.restriction import INT32_MAX, MAX_24_BITS, RANGES
from mori.ops.restrictions_v2 import INT_FIELDS
from mori.ops.validation import DISPATCH_RULES, check_arguments

from .configs import make_config

BF16, F32 = torch.bfloat16, torch.float32
FP8, FNUZ, FP4 = torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float4_e2m1fn_x2
KernelType = mori.ops.EpDispatchCombineKernelType

FIELDS_V1: dict[str, Any] = {
    "data_type": BF16,
    "rank": 0,
    "world_size": 8,
    "hidden_dim": 7168,
    "scale_dim": 0,
    "scale_type_size": 1,
    "max_token_type_size": 2,
    "max_num_inp_token_per_rank": 128,
    "num_experts_per_rank": 32,
    "num_experts_per_token": 8,
}


class Pair(NamedTuple):
    """`refused` and `legal` are changes of a legal config, on `arch`; or `facts` of a case beside the config. Rows that
    need more than a case have `calls` instead: one that raises, one that does not."""

    refused: dict[str, Any] = {}
    legal: dict[str, Any] = {}
    arch: str = "host"
    legal_arch: str | None = None
    facts: tuple[dict[str, Any], dict[str, Any]] = ({}, {})
    calls: tuple[Callable[[], object], Callable[[], object]] | None = None


def legs(dispatch: torch.dtype, combine: torch.dtype, **others: Any) -> dict[str, Any]:
    return {"dispatch_data_type": dispatch, "combine_data_type": combine, **others}


def v1_config(**changes: Any) -> mori.ops.EpDispatchCombineConfig:
    return mori.ops.EpDispatchCombineConfig(**(FIELDS_V1 | changes))


def _dispatch_with_ids(dtype: torch.dtype) -> Callable[[], object]:
    tensors = {"input": torch.zeros(2, 16, dtype=BF16), "indices": torch.zeros(2, 8, dtype=dtype)}
    limits = check_config(v1_config())
    return lambda: check_arguments("dispatch", DISPATCH_RULES, tensors, limits, torch.device("cpu"))


def _agreement(*values: int) -> Callable[[], object]:
    return lambda: _agree([{"hidden_dim": value} for value in values], "EpDispatchCombineOp")


def _on_communicator(rank: int) -> dict[str, Any]:
    return {"communicator": SimpleNamespace(rank=rank, nranks=8)}


def _range_pairs(api: str, fields: list[str]) -> dict[str, Pair]:
    pairs = {}
    for field in fields:
        smallest, largest = RANGES[field]
        if api == "v1":
            pairs[f"{api}-int-{field}"] = Pair({field: 16.0}, {field: 1})
        outside = largest + 1 if smallest < 0 or field == "world_size" else smallest - 1
        wide = {"combine_warp_num_per_block": 16} if api == "v2" else {}  # room for a world that is too large
        pairs[f"{api}-range-{field}"] = Pair({field: outside} | wide, {field: max(smallest, 0)})
    return pairs


BLOCKWISE = {"quant_type": "fp8_blockwise"}
NODES = {"gpu_per_node": 4}
SCATTER = {"combine_mode": "scatter"}

PAIRS: dict[str, Pair] = {
    **_range_pairs("v1", list(RANGES)),
    "v1-rank": Pair({"rank": 8}, {"rank": 7}),
    "v1-gpu-per-node": Pair({"gpu_per_node": 3}, {"gpu_per_node": 8}),
    "v1-row-bytes": Pair({"hidden_dim": MAX_24_BITS // 2 + 1}, {"hidden_dim": MAX_24_BITS // 2}),
    "v1-expert-ids": Pair({"num_experts_per_rank": 2**28}, {"num_experts_per_rank": 2**28 - 1}),
    "v1-flat-index": Pair(
        {"world_size": 16, "gpu_per_node": 16, "max_num_inp_token_per_rank": 2**23},
        {"world_size": 16, "gpu_per_node": 16, "max_num_inp_token_per_rank": 2**23 - 1},
    ),
    "v1-nodes": Pair({"kernel_type": KernelType.InterNode, "gpu_per_node": 4}, {"kernel_type": KernelType.InterNode}),
    "v1-fp4-wire": Pair({"quant_type": "fp4_blockwise"}, {"quant_type": "fp4_blockwise"}, "gfx942", "gfx950"),
    "v1-agreement": Pair(calls=(_agreement(7168, 4096), _agreement(7168, 7168))),
    "arithmetic": Pair(arch="sm_90", facts=({"kernel": "combine_fp8_fnuz"}, {"kernel": "combine_fp8_ocp"})),
    "v1-blockwise-kernel-type": Pair(
        BLOCKWISE | {"kernel_type": KernelType.InterNode}, BLOCKWISE | {"kernel_type": KernelType.AsyncLL}
    ),
    "v1-blockwise-dtype": Pair(BLOCKWISE, BLOCKWISE, facts=({"dtype": F32}, {"dtype": BF16})),
    "v1-blockwise-in-place": Pair(BLOCKWISE, BLOCKWISE, facts=({"external": False}, {"external": True})),
    "int32-ids": Pair(calls=(_dispatch_with_ids(torch.int64), _dispatch_with_ids(torch.int32))),
    # ---- v2, when the config is made
    "v2-gpu-per-node": Pair({"gpu_per_node": 3}, {"gpu_per_node": 4}),
    "v2-num-qp-per-pe": Pair({"num_qp_per_pe": 0}, {"num_qp_per_pe": 1}),
    "v2-leg-dtypes": Pair({"dispatch_data_type": FP8}, legs(FP8, BF16)),
    "v2-quant-type": Pair({"quant_type": "fp9"}, {"quant_type": "fp8_direct_cast"}),
    "v2-internode-kernel": Pair({"internode_kernel": "v1"}, {"internode_kernel": "v2_ll"}),
    "v2-auto-ll-tokens": Pair({"internode_auto_ll_max_tokens": -1}, {"internode_auto_ll_max_tokens": 0}),
    "v2-combine-mode": Pair({"combine_mode": "push"}, SCATTER),
    "v2-quant-between-nodes": Pair(BLOCKWISE | NODES, BLOCKWISE),
    "v2-payload-dtype": Pair({"data_type": torch.float16}, {"data_type": BF16}),
    "v2-row-bytes": Pair({"hidden_dim": 7172}, {"hidden_dim": 7176}),
    "v2-two-dtypes": Pair(legs(FP8, BF16, **SCATTER), legs(FP8, BF16)),
    "v2-combine-fp4-of-others": Pair(legs(BF16, FP4), legs(FP4, BF16)),
    "v2-combine-row-bytes": Pair(legs(F32, BF16, hidden_dim=4), legs(F32, BF16, hidden_dim=8)),
    "v2-max-token-type-size": Pair(legs(FP8, BF16, max_token_type_size=1), legs(FP8, BF16, max_token_type_size=2)),
    "v2-fp8-flavour": Pair({"data_type": FNUZ}, {"data_type": FNUZ}, "gfx950", "gfx942"),
    "v2-schedule": Pair(
        {"schedule": ((64, 1, 1, 1, 8), (8, 1, 1, 1, 8))}, {"schedule": ((8, 1, 1, 1, 8), (64, 1, 1, 1, 8))}
    ),
    "v2-world-size-of-a-block": Pair(
        {"world_size": 65, "gpu_per_node": 65, "combine_warp_num_per_block": 1},
        {"world_size": 64, "gpu_per_node": 64, "combine_warp_num_per_block": 1},
    ),
    # ---- v2, when an op is built
    **{f"v2-int-{field}": Pair({field: 16.0}, {field: 8}) for field in INT_FIELDS},
    **_range_pairs("v2", [row.fields[0] for row in restrictions.TABLE if row.id.startswith("v2-range-")]),
    "v2-flat-index": Pair(
        {"world_size": 16, "max_num_inp_token_per_rank": 2**23},
        {"world_size": 16, "max_num_inp_token_per_rank": 2**23 - 1},
    ),
    "v2-expert-ids": Pair({"num_experts_per_rank": INT32_MAX // 8 + 1}, {"num_experts_per_rank": INT32_MAX // 8}),
    "v2-row-bytes-of-a-header": Pair({"hidden_dim": 2**23}, {"hidden_dim": 2**23 - 8}),
    "v2-communicator": Pair({"rank": 1}, {"rank": 1}, facts=(_on_communicator(0), _on_communicator(1))),
    "v2-agreement": Pair(calls=(_agreement(8, 16), _agreement(8, 8))),
    "flydsl-not-built": Pair(facts=({"backend": "flydsl"}, {"backend": "hip"})),
    "flydsl-nodes": Pair(NODES, {"gpu_per_node": 8}),
    "flydsl-fp4-quant": Pair({"quant_type": "fp4_blockwise"}, BLOCKWISE),
    "flydsl-two-dtypes-quant": Pair(legs(FP8, BF16, **BLOCKWISE), legs(FP8, BF16)),
    "flydsl-scatter-dtype": Pair(SCATTER | {"data_type": FP8}, SCATTER | {"data_type": F32}),
    "flydsl-quant-dtype": Pair(BLOCKWISE | {"data_type": F32}, BLOCKWISE),
    "flydsl-quant-block": Pair(BLOCKWISE | {"hidden_dim": 7176}, BLOCKWISE),
    "flydsl-std-moe-dtype": Pair({"enable_std_moe": True, "data_type": F32}, {"enable_std_moe": True}),
    "flydsl-fp4-combine": Pair({"data_type": FP4}, {"data_type": FP4}, "gfx942", "gfx1250"),
    "hip-nodes": Pair(NODES, {"gpu_per_node": 8}),
    "hip-combine-dtype": Pair({"data_type": FP8}, legs(FP8, F32)),
    "hip-nodes-fp4": Pair(legs(FP4, BF16, **NODES), legs(FP8, BF16, **NODES)),
    "hip-nodes-topk": Pair(NODES | {"num_experts_per_token": 1}, NODES | {"num_experts_per_token": 2}),
    "hip-scatter": Pair(SCATTER, {"combine_mode": "gather"}),
    "hip-quant": Pair(BLOCKWISE, {"quant_type": "none"}),
    "hip-std-moe": Pair({"enable_std_moe": True}, {"enable_std_moe": False}),
    "hip-scale-bytes": Pair({"scale_dim": 3, "scale_type_size": 2}, {"scale_dim": 2, "scale_type_size": 2}),
    "hip-receive-cap": Pair({"max_total_recv_tokens": 792}, {"max_total_recv_tokens": 793}),
    **{
        f"hip-call-{feature.replace('_', '-')}": Pair(facts=({"feature": feature}, {"feature": None}))
        for feature in ("replay", "local_expert_count", "std_moe")
    },
}

MAKERS: dict[str, Callable[..., Any]] = {"v1": v1_config, "v2": make_config, "both": v1_config}
