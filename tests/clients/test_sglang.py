"""The call forms of SGLang: fields filtered by the dataclass, one dispatcher for whole calls and halves, counts."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks.tolerances import block_maxima, require_close
from tests import reference
from tests.clients.callers import check_received, check_result, kernel_type, known_fields, on_ranks
from tests.clients.layer import Layer, Wire
from tests.rank_worker import RankContext

FP4 = Wire(torch.float4_e2m1fn_x2, 32, torch.float8_e8m0fnu)
WIRES = {
    "bf16": Wire(),
    "fp8": Wire(torch.float8_e4m3fn, 128),
    "mxfp8": Wire(torch.float8_e4m3fn, 32, torch.float8_e8m0fnu),
    "fp4": FP4,
}
# kernel: block_num, warp_num_per_block, rdma_block_num
GEOMETRY = {"IntraNode": (80, 16, 0), "InterNodeV1": (64, 8, 32), "InterNodeV1LL": (64, 8, 32), "AsyncLL": (64, 8, 32)}


def init_op(layer: Layer, rank: int, kernel: str, quant_type: str = "none", cap: int = 0) -> Any:
    """All fields, and one that only another release has. `hidden_dim` is the logical one for fp4 rows as well."""
    import mori

    block_num, warps, rdma_blocks = GEOMETRY[kernel]
    wanted = layer.config_fields(
        rank,
        warp_num_per_block=warps,
        block_num=block_num,
        max_total_recv_tokens=cap,
        use_external_inp_buf=True,
        kernel_type=kernel_type(kernel),
        gpu_per_node=min(8, layer.world_size),
        rdma_block_num=rdma_blocks,
        num_qp_per_pe=2,
        quant_type=quant_type,
        field_of_another_release=1,
    )
    config = mori.ops.EpDispatchCombineConfig(**known_fields(wanted))
    assert config.hidden_dim == layer.hidden
    return mori.ops.EpDispatchCombineOp(config)


class Dispatcher:
    """Chooses whole calls or halves by the kernel type of the op."""

    def __init__(self, op: Any, record: bool) -> None:
        from mori.ops import EpDispatchCombineKernelType

        self.op, self.record = op, record
        self.is_async = op.config.kernel_type is EpDispatchCombineKernelType.AsyncLL

    def dispatch(self, layer: Layer, rank: int, flag_in_send_only: bool = False) -> tuple:
        arguments = (layer.rows[rank], layer.weights[rank], layer.scales[rank], layer.ids[rank])
        if not self.is_async:
            return self.op.dispatch(*arguments, call_local_expert_count=self.record)
        views = self.op.dispatch_send(*arguments, call_local_expert_count=self.record)
        if flag_in_send_only:
            self.op.dispatch_recv()
        else:
            self.op.dispatch_recv(call_local_expert_count=self.record)
        return views

    def combine(self, rows: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        if not self.is_async:
            return self.op.combine(rows, None, ids)[0]
        result = self.op.combine_send(rows, None, ids)[0]
        self.op.combine_recv()
        return result


def run_layers(context: RankContext, kernel: str, layers: list[Layer], flag_in_send_only: bool) -> None:
    rank = context.rank
    dispatcher = Dispatcher(init_op(layers[0], rank, kernel), record=True)
    for layer in layers:
        views = dispatcher.dispatch(layer, rank, flag_in_send_only)
        check_received(layer, rank, views)
        counts = dispatcher.op.local_expert_count
        assert counts.dtype == torch.int32 and counts.tolist() == layer.local_expert_count(rank), counts
        rows, weights, scales, ids, _ = views
        answer = layer.experts(rank, rows, scales, weights, ids)
        check_result(layer, rank, dispatcher.combine(answer, layer.ids[rank]))


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("kernel", GEOMETRY)
def test_dispatch_record_and_combine(kernel: str, wire: str):
    layers = [Layer(n, wire=WIRES[wire], seed=seed) for seed, n in enumerate(([9, 16], [0, 7], [16, 0]))]
    on_ranks(run_layers, kernel, layers, False)


def test_the_flag_of_the_send_half_is_honoured_when_rows_arrive():
    on_ranks(run_layers, "AsyncLL", [Layer(n, seed=n[0]) for n in ([9, 16], [3, 7])], True)


def quantised(context: RankContext, kernel: str, layer: Layer, quant_type: str) -> None:
    rank = context.rank
    dispatcher = Dispatcher(init_op(layer, rank, kernel, quant_type), record=False)
    rows, weights, scales, ids, _ = dispatcher.dispatch(layer, rank)
    answer = layer.experts(rank, rows, scales, weights, ids)
    result = dispatcher.combine(answer, layer.ids[rank])[: len(layer.rows[rank])]
    answers = []
    for peer in range(layer.world_size):
        got = layer.received(peer)
        answers.append(layer.experts(peer, got.rows, got.scales, got.weights, got.indices))
    maxima = [block_maxima(rows, 56) for rows in answers]
    require_close("result", result, layer.result(rank), quant_type, reference.combine(layer.routing, maxima)[rank])


# fp4_blockwise is for IntraNode and IntraNodeLL, V1 and V1LL know no blockwise type.
QUANTISED = {
    "fp8_direct_cast": ("IntraNode", "InterNodeV1", "InterNodeV1LL", "AsyncLL"),
    "fp8_blockwise": ("IntraNode", "AsyncLL"),
    "fp4_blockwise": ("IntraNode",),
}


@pytest.mark.parametrize("quant_type,kernel", [(name, kernel) for name, all_ in QUANTISED.items() for kernel in all_])
def test_quantised_combine(kernel: str, quant_type: str):
    on_ranks(quantised, kernel, Layer([9, 16], hidden=512), quant_type)


def capped(context: RankContext, layer: Layer, cap: int) -> None:
    """A cap from the environment that is below W x M."""
    op = init_op(layer, context.rank, "IntraNode", cap=cap)
    assert op.max_num_tokens_to_recv() == cap < layer.world_size * layer.max_tokens
    rows, weights, scales, ids, _ = Dispatcher(op, record=False).dispatch(layer, context.rank)
    assert rows.shape[0] == cap
    result = op.combine(layer.experts(context.rank, rows, scales, weights, ids), None, layer.ids[context.rank])[0]
    check_result(layer, context.rank, result)


def test_a_receive_cap():
    on_ranks(capped, Layer([8, 8]), 16)


def cached_ops(context: RankContext, layers: list[Layer]) -> None:
    """Up to four ops per process, one for each combination of arguments, used in turn."""
    rank = context.rank
    ops = [init_op(layer, rank, "IntraNode") for layer in layers]
    for _ in range(2):
        views = [Dispatcher(op, False).dispatch(layer, rank) for op, layer in zip(ops, layers, strict=True)]
        for op, layer, got in zip(ops, layers, views, strict=True):
            rows, weights, scales, ids, _ = got
            result = op.combine(layer.experts(rank, rows, scales, weights, ids), None, layer.ids[rank])[0]
            check_result(layer, rank, result)


def test_four_ops_in_turn():
    on_ranks(cached_ops, [Layer([5, 9], wire=wire, seed=seed) for seed, wire in enumerate(WIRES.values())])
