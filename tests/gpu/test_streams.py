"""Streams: side streams, inputs that die right after the call, ops in opposite order, and GPUs that are busy."""

from __future__ import annotations

import time

import pytest
import torch

from tests.gpu.occupy import Occupant, processors
from tests.gpu.ranks import GpuPool, gpu_pool, private_gpu_pool, synchronize
from tests.gpu.rounds import Ledger, Pattern, Shape, new_op, play, varied_counts
from tests.rank_worker import RankContext
from tests.v1.exercise import require

pytestmark = pytest.mark.gpu

SHAPE = Shape(max_tokens=200, hidden=672, topk=8, dtype=torch.bfloat16)


def on_side_streams(context: RankContext, seed: int, rounds: int) -> int:
    """Every round on another stream, ordered by events only. All temporary tensors are freed while kernels run."""
    op, ledger = new_op(context, SHAPE), Ledger(context)
    patterns = [
        Pattern(context, SHAPE, seed + n, varied_counts(n, context.world_size, SHAPE.max_tokens)) for n in range(6)
    ]
    streams = [torch.cuda.Stream() for _ in range(4)]
    last = torch.cuda.current_stream()
    for tag in range(rounds):
        stream = streams[tag % len(streams)]
        stream.wait_stream(last)
        with torch.cuda.stream(stream):
            play(op, patterns[tag % 6], tag, ledger, external=tag % 2 == 0)
        last = stream
    last.synchronize()
    op.check()
    return ledger.settle()


def test_every_call_follows_the_current_stream(gpus: GpuPool, seed: int):
    assert min(gpus.run(on_side_streams, seed, 200)) == 6 * 200


def calls_do_not_wait(context: RankContext, seed: int) -> float:
    """Seconds that the calls of a round take while the stream before them is busy for much longer."""
    op, ledger = new_op(context, SHAPE), Ledger(context)
    pattern = Pattern(context, SHAPE, seed, [SHAPE.max_tokens] * context.world_size)
    play(op, pattern, 0, ledger)
    synchronize()
    context.barrier()
    torch.cuda._sleep(2_000_000_000)
    busy = torch.cuda.Event()
    busy.record()
    started = time.perf_counter()
    play(op, pattern, 1, ledger)
    seconds = time.perf_counter() - started
    require(not busy.query(), "the stream was idle before the calls had returned: nothing was shown")
    op.check()
    ledger.settle()
    return seconds


def test_calls_return_while_the_stream_is_busy(gpus: GpuPool, seed: int):
    assert max(gpus.run(calls_do_not_wait, seed)) < 0.5


def inputs_die(context: RankContext, seed: int, rounds: int) -> int:
    """The memory of freed inputs is given to tensors of rubbish at once."""
    op, ledger = new_op(context, SHAPE), Ledger(context)
    pattern = Pattern(context, SHAPE, seed, [SHAPE.max_tokens] * context.world_size)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        op._plan.set_test_delays(context.rank + 1, 30)
        for tag in range(rounds):
            play(op, pattern, tag, ledger)
            for table in (pattern.values, pattern.weights, pattern.answers, pattern.answer_weights):
                torch.full_like(table, -1.0)
    side.synchronize()
    op.check()
    return ledger.settle()


def test_inputs_may_be_freed_right_after_the_call(seed: int):
    assert min(gpu_pool(ENABLE_PROFILER="1").run(inputs_die, seed, 200)) == 6 * 200


def opposite_order(context: RankContext, seed: int, grid: dict[str, int]) -> str:
    """Two ops on two streams; odd ranks launch the second op first."""
    import mori

    counts = [SHAPE.max_tokens] * context.world_size
    pattern = Pattern(context, SHAPE, seed, counts)
    ops = [new_op(context, SHAPE), new_op(context, SHAPE)]
    ledgers = [Ledger(context), Ledger(context)]
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    synchronize()

    def play_on_its_stream(which: int, tag: int) -> None:
        with torch.cuda.stream(streams[which]):
            play(ops[which], pattern, tag, ledgers[which], **grid)

    # What may wait for the whole device, memory for each stream and code of torch's kernels, is there after this.
    for which in (0, 1):
        play_on_its_stream(which, 0)
        synchronize()
    context.barrier()
    try:
        for tag in range(1, 20):
            for which in (0, 1) if context.rank % 2 == 0 else (1, 0):
                play_on_its_stream(which, tag)
        for op in ops:
            op.check()
    except (mori.PeerTimeout, mori.PeerLost) as error:
        return f"{type(error).__name__}: {error}"
    synchronize()
    return str(sum(ledger.settle() for ledger in ledgers))


