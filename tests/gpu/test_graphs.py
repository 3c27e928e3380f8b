"""Dispatch and combine under CUDA graphs: captured before any eager call, refilled, mixed, and replayed for long."""

from __future__ import annotations

import random

import pytest
import torch

from tests.gpu.graphs import GraphedPair
from tests.gpu.ranks import GpuPool
from tests.gpu.rounds import Ledger, Pattern, Shape, new_op, play
from tests.rank_worker import RankContext

pytestmark = pytest.mark.gpu

F32 = Shape(max_tokens=96, hidden=96, topk=4)
BF16 = Shape(max_tokens=96, hidden=672, topk=8, dtype=torch.bfloat16)


def patterns_of(context: RankContext, shape: Shape, seed: int, counts: list[int], number: int) -> list[Pattern]:
    return [Pattern(context, shape, seed + each, counts) for each in range(number)]


def capture_first(context: RankContext, shape: Shape, seed: int, together: bool, external: bool) -> int:
    """The op has not been called before the capture, and its config names another dtype than the calls."""
    other = torch.bfloat16 if shape.dtype == torch.float32 else torch.float32
    op, ledger = new_op(context, shape, data_type=other), Ledger(context)
    counts = [40 + peer for peer in range(context.world_size)]
    pair = GraphedPair(context, op, shape, counts[context.rank], together=together, external=external)
    for tag, pattern in enumerate(patterns_of(context, shape, seed, counts, 5)):
        pair.play(pattern, tag, ledger)
    op.check()
    return ledger.settle()


@pytest.mark.parametrize("external", [True, False], ids=["external", "zero copy"])
@pytest.mark.parametrize("together", [True, False], ids=["together", "apart"])
@pytest.mark.parametrize("shape", [F32, BF16], ids=["f32", "bf16"])
def test_the_very_first_call_is_captured(gpus: GpuPool, seed: int, shape: Shape, together: bool, external: bool):
    assert min(gpus.run(capture_first, shape, seed, together, external)) == 6 * 5


def capture_in_a_fresh_process(context: RankContext, seed: int) -> int:
    return capture_first(context, F32, seed, True, True)


def test_kernels_are_loaded_while_capturing(seed: int):
    """In processes that have not launched any kernel of ours yet."""
    from tests.gpu.ranks import private_gpu_pool

    with private_gpu_pool() as fresh:
        assert min(fresh.run(capture_in_a_fresh_process, seed, timeout_s=120)) == 6 * 5


def replay_and_refill(context: RankContext, shape: Shape, seed: int, replays: int, together: bool) -> int:
    op, ledger = new_op(context, shape), Ledger(context)
    counts = [shape.max_tokens - peer for peer in range(context.world_size)]
    pair = GraphedPair(context, op, shape, counts[context.rank], together=together, external=False)
    patterns = patterns_of(context, shape, seed, counts, 20)
    for tag in range(replays):
        pair.play(patterns[tag % 20], tag, ledger)
    op.check()
    return ledger.settle()


@pytest.mark.parametrize("together", [True, False], ids=["together", "apart"])
@pytest.mark.parametrize("shape", [F32, BF16], ids=["f32", "bf16"])
def test_two_hundred_replays_with_new_data_weights_and_routing(gpus: GpuPool, seed: int, shape: Shape, together: bool):
    assert min(gpus.run(replay_and_refill, shape, seed, 200, together)) == 6 * 200


def mixed_sizes(context: RankContext, shape: Shape, seed: int, rounds: int) -> int:
    """Graphs of several batch sizes and eager calls in one random order, the same on all ranks."""
    op, ledger = new_op(context, shape), Ledger(context)
    sizes = [0, 1, 2, 7, 32, 95, 96]
    choose = random.Random(seed)
    pairs, patterns = [], []
    for number, size in enumerate(sizes):
        # Every rank has a batch size of its own in each step.
        counts = [sizes[(number + 3 * peer) % len(sizes)] for peer in range(context.world_size)]
        tokens = counts[context.rank]
        pairs.append(GraphedPair(context, op, shape, tokens, together=number % 2 == 0, external=size % 2 == 0))
        patterns.append(patterns_of(context, shape, seed + 100 * number, counts, 4))
    for tag in range(rounds):
        number = choose.randrange(len(sizes))
        pattern = patterns[number][choose.randrange(4)]
        if choose.random() < 0.25:
            play(op, pattern, tag, ledger, external=choose.random() < 0.5)
        else:
            pairs[number].play(pattern, tag, ledger)
    op.check()
    return ledger.settle()


@pytest.mark.parametrize("shape", [F32, BF16], ids=["f32", "bf16"])
def test_graphs_of_many_sizes_mixed_with_eager_calls(gpus: GpuPool, seed: int, shape: Shape):
    assert min(gpus.run(mixed_sizes, shape, seed, 300)) == 6 * 300


def many_layers(context: RankContext, shape: Shape, seed: int, replays: int) -> int:
    op, ledger = new_op(context, shape), Ledger(context)
    counts = [shape.max_tokens] * context.world_size
    pair = GraphedPair(context, op, shape, counts[context.rank], layers=20)
    patterns = patterns_of(context, shape, seed, counts, 5)
    for tag in range(replays):
        pair.play(patterns[tag % 5], tag, ledger)
    op.check()
    calls = op.stats()
    assert (calls["dispatches"], calls["combines"]) == (20 * replays, 20 * replays), calls
    return ledger.settle()


def test_twenty_layers_in_a_graph(gpus: GpuPool, seed: int):
    assert min(gpus.run(many_layers, BF16, seed, 100)) == 6 * 100


def captured_on_a_side_stream(context: RankContext, seed: int) -> int:
    op, ledger = new_op(context, F32), Ledger(context)
    counts = [F32.max_tokens] * context.world_size
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        pair = GraphedPair(context, op, F32, counts[context.rank])
        for tag, pattern in enumerate(patterns_of(context, F32, seed, counts, 5)):
            pair.play(pattern, tag, ledger)
    stream.synchronize()
    op.check()
    return ledger.settle()


def test_replays_on_a_side_stream(gpus: GpuPool, seed: int):
    assert min(gpus.run(captured_on_a_side_stream, seed)) == 6 * 5
