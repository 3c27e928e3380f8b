"""What a cross-library benchmark and engines without calls of their own read from an op."""

from __future__ import annotations

import pytest
import torch

from tests.clients.callers import check_received, check_result, kernel_type, new_op, on_ranks
from tests.clients.layer import Layer
from tests.rank_worker import RankContext

LAYER = Layer([9, 16])


def reads(context: RankContext) -> None:
    """Config attributes come back as they were given; sizes are those of the config."""
    import mori
    from mori.ops import EpDispatchCombineKernelType as KernelType

    op = new_op(LAYER, context, num_qp_per_pe=2)
    wanted = LAYER.config_fields(context.rank, num_qp_per_pe=2)
    assert {name: getattr(op.config, name) for name in wanted} == wanted
    assert op.config.kernel_type is KernelType.IntraNode and op.config.kernel_type == KernelType.IntraNode
    assert op.config.use_external_inp_buf is True and op.config.quant_type == "none"
    assert op.launch_config_mode == "MANUAL"
    assert op.auto_block_num is None and op.auto_warp_per_block is None
    assert isinstance(mori.shmem.shmem_num_qp_per_pe(), int) and mori.shmem.shmem_num_qp_per_pe() >= 1
    assert (mori.shmem.shmem_mype(), mori.shmem.shmem_npes()) == (context.rank, context.world_size)
    assert op.max_num_tokens_to_recv() == LAYER.world_size * LAYER.max_tokens


def test_what_the_benchmark_reads():
    on_ranks(reads)


def registered_buffer(context: RankContext, columns: int) -> None:
    """Zero copy with rows shorter than the config's, and launch sizes for each call."""
    op, rank = new_op(LAYER, context, use_external_inp_buf=False), context.rank
    x, ids = LAYER.rows[rank][:, :columns].contiguous(), LAYER.ids[rank]
    rows, *_, count = op.dispatch(x, LAYER.weights[rank], None, ids, block_num=64, warp_per_block=8)
    total = int(count)
    buffer = op.get_registered_combine_input_buffer(torch.bfloat16, hidden_dim=columns)
    assert tuple(buffer.shape) == (op.max_num_tokens_to_recv(), columns)
    buffer[:total].copy_(rows[:total])
    out, _ = op.combine(buffer, None, ids, block_num=64, warp_per_block=8)
    copies = torch.from_numpy(LAYER.routing.copies(rank))[:, None]
    assert torch.equal(out[: len(x)].float(), x.float() * copies)


@pytest.mark.parametrize("columns", [LAYER.hidden, LAYER.hidden // 2])
def test_the_registered_buffer_for_any_row_size(columns: int):
    on_ranks(registered_buffer, columns)


def halves(context: RankContext) -> None:
    op, rank = new_op(LAYER, context, kernel_type=kernel_type("AsyncLL"), gpu_per_node=2), context.rank
    for _ in range(2):
        views = op.dispatch_send(LAYER.rows[rank], LAYER.weights[rank], None, LAYER.ids[rank])
        op.dispatch_recv(warp_per_block=16)
        check_received(LAYER, rank, views)
        rows, weights, scales, ids, _ = views
        result, _ = op.combine_send(LAYER.experts(rank, rows, scales, weights, ids), None, LAYER.ids[rank])
        op.combine_recv(warp_per_block=16)
        check_result(LAYER, rank, result)


def test_launch_sizes_of_the_receive_halves():
    on_ranks(halves)


def returned_ids(context: RankContext) -> str:
    """The benchmark passes the ids that dispatch returned, all R rows of them."""
    op, rank = new_op(LAYER, context), context.rank
    rows, weights, scales, ids, _ = op.dispatch(LAYER.rows[rank], LAYER.weights[rank], None, LAYER.ids[rank])
    answer = LAYER.experts(rank, rows, scales, weights, ids)
    try:
        result, _ = op.combine(answer, None, ids)
    except ValueError as refused:
        return str(refused)
    check_result(LAYER, rank, result)
    return ""


def test_returned_ids_are_refused_by_default():
    for text in on_ranks(returned_ids):
        assert "32 rows" in text and "MORI_EP_LENIENT_INDICES=1" in text


def test_returned_ids_in_lenient_mode():
    assert on_ranks(returned_ids, MORI_EP_LENIENT_INDICES="1") == ["", ""]


def work_buffers(context: RankContext) -> None:
    """RTP-LLM and a fork of vLLM size the buffers of their experts by what may arrive at most."""
    op, rank = new_op(LAYER, context, max_total_recv_tokens=27), context.rank
    work = torch.empty(op.max_num_tokens_to_recv(), LAYER.hidden, dtype=torch.bfloat16)
    rows, weights, scales, ids, count = op.dispatch(LAYER.rows[rank], LAYER.weights[rank], None, LAYER.ids[rank])
    work.copy_(LAYER.experts(rank, rows, scales, weights, ids))  # the whole view fits
    assert int(count) <= len(work) == 28  # the cap, rounded up to a multiple of the world
    check_result(LAYER, rank, op.combine(work, None, LAYER.ids[rank])[0])


def test_work_buffers_sized_by_the_receive_cap():
    on_ranks(work_buffers)
