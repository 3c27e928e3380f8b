"""EPv2 on GPUs: the cases of CPUs, parity with v1, and captured graphs with new data, weights and routing."""

from __future__ import annotations

import statistics
import time
from dataclasses import replace

import pytest
import torch

from mori import jit, target
from mori.ops import construction, device_code
from mori.ops.ahead_of_time import compile_all
from mori.ops.config import check_config
from mori.ops.dispatch_combine_v2 import hip_backend
from mori.parity.apis import v1_config, v2_config
from mori.parity.compare import differences
from mori.parity.configuration import Configuration, draw
from mori.parity.play import play
from tests.gpu.ranks import GpuPool, on_host, synchronize
from tests.parity.judge import expected
from tests.rank_worker import RankContext
from tests.v1 import cases
from tests.v1.cases import BF16, F32, Step, routing
from tests.v2.exercise import Exercise, case_of, exercise, new_op
from tests.v2.ranks import communicator
from tests.v2.replays import CapturedPair

pytestmark = pytest.mark.gpu

PAIR_IN_TURN = (Step("combine"), Step("combine", external=False))


def round_trips(*routings: tuple) -> tuple[Step, ...]:
    steps: list[Step] = []
    for number, indices in enumerate(routings):
        steps += [Step("dispatch", indices), PAIR_IN_TURN[number % 2]]
    return tuple(steps)


@pytest.mark.parametrize("combine_dtype", [BF16, F32], ids=["to bf16", "to f32"])
@pytest.mark.parametrize("dtype", cases.PAYLOAD_DTYPES, ids=lambda dtype: str(dtype).split(".")[1])
def test_dtypes_of_both_legs(gpus: GpuPool, seed: int, dtype: torch.dtype, combine_dtype: torch.dtype):
    indices = routing("any", [37 + peer for peer in range(gpus.world_size)], 6, 4)
    case = case_of(gpus.world_size, 672, 6, 4, 45, dtype=dtype, combine_dtype=combine_dtype, values="bits", seed=seed)
    gpus.run(exercise, replace(case, scale_dim=7, steps=round_trips(indices, indices)), timeout_s=120)


@pytest.mark.parametrize("order", ["DDC", "DCC", "DcC", "DDCCDC", "DcDcDc"])
def test_orders_of_calls(gpus: GpuPool, seed: int, order: str):
    steps = [
        Step("dispatch", routing("any", [45] * gpus.world_size, 5, 3, seed=number))
        if letter == "D"
        else Step("combine", external=letter == "C", whole_view=number % 2 == 0)
        for number, letter in enumerate(order)
    ]
    case = case_of(gpus.world_size, 672, 5, 3, 45, values="bits", seed=seed, steps=tuple(steps))
    gpus.run(exercise, case, timeout_s=120)


@pytest.mark.parametrize("tokens", [0, 1, 128, 4096])
def test_the_shape_of_a_large_model(gpus: GpuPool, seed: int, tokens: int):
    experts_per_rank = 256 // gpus.world_size
    indices = routing("distinct", [tokens] * gpus.world_size, 8, experts_per_rank)
    case = case_of(gpus.world_size, 7168, 8, experts_per_rank, max(tokens, 1), seed=seed, steps=round_trips(indices))
    gpus.run(exercise, case, timeout_s=120)


def kernels_of(configuration: Configuration) -> list[jit.Spec]:
    """What the ops of both APIs run."""
    arch, combine = target.current().arch, hip_backend.combine_kernel(v2_config(configuration, 0, "hip"))
    v1 = v1_config(configuration, 0)
    shapes = construction.shape_of(v1, check_config(v1, arch)), hip_backend.shape_of(v2_config(configuration, 0, "hip"))
    return [device_code.spec(name, shape, arch) for shape in shapes for name in ("dispatch", combine)]


def play_parity(context: RankContext, seeds: range) -> list[str]:
    from mori.shmem import state

    found: list[str] = []
    if not on_host():  # several at a time, and each by one rank
        specs = [spec for number in seeds for spec in kernels_of(draw(number, context.world_size))]
        for spec, error in compile_all(specs[context.rank :: context.world_size], 12):
            assert error is None, (spec.name, error)
    comm = communicator(context)

    def barrier() -> None:
        synchronize()
        comm.barrier()

    for number in seeds:
        configuration = draw(number, context.world_size)
        outcomes = {
            "v1": play(configuration, context.rank, "v1", "hip", state.current().communicator, barrier),
            "v2": play(configuration, context.rank, "v2", "hip", comm, barrier),
            "reference": expected(configuration, context.rank),
        }
        for ways in (("v1", "v2"), ("v2", "reference")):
            found += map(str, differences(ways, [configuration], *([[outcomes[way]]] for way in ways)))
    return found


