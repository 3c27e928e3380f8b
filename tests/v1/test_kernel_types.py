"""Every kernel type gives the same bits; AsyncLL does so in two halves, of which the first waits for nobody."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.rank_worker import RankContext
from tests.ranks import pool, private_pool
from tests.v1.cases import KERNEL_TYPES, Case, routing
from tests.v1.exercise import exercise, new_op, raises, require, require_same_bits
from tests.v1.storm import Round, Shape, halves, play, storm, storm_from
from tests.v1.storm import new_op as storm_op
from tests.v1.test_call_orders import steps_of
from tests.v1.test_lost_peers import DETECTION_SECONDS, kill_once_all_are_under_way, report_under_way


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("kernel_type", KERNEL_TYPES)
def test_all_kernel_types_give_the_reference_bits(world_size: int, kernel_type: str):
    case = Case(world_size, 167, 5, 3, 20, steps_of("DCDcCDdC", world_size, 20, 5, 3), values="special", scale_dim=3)
    pool(world_size).run(exercise, replace(case, kernel_type=kernel_type))


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("order", ["DDCC", "CCC", "DDDD", "DCCDCDCC", "DcCC", "ddCCd"])
def test_asynchronous_calls_in_any_order(world_size: int, order: str):
    case = Case(world_size, 40, 4, 3, 15, steps_of(order, world_size, 15, 4, 3), values="bits", scale_dim=2)
    pool(world_size).run(exercise, replace(case, kernel_type="AsyncLL"))


@pytest.mark.parametrize("quant_type", ["none", "fp8_blockwise"])
def test_rows_that_bypass_the_caches(quant_type: str):
    """A call that moves more than 4 MB does so by other stores."""
    case = Case(2, 7168, 4, 3, 310, steps_of("DC", 2, 310, 4, 3), kernel_type="AsyncLL", quant_type=quant_type)
    pool(2).run(exercise, case)


# ---- the first half waits for nobody


def small_case(world_size: int, **options) -> Case:
    return Case(world_size, 16, 2, 2, 6, (), kernel_type="AsyncLL", **options)


def small_arguments(context: RankContext, tokens: int = 5) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows, weights and ids: every token to every rank of two, or to ranks 0 and 1 of more."""
    ids = torch.tensor([[0, 2]] * tokens, dtype=torch.int32)
    return torch.full((tokens, 16), 1.0 + context.rank, dtype=torch.bfloat16), torch.ones(tokens, 2), ids


def send_before_the_others_come(context: RankContext, first: int) -> None:
    """Had a send half to wait, its barrier would not come before the others' sends, and the wait would time out."""
    op = new_op(context, small_case(context.world_size))
    rows, weights, ids = small_arguments(context)
    for _ in range(3):
        if context.rank != first:
            context.barrier()
        received, received_weights, _, _, count = op.dispatch_send(rows, weights, None, ids)
        if context.rank == first:
            context.barrier()
        op.dispatch_recv()
        total = int(count)
        require(total == (5 * context.world_size if context.rank < 2 else 0), f"received {total} rows")
        if context.rank != first:
            context.barrier()
        out, out_weights = op.combine_send(received[:total], received_weights[:total], ids)
        if context.rank == first:
            context.barrier()
        op.combine_recv()
        require_same_bits(out[:5], rows * 2, "rows of two ranks")
        require_same_bits(out_weights[:5], weights * 2, "weights of two ranks")


@pytest.mark.parametrize("world_size,first", [(2, 0), (2, 1), (3, 2)])
def test_a_send_half_waits_for_nobody(world_size: int, first: int):
    pool(world_size).run(send_before_the_others_come, first)


