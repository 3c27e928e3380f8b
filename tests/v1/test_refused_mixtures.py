"""Arguments and settings that are fine one by one and wrong together, or out of all proportion."""

from __future__ import annotations

import threading

import pytest
import torch

from tests.rank_worker import RankContext
from tests.ranks import pool


def new_op(context: RankContext, scales: int = 0, cap: int = 0):
    import mori

    return mori.ops.EpDispatchCombineOp(
        mori.ops.EpDispatchCombineConfig(
            data_type=torch.bfloat16,
            rank=context.rank,
            world_size=context.world_size,
            hidden_dim=16,
            scale_dim=scales,
            scale_type_size=4,
            max_token_type_size=2,
            max_num_inp_token_per_rank=8,
            num_experts_per_rank=2,
            num_experts_per_token=2,
            max_total_recv_tokens=cap,
        )
    )


def tokens(context: RankContext, count: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.arange(2 * count, dtype=torch.int32).view(count, 2) % (2 * context.world_size)
    return torch.full((count, 16), 1.0 + context.rank, dtype=torch.bfloat16), ids


def combine_of_results(context: RankContext) -> list[str]:
    op = new_op(context)
    rows, ids = tokens(context)
    weights = torch.ones(4, 2)
    received, received_weights, _, _, _ = op.dispatch(rows, weights, None, ids)
    out, out_weights = op.combine(received, received_weights, ids)
    expected = out[:4].clone()
    refused = []
    for arguments in ((out, None, ids), (received, out_weights, ids), (out[:4], None, ids)):
        try:
            op.combine(*arguments)
        except ValueError as error:
            refused.append(str(error))
    again, _ = op.combine(received, received_weights, ids)
    assert torch.equal(again[:4], expected)
    return refused


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_combine_of_the_ops_own_results_is_refused(world_size: int):
    for refused in pool(world_size).run(combine_of_results):
        assert len(refused) == 3
        assert all("overlaps the results" in text and "clone" in text for text in refused)
        assert "weights" in refused[1]


def scales_on_one_rank(context: RankContext) -> tuple[str, bool]:
    import mori

    op = new_op(context, scales=2)
    rows, ids = tokens(context)
    scales = torch.full((4, 2), 100.0 + context.rank)
    op.dispatch(rows, None, scales, ids)
    try:
        op.dispatch(rows, None, scales if context.rank == 0 else None, ids)
    except mori.CallFault as error:
        text = f"{type(error).__name__}: {error}"
    else:
        text = ""
    _, _, received, _, count = op.dispatch(rows, None, scales + 50, ids)
    return text, bool((received[: int(count[0])] >= 150).all())


def test_scales_on_some_ranks_only_are_a_fault_on_all():
    for text, recovered in pool(3).run(scales_on_one_rank):
        assert text.startswith("RowMismatch") and "with scales" in text and "without scales" in text
        assert recovered


def overflow_then_stats(context: RankContext) -> dict:
    import mori

    op = new_op(context, cap=context.world_size)
    rows, ids = tokens(context, 8)
    with pytest.raises(mori.errors.ReceiveOverflow):
        op.dispatch(rows, None, None, torch.zeros_like(ids))
    return op.stats()


def test_a_dispatch_that_delivered_nothing_counts_no_rows():
    for stats in pool(2).run(overflow_then_stats):
        assert sum(stats["rows_sent"]) == sum(stats["rows_received"]) == stats["dispatches"] == 0


def too_many_threads(context: RankContext) -> str:
    with pytest.raises(Exception, match="MORI_HOST_THREADS") as caught:
        new_op(context)
    return str(caught.value)


def test_an_absurd_number_of_threads_is_refused():
    for text in pool(1, MORI_HOST_THREADS="100000").run(too_many_threads):
        assert "100000" in text and "256" in text


def windows_and_views(context: RankContext) -> None:
    from mori import shmem  # noqa: F401 - initialised by the pool
    from mori.shmem import state

    comm = state.current().communicator
    comm.allocate_symmetric(0, "reclaiming memory").close()
    used = comm.used_bytes
    memory = comm.alloc_mem(4096)
    with pytest.raises(ValueError, match=f"peer {context.world_size} is not a rank"):
        comm.view(memory.offset, (4,), torch.float32, peer=context.world_size)
    window = comm.register_window(memory.ptr, 4096)
    address = memory.ptr
    memory.close()
    comm.allocate_symmetric(64, "a collective call").close()
    other = comm.alloc_mem(4096)
    assert other.ptr != address, "memory under an open window was used again"
    window.close()
    other.close()
    comm.allocate_symmetric(0, "reclaiming memory").close()
    assert comm.used_bytes == used


def test_an_open_window_keeps_its_memory_and_views_stay_within_the_ranks():
    pool(2).run(windows_and_views)


def test_communicators_come_and_go_on_several_threads():
    from mori.cco import Communicator, get_unique_id

    failures: list[BaseException] = []

    def rank(ids: list, number: int) -> None:
        try:
            for unique_id in ids:
                Communicator.init(2, number, unique_id, 1 << 20).destroy()
        except BaseException as error:
            failures.append(error)

    threads = []
    for _ in range(3):
        ids = [get_unique_id() for _ in range(12)]
        threads += [threading.Thread(target=rank, args=(ids, number), daemon=True) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "a communicator hangs"
    assert not failures, failures
