"""The call forms of wrappers that look like DeepEP: rows packed by local expert, everything by keyword."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.clients.callers import check_received, check_result, kernel_type, new_op, on_ranks
from tests.clients.layer import Layer
from tests.rank_worker import RankContext
from tests.v1.exercise import require_same_bits

LAYERS = [Layer(n, seed=n[0]) for n in ([9, 16], [16, 0], [1, 3])]
TO_ONE_RANK = [Layer([5, 7], only_rank=1)]
KERNELS = {"IntraNode": {}, "InterNodeV1LL": {"gpu_per_node": 2, "rdma_block_num": 32}}
GRID = {"block_num": 80, "warp_per_block": 16}


class Buffer:
    """The wrapper: low-latency calls in one step, or a plain dispatch and combine with conversions."""

    def __init__(self, layer: Layer, context: RankContext, kernel: str = "IntraNode") -> None:
        fields: dict[str, Any] = {"num_qp_per_pe": 24, "kernel_type": kernel_type(kernel)}
        self.op = new_op(layer, context, **fields | KERNELS[kernel])

    def low_latency_dispatch(self, x: torch.Tensor, topk_weights: torch.Tensor, topk_idx: torch.Tensor) -> tuple:
        return self.op.dispatch_standard_moe(
            input=x, weights=topk_weights, scales=None, indices=topk_idx, block_num=64, warp_per_block=16
        )

    def low_latency_combine(self, packed: torch.Tensor, topk_idx: torch.Tensor) -> torch.Tensor:
        out, weights = self.op.combine_standard_moe(
            input=packed, weights=None, indices=topk_idx, block_num=64, warp_per_block=16
        )
        assert weights is None
        return out

    def dispatch(self, x: torch.Tensor, topk_weights: torch.Tensor | None, topk_idx: torch.Tensor) -> tuple:
        return self.op.dispatch(input=x, weights=topk_weights, scales=None, indices=topk_idx)

    def pack(self, rows: torch.Tensor, row_ids: torch.Tensor) -> tuple:
        return self.op.convert_dispatch_output(dispatch_out_x=rows, dispatch_out_topk_idx=row_ids, **GRID)

    def unpack_and_combine(self, packed: tuple, topk_idx: torch.Tensor) -> torch.Tensor:
        x, _, source, layout = packed
        view = self.op.convert_combine_input(
            packed_recv_x=x, packed_recv_src_info=source, packed_recv_layout_range=layout, **GRID
        )
        out, _ = self.op.combine(input=view, weights=None, indices=topk_idx, use_external_inp_buf=0, **GRID)
        return out


def check_packed(layer: Layer, rank: int, packed: tuple) -> None:
    """Every expert has the tokens that name it, each once, in any order; source indices tell which."""
    x, count, source, layout = packed
    capacity = layer.world_size * layer.max_tokens
    assert tuple(x.shape) == (layer.experts_per_rank, capacity, layer.hidden) and x.dtype == layer.wire.dtype
    assert count.dtype == torch.int32 and count.tolist() == layer.local_expert_count(rank), count
    assert tuple(source.shape) == (layer.experts_per_rank, capacity) and source.dtype == torch.int32
    assert layout.dtype == torch.int64 and layout.numel() == 0
    expected = layer.received(rank)
    for expert in range(layer.experts_per_rank):
        number = int(count[expert])
        order = source[expert, :number].argsort()
        names_it = (expected.indices == rank * layer.experts_per_rank + expert).any(dim=1)
        require_same_bits(source[expert, order], expected.source_position[names_it], f"sources of expert {expert}")
        require_same_bits(x[expert, order], expected.rows[names_it], f"rows of expert {expert}")


def packed_experts(layer: Layer, packed: tuple) -> torch.Tensor:
    """Expert e multiplies by 1 + e; router weights are applied on the way back."""
    x, count, _, _ = packed
    out = torch.full_like(x, float("nan"))  # what nobody may read
    for expert in range(layer.experts_per_rank):
        number = int(count[expert])
        out[expert, :number] = x[expert, :number] * (1 + expert)
    return out


def in_one_step(context: RankContext, kernel: str, layers: list[Layer]) -> None:
    buffer, rank = Buffer(layers[0], context, kernel), context.rank
    for layer in layers:
        packed = buffer.low_latency_dispatch(layer.rows[rank], layer.weights[rank], layer.ids[rank])
        check_packed(layer, rank, packed)
        check_result(layer, rank, buffer.low_latency_combine(packed_experts(layer, packed), layer.ids[rank]))


@pytest.mark.parametrize("layers", [LAYERS, TO_ONE_RANK], ids=["balanced", "to one rank"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_packed_dispatch_and_combine(kernel: str, layers: list[Layer]):
    on_ranks(in_one_step, kernel, layers)


def by_conversion(context: RankContext, kernel: str, layers: list[Layer]) -> None:
    buffer, rank = Buffer(layers[0], context, kernel), context.rank
    for layer in layers:
        views = buffer.dispatch(layer.rows[rank], layer.weights[rank], layer.ids[rank])
        check_received(layer, rank, views)
        packed = buffer.pack(views[0], views[3])
        check_packed(layer, rank, packed)
        # A second conversion must not add to the counts of the first.
        check_packed(layer, rank, buffer.pack(views[0], views[3]))
        x, count, source, layout = packed
        answer = (packed_experts(layer, packed), count, source, layout)
        check_result(layer, rank, buffer.unpack_and_combine(answer, layer.ids[rank]))


@pytest.mark.parametrize("kernel", KERNELS)
def test_conversions_around_a_plain_dispatch_and_combine(kernel: str):
    on_ranks(by_conversion, kernel, LAYERS)


def without_weights(context: RankContext) -> None:
    """Normal mode of the wrapper: no weights, and combine from the tensor that it is given."""
    layer, rank = LAYERS[0], context.rank
    buffer = Buffer(layer, context)
    rows, weights, scales, row_ids, count = buffer.dispatch(layer.rows[rank], None, layer.ids[rank])
    check_received(layer, rank, (rows, weights, scales, row_ids, count), weights=False)
    ones = torch.ones_like(weights)
    answer = layer.experts(rank, rows, None, ones, row_ids)
    out, _ = buffer.op.combine(input=answer, weights=None, indices=layer.ids[rank], use_external_inp_buf=1, **GRID)
    factor = (1.0 + layer.ids[rank] % layer.experts_per_rank).sum(dim=1)
    assert torch.equal(out[: len(factor)].float(), layer.rows[rank].float() * factor[:, None])


def test_dispatch_without_weights():
    on_ranks(without_weights)


def other_kernel_types(context: RankContext, method: str) -> None:
    layer, rank = LAYERS[0], context.rank
    op = new_op(layer, context, kernel_type=kernel_type("AsyncLL"), gpu_per_node=2)
    with pytest.raises(ValueError, match=method):
        op.dispatch_standard_moe(input=layer.rows[rank], weights=None, scales=None, indices=layer.ids[rank])


def test_packed_calls_are_refused_for_other_kernel_types():
    on_ranks(other_kernel_types, "dispatch_standard_moe")


def switched_off(context: RankContext) -> None:
    layer, rank = LAYERS[0], context.rank
    buffer = Buffer(layer, context)
    with pytest.raises(RuntimeError, match=r"dispatch_standard_moe is not available.*ENABLE_STANDARD_MOE_ADAPT=ON"):
        buffer.low_latency_dispatch(layer.rows[rank], layer.weights[rank], layer.ids[rank])
    with pytest.raises(RuntimeError, match="convert_dispatch_output is not available"):
        buffer.pack(layer.rows[rank], layer.ids[rank])


def test_packed_calls_of_a_build_without_them():
    on_ranks(switched_off, ENABLE_STANDARD_MOE_ADAPT="OFF")