def free_arguments_after_send(context: RankContext) -> None:
    """Large tensors, so that their memory is gone at once."""
    case = replace(small_case(context.world_size), hidden=2048, max_tokens=128, topk=4)
    op = new_op(context, case)
    (own,) = (ids for rank, ids in enumerate(routing("any", [128] * context.world_size, 4, 2)) if rank == context.rank)
    ids = torch.from_numpy(own)
    expected = torch.arange(128)[:, None].expand(-1, 2048).to(torch.bfloat16).contiguous()
    rows = expected.clone()
    received, _, _, _, count = op.dispatch_send(rows, torch.ones(128, 4), None, ids.clone())
    del rows
    context.barrier()
    op.dispatch_recv()
    answer = received[: int(count)].clone()
    out, _ = op.combine_send(answer, None, ids.clone())
    del answer
    context.barrier()
    op.combine_recv()
    copies = torch.stack([(ids // 2 == rank).any(dim=1) for rank in range(context.world_size)]).sum(dim=0)
    wanted = expected.float() * copies[:, None]
    require_same_bits(out, wanted.to(torch.bfloat16), "rows times the number of their ranks")


def test_arguments_are_not_needed_after_the_send_half():
    pool(2).run(free_arguments_after_send)


def count_experts_late(context: RankContext) -> None:
    op = new_op(context, small_case(context.world_size))
    rows, weights, ids = small_arguments(context)
    wanted = [5 * context.world_size, 0]
    for ask_send, ask_receive in ((True, False), (False, True), (True, True)):
        op.local_expert_count.fill_(-7)
        op.dispatch_send(rows, weights, None, ids, call_local_expert_count=ask_send)
        require(op.local_expert_count.tolist() == [-7, -7], "counted before the rows were there")
        op.dispatch_recv(call_local_expert_count=ask_receive)
        require(op.local_expert_count.tolist() == wanted, f"{op.local_expert_count.tolist()}, expected {wanted}")
    op.local_expert_count.fill_(-7)
    op.dispatch_send(rows, weights, None, ids)
    op.dispatch_recv()
    require(op.local_expert_count.tolist() == [-7, -7], "counted without being asked, as an earlier send was")


def test_expert_counts_asked_for_by_either_half():
    pool(2).run(count_experts_late)


# ---- wrong orders

# What was called before, the call that is refused, and what its message names.
WRONG_ORDERS = [
    ("", "dispatch_recv", "dispatch_recv without a dispatch_send"),
    ("", "combine_recv", "combine_recv without a combine_send"),
    ("dispatch", "dispatch", "dispatch: .* dispatch_recv is missing"),
    ("dispatch", "dispatch_send", "dispatch_send: .* dispatch_recv is missing"),
    ("dispatch_send", "combine", "combine: .* dispatch_recv is missing"),
    ("dispatch_send", "combine_send", "combine_send: .* dispatch_recv is missing"),
    ("dispatch_send", "combine_recv", "combine_recv without a combine_send .* missing is dispatch_recv"),
    ("dispatch_send dispatch_recv", "dispatch_recv", "dispatch_recv without a dispatch_send"),
    ("dispatch dispatch_recv combine", "dispatch", "dispatch: .* combine_recv is missing"),
    ("dispatch dispatch_recv combine_send", "dispatch_send", "dispatch_send: .* combine_recv is missing"),
    ("dispatch dispatch_recv combine_send", "combine", "combine: .* combine_recv is missing"),
    ("dispatch dispatch_recv combine_send", "dispatch_recv", "dispatch_recv without .* missing is combine_recv"),
]


def wrong_orders(context: RankContext) -> None:
    op = new_op(context, small_case(context.world_size))
    rows, weights, ids = small_arguments(context)
    buffer = torch.ones(context.world_size * 6, 16, dtype=torch.bfloat16)
    calls: dict[str, Callable] = {
        "dispatch": lambda: op.dispatch(rows, weights, None, ids),
        "dispatch_send": lambda: op.dispatch_send(rows, weights, None, ids),
        "dispatch_recv": op.dispatch_recv,
        "combine": lambda: op.combine(buffer, None, ids),
        "combine_send": lambda: op.combine_send(buffer, None, ids),
        "combine_recv": op.combine_recv,
    }
    for before, refused, text in WRONG_ORDERS:
        called = before.split()
        for name in called:
            calls[name]()
        with pytest.raises(RuntimeError, match=text):
            calls[refused]()
        # The call that was under way is not hurt.
        if called and called[-1].startswith("dispatch") and called[-1] != "dispatch_recv":
            op.dispatch_recv()
        elif called and called[-1].startswith("combine"):
            op.combine_recv()
    out = op.dispatch(rows, weights, None, ids)
    op.dispatch_recv()
    require(int(out[4]) == 5 * context.world_size, "the op works after all that")


def test_wrong_orders_name_the_half_that_is_missing():
    pool(2).run(wrong_orders)


# ---- several ops, delays, faults


def micro_batches(context: RankContext, rounds: int) -> None:
    """Two ops, each with a call under way while the other's is; odd ranks take them the other way round."""
    shape = Shape(kernel_type="AsyncLL")
    ops = [storm_op(context, shape) for _ in range(2)]
    for number in range(rounds):
        plays = [
            halves(op, context.rank, Round(2 * number + which, context.world_size, shape))
            for which, op in enumerate(ops)
        ]
        if context.rank % 2:
            plays.reverse()
        for _ in ("dispatches sent", "combines sent"):
            for each in plays:
                next(each)
        for each in plays:
            require(next(each, "ended") == "ended", "a round has two halves twice")


@pytest.mark.parametrize("world_size", [2, 3])
def test_two_ops_under_way_in_opposite_orders(world_size: int):
    pool(world_size).run(micro_batches, 40)


def hooks(context: RankContext) -> None:
    """As engines keep them: what completes a call is handed on, to be called later, also by another thread."""
    op = new_op(context, small_case(context.world_size))
    rows, weights, ids = small_arguments(context)
    received, _, _, _, count = op.dispatch_send(rows, weights, None, ids)
    pending: list[Callable[[], None]] = [op.dispatch_recv]
    pending.pop()()
    require(int(count) == 10, f"received {int(count)} rows")
    out, _ = op.combine_send(received, None, ids)
    thread = threading.Thread(target=op.combine_recv)
    thread.start()
    thread.join()
    require_same_bits(out[:5], rows * 2, "rows of two ranks")


def test_receive_halves_as_hooks():
    pool(2).run(hooks)


@pytest.mark.parametrize("world_size", [4])
def test_five_hundred_pairs_with_delays_inside_the_kernels(world_size: int):
    pool(world_size).run(storm, 50_000, 500, 60, Shape(kernel_type="AsyncLL"))


def test_pairs_with_several_threads_per_rank():
    shape = Shape(max_tokens=100, hidden=33, topk=5, kernel_type="AsyncLL")
    pool(2, MORI_HOST_THREADS="3").run(storm, 60_000, 100, 100, shape)


def test_call_numbers_pass_the_limits_of_integers():
    pool(3).run(storm_from, [2**31 - 3, 2**32 - 3, 2**40 - 3], 8, Shape(kernel_type="AsyncLL"))


@pytest.mark.full
@pytest.mark.parametrize("world_size", [2, 3, 8])
@pytest.mark.parametrize("threads", [1, 4])
def test_ten_thousand_pairs(world_size: int, threads: int):
    shape = Shape(kernel_type="AsyncLL")
    pool(world_size, MORI_HOST_THREADS=str(threads)).run(storm, 0, 10_000 // world_size, 40, shape, timeout_s=170)


def overflow_at_the_receive_half(context: RankContext) -> None:
    import mori

    op = new_op(context, small_case(context.world_size, receive_cap=8))
    rows, weights, ids = small_arguments(context)
    for _ in range(2):
        op.dispatch_send(rows, weights, None, ids)  # 5 rows from each rank are more than 8
        raises(mori.errors.ReceiveOverflow, op.dispatch_recv, says="max_total_recv_tokens")
        received, *_, count = op.dispatch_send(rows[:4], weights[:4], None, ids[:4])
        op.dispatch_recv()
        require(int(count) == 8, f"received {int(count)} rows")
        out, _ = op.combine_send(received, None, ids[:4])
        op.combine_recv()
        require_same_bits(out[:4], rows[:4] * 2, "rows of two ranks")


def test_a_call_fault_shows_in_the_receive_half():
    pool(2).run(overflow_at_the_receive_half)


def lose_a_peer_between_halves(context: RankContext, victim: int, half: str, directory: Path) -> dict | None:
    """The victim ends between the halves of its dispatch, or of its combine; what the others find, and when."""
    import mori

    shape = Shape(max_tokens=200, kernel_type="AsyncLL")
    op = storm_op(context, shape)
    for number in range(3):
        play(op, context.rank, Round(number, context.world_size, shape))
    under_way = halves(op, context.rank, Round(3, context.world_size, shape))
    while next(under_way) != half:
        pass
    report_under_way(context, directory)
    if context.rank == victim:
        signal.pause()
    try:
        for _ in under_way:
            pass
        play(op, context.rank, Round(4, context.world_size, shape))  # what the victim sent had arrived
    except mori.PeerLost as error:
        return {"ended": time.monotonic(), "peer": error.peer, "reason": error.reason}
    return None


@pytest.mark.parametrize("half", ["dispatch", "combine"])
@pytest.mark.parametrize("victim", [0, 1])
def test_a_peer_that_dies_between_halves(tmp_path: Path, half: str, victim: int):
    with private_pool(3) as ranks:
        ranks.start(lose_a_peer_between_halves, victim, half, tmp_path)
        killed = kill_once_all_are_under_way(ranks, victim, tmp_path, 30)
        outcomes = ranks.collect(timeout_s=20)
    assert outcomes[victim].exit_code == -signal.SIGKILL
    for rank, outcome in enumerate(outcomes):
        if rank == victim:
            continue
        assert outcome.failure is None, outcome.failure
        assert outcome.value is not None, "nobody missed the rank that died"
        assert (outcome.value["peer"], outcome.value["reason"]) == (victim, "died")
        assert outcome.value["ended"] - killed < DETECTION_SECONDS
