"""How AITER builds ops, with and without gpu_per_node, and its test whose calls no recent release understands."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.clients.callers import check_received, check_result, kernel_type, new_op, on_ranks
from tests.clients.layer import Layer, Wire
from tests.rank_worker import RankContext

LAYER = Layer([9, 16], wire=Wire(torch.float8_e4m3fn, 128))
ONE_NODE = {"warp_num_per_block": 16, "block_num": 80}
SEVERAL_NODES = {"warp_num_per_block": 16, "block_num": 32, "rdma_block_num": 16}


def build(context: RankContext, kernel: str, fields: dict[str, Any]) -> Any:
    return new_op(LAYER, context, kernel_type=kernel_type(kernel), **fields)


def round_trip(context: RankContext, kernel: str, fields: dict[str, Any]) -> None:
    op, rank = build(context, kernel, fields), context.rank
    views = op.dispatch(LAYER.rows[rank], LAYER.weights[rank], LAYER.scales[rank], LAYER.ids[rank])
    check_received(LAYER, rank, views)
    rows, weights, scales, ids, _ = views
    check_result(LAYER, rank, op.combine(LAYER.experts(rank, rows, scales, weights, ids), None, LAYER.ids[rank])[0])


def test_construction_for_one_node():
    on_ranks(round_trip, "IntraNode", ONE_NODE | {"gpu_per_node": 2})


@pytest.mark.parametrize("kernel,fields", [("IntraNode", ONE_NODE), ("InterNodeV1", SEVERAL_NODES)])
def test_an_older_revision_without_gpu_per_node(kernel: str, fields: dict[str, Any]):
    """Its default, 8, must serve two ranks of one node."""
    on_ranks(round_trip, kernel, fields)


def test_construction_for_several_nodes():
    on_ranks(round_trip, "InterNodeV1", SEVERAL_NODES | {"gpu_per_node": 2})


def refused(context: RankContext, kernel: str, fields: dict[str, Any]) -> str:
    with pytest.raises(ValueError) as caught:
        build(context, kernel, fields)
    return str(caught.value)


def test_an_older_revision_is_refused_where_8_does_not_divide_the_world():
    for text in on_ranks(refused, "InterNodeV1", SEVERAL_NODES | {"world_size": 12}):
        assert "gpu_per_node 8 does not divide world_size 12" in text


def three_arguments(context: RankContext) -> None:
    """Refused before anything is sent: the op serves the next call."""
    op, rank = build(context, "IntraNode", ONE_NODE), context.rank
    with pytest.raises(TypeError, match="indices"):
        op.dispatch(LAYER.rows[rank], LAYER.weights[rank], LAYER.ids[rank])
    with pytest.raises(ValueError, match="unpack"):
        rows, weights, ids, count = op.dispatch(
            LAYER.rows[rank], LAYER.weights[rank], LAYER.scales[rank], LAYER.ids[rank]
        )
    check_received(LAYER, rank, op.dispatch(LAYER.rows[rank], LAYER.weights[rank], LAYER.scales[rank], LAYER.ids[rank]))


def test_its_stale_test_is_refused():
    on_ranks(three_arguments)