@pytest.mark.parametrize("part", range(2))
def test_parity_with_v1(gpus: GpuPool, part: int):
    """60 configurations in all."""
    found = gpus.run(play_parity, range(30 * part, 30 * part + 30), timeout_s=600)
    assert not any(found), found


SHAPE = case_of(2, 672, 4, 4, 96)


def capture_first(context: RankContext, seed: int, together: bool, external: bool, replays: int) -> int:
    """The op has not been called before the capture."""
    op = new_op(context, replace(SHAPE, world_size=context.world_size))
    pair = CapturedPair(op, 40 + context.rank, together=together, external=external)
    wrong = sum(
        pair.play(torch.Generator().manual_seed(seed + 100 * number + context.rank)) for number in range(replays)
    )
    op.check()
    counts = op.stats()
    op.close()
    assert (counts["dispatches"], counts["combines"]) == (replays, replays), counts
    return int(wrong)


@pytest.mark.parametrize("external", [True, False], ids=["external", "in place"])
@pytest.mark.parametrize("together", [True, False], ids=["together", "apart"])
def test_two_hundred_replays_of_a_first_call(gpus: GpuPool, seed: int, together: bool, external: bool):
    assert set(gpus.run(capture_first, seed, together, external, 200, timeout_s=120)) == {0}


def mixed_sizes(context: RankContext, seed: int, rounds: int) -> int:
    """Graphs of many sizes and eager calls in turns; an eager combine follows a handle that graphs have overtaken."""
    case = replace(SHAPE, world_size=context.world_size)
    steps = (
        Step("dispatch", routing("any", [30] * context.world_size, 4, 4)),
        Step("combine"),
    )
    op = new_op(context, case)
    pairs = [CapturedPair(op, tokens, together=tokens % 2 == 0) for tokens in (0, 1, 7, 32, 96)]
    eager = Exercise(context, case.with_steps(*steps), op=op)
    wrong = 0
    for number in range(rounds):
        pair = pairs[(number + context.rank) % len(pairs)]
        wrong += int(pair.play(torch.Generator().manual_seed(seed + 100 * number + context.rank)))
        if number % 3 == 0:
            eager.dispatch(0, steps[0])
            eager.combine(1, steps[1])
    op.check()
    op.close()
    return wrong


def test_graphs_of_many_sizes_mixed_with_eager_calls(gpus: GpuPool, seed: int):
    assert set(gpus.run(mixed_sizes, seed, 60, timeout_s=120)) == {0}


def host_times_us(context: RankContext, calls: int) -> tuple[float, float]:
    """Medians of a dispatch with a handle and of a combine, from entry to return, the GPU kept from falling behind."""
    op = new_op(context, case_of(context.world_size, 7168, 8, 32, 16))
    rows = torch.zeros(16, 7168, dtype=BF16, device=op.dev)
    weights, ids = torch.zeros(16, 8, device=op.dev), torch.zeros(16, 8, dtype=torch.int32, device=op.dev)
    spans: tuple[list[float], list[float]] = ([], [])
    view = op.combine_in_view()
    for number in range(calls):
        if number % 64 == 0:
            synchronize()
            communicator(context).barrier()
        entry = time.perf_counter()
        *_, handle = op.dispatch(rows, weights, None, ids, return_routing=True)
        between = time.perf_counter()
        op.combine(view, routing=handle)
        spans[0].append(between - entry)
        spans[1].append(time.perf_counter() - between)
    synchronize()
    op.close()
    dispatch, combine = (1e6 * statistics.median(each) for each in spans)
    return dispatch, combine


def test_host_time_of_a_call(gpus: GpuPool, record_property):
    """With one launch at most 9 microseconds."""
    times = gpus.run(host_times_us, 10_000, timeout_s=120)
    dispatch, combine = (max(each) for each in zip(*times, strict=True))
    record_property("dispatch_us", dispatch)
    record_property("combine_us", combine)
    if not on_host():
        assert max(dispatch, combine) <= 9, f"dispatch {dispatch:.1f} us, combine {combine:.1f} us"
