"""The regions between nodes: which, how large, for any object with the fields."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from mori.ops.dispatch_combine_v2.internode_regions import internode_regions

BASE = {
    "world_size": 16,
    "gpu_per_node": 8,
    "hidden_dim": 7168,
    "max_num_inp_token_per_rank": 128,
    "num_experts_per_rank": 32,
    "num_experts_per_token": 8,
    "max_token_type_size": 2,
    "max_total_recv_tokens": 0,
    "scale_dim": 32,
    "scale_type_size": 4,
    "num_qp_per_pe": 2,
}
RECORD = 7168 * 2 + 8 * 8 + 4 + 128
# nodes 2, tokens 128, rows 16 x 128
EXPECTED = {
    "inter_dispatch_inp": 2 * 128 * RECORD,
    "inter_combine_inp": 2048 * RECORD,
    "inter_staging": 4 * 128 * RECORD,
    "inter_dispatch_out": 2048 * 14336,
    "inter_combine_out": 128 * 14336,
    "inter_dispatch_staging": 128 * RECORD,
    "inp_weights": 2048 * 32,
    "dispatch_out_weights": 2048 * 32,
    "combine_out_weights": 128 * 32,
    "out_indices": 2048 * 32,
    "recv_token_num": 16 * 4 * 2 * 2,
    "node_recv_token_num": 16,
    "disp_tok_offset": 4,
    "disp_tok_id_to_src_tok_id": 16 * 128 * 32 * 4,
    "cross_device_barrier": 16 * 4 * 2 * 8,
    "inter_node_chunk_flag": 2 * 128 * 8,
    "out_scales": 2048 * 128,
}


def regions(**changes: Any) -> list[tuple[str, int]]:
    return internode_regions(SimpleNamespace(**(BASE | changes)))


def test_sizes_and_order():
    assert regions() == list(EXPECTED.items())


@pytest.mark.parametrize(
    "changes",
    [
        {"world_size": 8},
        {"scale_dim": 0},
        {"scale_type_size": 0},
        {"max_total_recv_tokens": 256},
        {"hidden_dim": 16, "num_experts_per_token": 1},
    ],
)
def test_other_shapes(changes: dict[str, Any]):
    got = dict(regions(**changes))
    config = SimpleNamespace(**(BASE | changes))
    scales = config.scale_dim * config.scale_type_size
    assert list(got) == [name for name in EXPECTED if scales or name != "out_scales"]
    assert min(got.values()) > 0
    slots = 2 * (config.world_size // 8) * config.max_num_inp_token_per_rank
    slot_bytes = config.hidden_dim * 2 + 4 * config.num_experts_per_token
    assert got["inter_staging"] >= slots * slot_bytes
    rows = config.max_total_recv_tokens or config.world_size * 128
    assert got["out_indices"] == rows * config.num_experts_per_token * 4


@pytest.mark.parametrize("gpu_per_node", [6, 0])
def test_nodes_are_equal(gpu_per_node: int):
    with pytest.raises(ValueError, match=f"gpu_per_node {gpu_per_node} does not divide world_size 16"):
        regions(gpu_per_node=gpu_per_node)