def test_two_small_ops_in_opposite_order_complete(seed: int):
    with private_gpu_pool(MORI_TIMEOUT_S="5") as ranks:
        for found in ranks.run(opposite_order, seed, {"block_num": 8, "warp_per_block": 8}, timeout_s=60):
            assert found == str(6 * 40)


def test_two_ops_that_fill_the_gpu_in_opposite_order_end(seed: int):
    """Each may keep the other off the GPU: then it must be a fault that says who was missing and which knob to turn."""
    with private_gpu_pool(MORI_TIMEOUT_S="2") as ranks:
        results = ranks.run(opposite_order, seed, {"block_num": 256, "warp_per_block": 16}, timeout_s=60)
    for found in results:
        assert found == str(6 * 40) or ("rank" in found and "MORI_TIMEOUT_S" in found) or "PeerLost" in found
    assert all("PeerLost" not in found for found in results) or any("PeerTimeout" in found for found in results)


def beside_an_occupant(context: RankContext, seed: int, free: int, rounds: int) -> tuple[int, bool]:
    """Rounds while another kernel holds all multiprocessors but `free`; and whether it still did so at their end."""
    op, ledger = new_op(context, SHAPE), Ledger(context)
    pattern = Pattern(context, SHAPE, seed, [SHAPE.max_tokens] * context.world_size)
    # Code that torch loads at first use may wait for the whole device: not while the other kernel is there.
    for tag in range(2):
        play(op, pattern, tag, ledger, external=tag % 2 == 0)
    synchronize()
    occupant = Occupant(blocks=processors() - free, longest_s=3.0)
    context.barrier()
    require(occupant.runs(), "the other kernel ended before the first round")
    for tag in range(2, rounds):
        play(op, pattern, tag, ledger, external=tag % 2 == 0, block_num=(132, 1, 256)[tag % 3], warp_per_block=8)
    torch.cuda.current_stream().synchronize()
    stayed = occupant.runs()
    occupant.leave()
    op.check()
    return ledger.settle(), stayed


@pytest.mark.parametrize("free", [1, 4])
def test_a_gpu_mostly_occupied_by_another_kernel(gpus: GpuPool, seed: int, free: int):
    found = gpus.run(beside_an_occupant, seed, free, 30)
    assert found == [(6 * 30, True)] * gpus.world_size


def without_any_processor(context: RankContext, seed: int) -> str:
    """Rank 0's GPU is full for longer than the deadline of the others."""
    import mori

    op, ledger = new_op(context, SHAPE), Ledger(context)
    pattern = Pattern(context, SHAPE, seed, [SHAPE.max_tokens] * context.world_size)
    play(op, pattern, 0, ledger)
    synchronize()
    occupant = Occupant(blocks=processors(), longest_s=8.0) if context.rank == 0 else None
    context.barrier()
    started = time.monotonic()
    text = ""
    try:
        op.dispatch(pattern.values.bfloat16(), None, None, pattern.ids)
        if context.rank:
            op.check()
    except mori.PeerTimeout as error:
        text = str(error)
        require(time.monotonic() - started < 1.0 + 2.0, "the deadline is 1 s")
    context.barrier()
    if occupant is not None:
        occupant.leave()
    return text


def test_a_full_gpu_is_a_timeout_of_its_peers():
    with private_gpu_pool(MORI_TIMEOUT_S="1") as ranks:
        texts = ranks.run(without_any_processor, 1, timeout_s=40)
    for text in texts[1:]:
        assert "rank 0" in text and "MORI_TIMEOUT_S" in text
