"""Dispatch and combine against the reference, bit for bit, over shapes, routings, dtypes and orders of calls."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.ranks import pool
from tests.v1 import cases
from tests.v1.cases import Case, Step, routing
from tests.v1.exercise import exercise
from tests.v1.strategies import HIDDEN, case_for

WORLDS = (1, 2, 3, 4, 8)
DISPATCH_AND_BOTH_COMBINES = (Step("combine"), Step("combine", external=False))


def round_trips(*routings: tuple, **options) -> tuple[Step, ...]:
    """Dispatch and combine for each routing, alternating between the two combine modes."""
    steps: list[Step] = []
    for number, indices in enumerate(routings):
        steps += [Step("dispatch", indices, **options), DISPATCH_AND_BOTH_COMBINES[number % 2]]
    return tuple(steps)


def run(case: Case) -> None:
    pool(case.world_size).run(exercise, case)


@pytest.mark.parametrize("world_size", WORLDS)
@given(data=st.data())
def test_any_case(world_size: int, data: st.DataObject):
    run(data.draw(case_for(world_size)))


@pytest.mark.full
@pytest.mark.parametrize("world_size", [5, 6, 7])
@settings(max_examples=60)
@given(data=st.data())
def test_any_case_in_worlds_between(world_size: int, data: st.DataObject):
    run(data.draw(case_for(world_size)))


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("topk", range(1, 17))
def test_every_topk(world_size: int, topk: int):
    indices = [routing(style, [9] * world_size, topk, 6, seed=topk) for style in ("distinct", "any", "wild")]
    run(Case(world_size, 16, topk, 6, 9, round_trips(*indices), values="bits", seed=topk))


@pytest.mark.parametrize("world_size", [2, 4, 8])
@pytest.mark.parametrize("experts_per_rank", [1, 3, 8])
def test_topk_of_all_experts(world_size: int, experts_per_rank: int):
    topk = world_size * experts_per_rank
    indices = routing("distinct", [5] * world_size, topk, experts_per_rank)
    run(Case(world_size, 24, topk, experts_per_rank, 5, round_trips(indices, indices)))


@pytest.mark.parametrize("topk", [22, 33, 64])
@pytest.mark.parametrize("world_size", [3])
def test_topk_beyond_a_wave(world_size: int, topk: int):
    indices = routing("any", [7] * world_size, topk, 30)
    run(Case(world_size, 10, topk, 30, 7, round_trips(indices, indices)))


@pytest.mark.parametrize("world_size", [2, 8])
@pytest.mark.parametrize("topk", [3, 5, 6, 7, 9])
def test_many_tokens_to_the_same_two_ranks(world_size: int, topk: int):
    indices = routing("two ranks", [257] * world_size, topk, 4)
    run(Case(world_size, 8, topk, 4, 257, round_trips(indices, indices), values="bits", scale_dim=3, scale_bytes=4))


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("tokens", [255, 256, 257, 511, 513, 16_384, 16_385, 20_001])
def test_tokens_are_counted_in_chunks(world_size: int, tokens: int):
    """Of 256 tokens each, 64 chunks at most."""
    counts = [tokens, 700, 0][:world_size]
    steps = round_trips(routing("any", counts, 3, 2), routing("wild", counts, 3, 2, seed=1))
    case = Case(world_size, 4, 3, 2, max(counts), steps, values="bits")
    for threads in ("1", "3"):
        run(replace(case, environment=(("MORI_HOST_THREADS", threads),)))


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("dtype", cases.PAYLOAD_DTYPES, ids=lambda dtype: str(dtype).split(".")[1])
@pytest.mark.parametrize("hidden", HIDDEN)
def test_every_hidden_size_and_dtype(world_size: int, hidden: int, dtype: torch.dtype):
    indices = routing("any", [6] * world_size, 4, 3, seed=hidden)
    steps = round_trips(indices, indices)
    run(Case(world_size, hidden, 4, 3, 6, steps, dtype=dtype, combine_dtype=dtype, values="bits"))


@pytest.mark.parametrize("world_size", [2])
@pytest.mark.parametrize("scale_bytes", [1, 2, 4])
@pytest.mark.parametrize("scale_dim", [1, 3, 16, 56, 224])
def test_scales_are_moved_as_bytes(world_size: int, scale_dim: int, scale_bytes: int):
    indices = routing("any", [11, 3], 4, 3)
    case = Case(world_size, 64, 4, 3, 11, round_trips(indices, indices), scale_dim=scale_dim, scale_bytes=scale_bytes)
    run(replace(case, dtype=torch.float8_e4m3fn))


@pytest.mark.parametrize("world_size", [2, 3, 8])
@pytest.mark.parametrize("values", ["bits", "special"])
@pytest.mark.parametrize("dtype", cases.PAYLOAD_DTYPES, ids=lambda dtype: str(dtype).split(".")[1])
def test_combine_arithmetic_on_every_kind_of_value(world_size: int, values: str, dtype: torch.dtype):
    indices = routing("spread", [32] * world_size, 8, 2)
    steps = round_trips(indices, indices)
    run(Case(world_size, 96, 8, 2, 32, steps, dtype=dtype, combine_dtype=dtype, values=values, seed=world_size))


@pytest.mark.parametrize("world_size", [2])
@pytest.mark.parametrize("tokens", [[5, 0], [0, 5], [0, 0]], ids=str)
def test_a_rank_without_tokens(world_size: int, tokens: list[int]):
    indices = routing("any", tokens, 4, 2)
    run(Case(world_size, 32, 4, 2, 5, round_trips(indices, indices, indices), scale_dim=4))


@pytest.mark.parametrize("world_size", WORLDS)
def test_all_tokens_to_one_rank_and_none_to_the_others(world_size: int):
    to_first = tuple(ids * 0 for ids in routing("any", [8] * world_size, 4, 2))
    to_last = tuple(ids + world_size * 2 - 1 for ids in to_first)
    run(Case(world_size, 32, 4, 2, 8, round_trips(to_first, to_last, to_first), values="bits"))


@pytest.mark.parametrize("world_size", [2, 8])
def test_every_rank_full_and_everything_to_one_expert(world_size: int):
    indices = routing("one expert", [600] * world_size, 4, 2)
    everything = tuple(ids * 0 + 1 for ids in indices)
    run(Case(world_size, 24, 4, 2, 600, round_trips(everything, everything), values="bits"))


@pytest.mark.parametrize("world_size", [1, 3, 8])
@pytest.mark.parametrize("style", ["none", "half none", "wild"])
def test_rows_for_no_expert_come_back_as_zeros(world_size: int, style: str):
    indices = routing(style, [13] * world_size, 6, 4)
    full = routing("any", [13] * world_size, 6, 4)
    run(Case(world_size, 40, 6, 4, 13, round_trips(full, indices, full, indices), values="bits"))


@pytest.mark.parametrize("world_size", [2])
@pytest.mark.parametrize("nobody", ["W*E", 2**30, -2, -1, 2**31 - 1, -(2**31)])
def test_one_id_outside_the_experts(world_size: int, nobody):
    indices = routing("any", [6, 6], 4, 3)
    indices[1][2, 1] = world_size * 3 if nobody == "W*E" else nobody
    run(Case(world_size, 12, 4, 3, 6, round_trips(indices, indices)))


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("grid", [(1, 1), (2, 16), (7, 5), (17, 1), (256, 16)])
def test_results_do_not_depend_on_the_grid(world_size: int, grid: tuple[int, int]):
    indices = routing("any", [65] * world_size, 6, 4)
    run(Case(world_size, 96, 6, 4, 65, round_trips(indices, indices), grid=grid))


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("threads", [2, 3, 5])
def test_results_do_not_depend_on_the_number_of_threads(world_size: int, threads: int):
    indices = [routing(style, [131] * world_size, 7, 4) for style in ("any", "one rank", "distinct")]
    case = Case(world_size, 96, 7, 4, 131, round_trips(*indices), values="bits", scale_dim=5)
    pool(world_size, MORI_HOST_THREADS=str(threads)).run(exercise, case)


@pytest.mark.parametrize("world_size", [2])
@pytest.mark.parametrize("isa,needs", [("baseline", ""), ("avx2", "avx2"), ("avx512", "avx512f")])
def test_results_do_not_depend_on_the_instruction_set(world_size: int, isa: str, needs: str):
    if needs not in Path("/proc/cpuinfo").read_text():
        pytest.skip(f"this CPU has no {isa}")
    indices = routing("any", [33, 20], 6, 4)
    case = Case(world_size, 167, 6, 4, 33, round_trips(indices, indices), values="special")
    pool(world_size, MORI_HOST_ISA=isa).run(exercise, case)


@pytest.mark.parametrize("world_size", [2])
@pytest.mark.parametrize("tokens", [65536, 70000])
def test_more_tokens_than_sixteen_bits_count(world_size: int, tokens: int):
    indices = routing("any", [tokens, 17], 2, 1)
    run(Case(world_size, 8, 2, 1, tokens, round_trips(indices, indices), values="bits"))


def dispatch_large_rows(context, tokens: int) -> None:
    """All rows go to the last rank. Made and checked piece by piece: the rows alone take most of the memory."""
    import mori

    last = context.world_size - 1
    op = mori.ops.EpDispatchCombineOp(Case(context.world_size, 7168, 1, 1, tokens, ()).config(context.rank))
    rows = torch.empty(tokens, 7168, dtype=torch.bfloat16)
    first = context.rank * tokens
    rows.view(torch.int32)[:] = torch.arange(first, first + tokens, dtype=torch.int32)[:, None]
    received, *_, count = op.dispatch(rows, None, None, torch.full((tokens, 1), last, dtype=torch.int32))
    del rows
    total = context.world_size * tokens if context.rank == last else 0
    assert int(count) == total, f"received {int(count)} rows, expected {total}"
    numbers = received.view(torch.int32)
    for start in range(0, total, 4096):
        piece = numbers[start : min(start + 4096, total)]
        expected = torch.arange(start, start + len(piece), dtype=torch.int32)[:, None]
        assert bool((piece == expected).all()), f"rows from {start} on are wrong"


@pytest.mark.full
@pytest.mark.parametrize("world_size,tokens", [(1, 160_000), (2, 151_000)])
def test_rows_beyond_two_and_four_gigabytes(world_size: int, tokens: int):
    """Byte offsets of rows pass 2^31 with one rank, 2^32 with two; twice that much memory is needed."""
    needed_kb = 2 * world_size * tokens * 7168 * 2 // 1024
    memory = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    if int(memory["MemAvailable"].split()[0]) < needed_kb * 1.25:
        pytest.skip(f"needs {needed_kb * 1.25 / 2**20:.0f} GB of free memory")
    pool(world_size, MORI_SHMEM_HEAP_SIZE="12G", MORI_TIMEOUT_S="100").run(dispatch_large_rows, tokens, timeout_s=150)


@pytest.mark.parametrize("world_size", [1, 2, 8])
def test_row_size_changes_from_call_to_call(world_size: int):
    indices = routing("any", [9] * world_size, 4, 3)
    big = Case(world_size, 96, 4, 3, 9, round_trips(indices), dtype=torch.float32, combine_dtype=torch.float32)
    small = replace(big, hidden=5, dtype=torch.float8_e4m3fn, combine_dtype=torch.bfloat16, seed=1)
    pool(world_size).run(take_turns_on_one_op, [big, small, big, replace(small, hidden=96)])


def take_turns_on_one_op(context, turns: list[Case]) -> None:
    from tests.v1.exercise import Exercise

    first = Exercise(context, turns[0])
    first.run()
    for case in turns[1:]:
        Exercise(context, case, op=first.op).run()


@pytest.mark.parametrize("world_size", [4])
@pytest.mark.parametrize("kernel_type", ["IntraNode", "AsyncLL"])
def test_weights_may_be_missing_on_some_ranks_only(world_size: int, kernel_type: str):
    pool(world_size).run(dispatch_with_weights_on_even_ranks, kernel_type)


def dispatch_with_weights_on_even_ranks(context, kernel_type: str) -> None:
    from tests import reference
    from tests.v1.exercise import new_op, require_same_bits

    indices = [torch.from_numpy(ids) for ids in routing("any", [10] * context.world_size, 5, 3)]
    case = Case(context.world_size, 8, 5, 3, 10, (Step("dispatch", tuple(ids.numpy() for ids in indices)),))
    op = new_op(context, replace(case, kernel_type=kernel_type))
    rows = [cases.payload(case, 0, peer) for peer in range(context.world_size)]
    weights = [None if peer % 2 else cases.weights(case, 0, peer) for peer in range(context.world_size)]
    route = reference.route(indices, 3)
    expected = reference.dispatch(route, rows, indices, weights, None, 10)[context.rank]
    mine = context.rank
    for _ in range(2):
        got = op.dispatch_send(rows[mine], weights[mine], None, indices[mine])
        op.dispatch_recv()
        total = int(got[4])
        require_same_bits(got[1][:total], expected.weights, "weights")
        require_same_bits(got[0][:total], expected.rows, "rows")
    # Combine: rank 0 passes no weights, rank 1 passes fewer rows than it received, the others all of them.
    passed = [torch.full((route.received(peer), 5), 2.0**peer) for peer in range(context.world_size)]
    given_weights: list[torch.Tensor | None] = [None, passed[1][:2], *passed[2:]]
    answers = [cases.expert_rows(case, 0, peer, route.received(peer)) for peer in range(context.world_size)]
    out, out_weights = op.combine_send(answers[mine], given_weights[mine], indices[mine])
    op.combine_recv()
    require_same_bits(out[:10], reference.combine(route, answers)[mine], "combined rows")
    wanted = reference.combine_weights(route, given_weights, 5)[mine]
    if wanted is None:
        assert out_weights is None, "a rank that passes no weights gets none"
    else:
        require_same_bits(out_weights[:10], wanted, "combined weights")


@pytest.mark.parametrize("world_size", [2])
def test_scales_without_columns_come_back_without_columns(world_size: int):
    pool(world_size).run(dispatch_with_empty_scales)


def dispatch_with_empty_scales(context) -> None:
    import mori

    case = Case(context.world_size, 8, 2, 2, 4, ())
    for scale_bytes in (0, 1):
        op = mori.ops.EpDispatchCombineOp(case.config(context.rank, scale_type_size=scale_bytes))
        rows, ids = torch.ones(4, 8, dtype=torch.bfloat16), torch.zeros(4, 2, dtype=torch.int32)
        empty = torch.empty(4, 0, dtype=torch.float8_e4m3fnuz)
        *_, scales, _, count = op.dispatch(rows, None, empty, ids)
        capacity = op.max_num_tokens_to_recv()
        assert scales.dtype == empty.dtype and tuple(scales.shape) == (capacity, 0), scales
        assert int(count) == (8 if context.rank == 0 else 0)
        assert op.dispatch(rows, None, None, ids)[2] is None


@pytest.mark.parametrize("world_size", [2])
def test_received_weights_are_zeros_when_none_were_sent(world_size: int):
    indices = routing("any", [7, 7], 4, 2)
    with_weights = Step("dispatch", indices)
    without = Step("dispatch", indices, weights=False)
    steps = (with_weights, Step("combine"), without, Step("combine", weights=False), with_weights)
    run(Case(world_size, 8, 4, 2, 7, steps, values="bits"))


def count_experts(context, case: Case) -> None:
    import mori
    from tests import reference
    from tests.v1.exercise import require

    op = mori.ops.EpDispatchCombineOp(case.config(context.rank))
    local = range(context.rank * case.experts_per_rank, (context.rank + 1) * case.experts_per_rank)
    for number, step in enumerate(case.steps):
        indices = [torch.from_numpy(ids) for ids in step.indices]
        routing_ = reference.route(indices, case.experts_per_rank)
        rows = [cases.payload(case, number, peer) for peer in range(context.world_size)]
        nothing = [None] * context.world_size
        received = reference.dispatch(routing_, rows, indices, nothing, None, case.max_tokens)[context.rank].indices
        expected = [int((received == expert).sum()) for expert in local]
        before = op.local_expert_count.tolist()
        op.dispatch(rows[context.rank], None, None, indices[context.rank])
        require(op.local_expert_count.tolist() == before, "counts changed without being asked for")
        op.dispatch(rows[context.rank], None, None, indices[context.rank], call_local_expert_count=True)
        require(op.local_expert_count.tolist() == expected, f"{op.local_expert_count.tolist()}, expected {expected}")
        require(op.local_expert_count.dtype == torch.int32, "counts are int32")


@pytest.mark.parametrize("world_size", [1, 3])
def test_local_expert_counts(world_size: int):
    steps = tuple(Step("dispatch", routing(style, [14] * world_size, 6, 4)) for style in ("any", "wild", "none"))
    pool(world_size).run(count_experts, Case(world_size, 8, 6, 4, 14, steps))
