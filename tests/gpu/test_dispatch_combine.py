"""Dispatch and combine on GPUs against the reference, bit for bit, order of rows included."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.gpu.bridge import exercise_on_device
from tests.gpu.ranks import GpuPool
from tests.v1 import cases
from tests.v1.cases import Case, Step, routing

pytestmark = pytest.mark.gpu

BOTH_COMBINES = (Step("combine"), Step("combine", external=False))
HIDDEN = (1, 7, 96, 672, 2880, 7168)
FP8, FNUZ = torch.float8_e4m3fn, torch.float8_e4m3fnuz
# NVIDIA GPUs move rows of the other flavour of fp8, but do not add them up.
ADDED_DTYPES = [dtype for dtype in cases.PAYLOAD_DTYPES if dtype != FNUZ]


def round_trips(*routings: tuple, **options) -> tuple[Step, ...]:
    """Dispatch and combine for each routing, alternating between the two combine modes."""
    steps: list[Step] = []
    for number, indices in enumerate(routings):
        steps += [Step("dispatch", indices, **options), BOTH_COMBINES[number % 2]]
    return tuple(steps)


@pytest.mark.parametrize("hidden", HIDDEN)
@pytest.mark.parametrize("dtype", cases.PAYLOAD_DTYPES, ids=lambda dtype: str(dtype).split(".")[1])
def test_every_hidden_size_and_dtype(gpus: GpuPool, seed: int, hidden: int, dtype: torch.dtype):
    indices = routing("any", [37] * gpus.world_size, 4, 3, seed=seed % 1000)
    case = Case(gpus.world_size, hidden, 4, 3, 37, round_trips(indices, indices), values="bits", seed=seed)
    back = dtype if dtype in ADDED_DTYPES else torch.bfloat16
    gpus.run(exercise_on_device, replace(case, dtype=dtype, combine_dtype=back))


@pytest.mark.parametrize("topk", range(1, 17))
def test_every_topk(gpus: GpuPool, seed: int, topk: int):
    counts = [70] * gpus.world_size
    indices = [routing(style, counts, topk, 9, seed=topk) for style in ("distinct", "any", "wild")]
    gpus.run(
        exercise_on_device, Case(gpus.world_size, 96, topk, 9, 70, round_trips(*indices), values="bits", seed=seed)
    )


@pytest.mark.parametrize("topk", [22, 33, 64])
def test_topk_beyond_a_warp(gpus: GpuPool, seed: int, topk: int):
    indices = routing("any", [19] * gpus.world_size, topk, 40)
    gpus.run(exercise_on_device, Case(gpus.world_size, 40, topk, 40, 19, round_trips(indices, indices), seed=seed))


@pytest.mark.parametrize("style", cases.ROUTING_STYLES)
def test_every_kind_of_routing(gpus: GpuPool, seed: int, style: str):
    counts = [130] * gpus.world_size
    steps = round_trips(routing("any", counts, 6, 4), routing(style, counts, 6, 4), routing("any", counts, 6, 4))
    gpus.run(exercise_on_device, Case(gpus.world_size, 672, 6, 4, 130, steps, values="bits", seed=seed))


@pytest.mark.parametrize("nobody", ["W*E", 2**30, -2, -1, 2**31 - 1, -(2**31)])
def test_one_id_outside_the_experts(gpus: GpuPool, seed: int, nobody):
    indices = routing("any", [40] * gpus.world_size, 4, 3)
    indices[1][33, 1] = gpus.world_size * 3 if nobody == "W*E" else nobody
    gpus.run(exercise_on_device, Case(gpus.world_size, 12, 4, 3, 40, round_trips(indices, indices), seed=seed))


@pytest.mark.parametrize("idle", ["first", "last", "all"])
def test_ranks_without_tokens(gpus: GpuPool, seed: int, idle: str):
    counts = [33] * gpus.world_size
    for rank in {"first": [0], "last": [-1], "all": range(gpus.world_size)}[idle]:
        counts[rank] = 0
    indices = routing("any", counts, 4, 2)
    steps = round_trips(indices, indices, indices)
    gpus.run(exercise_on_device, Case(gpus.world_size, 96, 4, 2, 33, steps, scale_dim=4, seed=seed))


@pytest.mark.parametrize("target", ["first", "last"])
def test_one_rank_receives_everything(gpus: GpuPool, seed: int, target: str):
    expert = 0 if target == "first" else gpus.world_size * 2 - 1
    indices = tuple(ids * 0 + expert for ids in routing("any", [600] * gpus.world_size, 4, 2))
    case = Case(gpus.world_size, 96, 4, 2, 600, round_trips(indices, indices), values="bits", seed=seed)
    gpus.run(exercise_on_device, case)


@pytest.mark.parametrize("scale_bytes", [1, 2, 4])
@pytest.mark.parametrize("scale_dim", [1, 7, 56, 224])
def test_scales_are_moved_as_bytes(gpus: GpuPool, seed: int, scale_dim: int, scale_bytes: int):
    counts = [50] * gpus.world_size
    counts[0] = 11
    indices = routing("any", counts, 4, 3)
    steps = (*round_trips(indices, indices), *round_trips(indices, scales=False))
    case = Case(gpus.world_size, 128, 4, 3, 50, steps, dtype=FP8, seed=seed)
    gpus.run(exercise_on_device, replace(case, scale_dim=scale_dim, scale_bytes=scale_bytes))


def test_the_other_flavour_of_fp8_is_not_added_up(gpus: GpuPool):
    indices = routing("any", [8] * gpus.world_size, 4, 3)
    case = Case(gpus.world_size, 64, 4, 3, 8, round_trips(indices), dtype=FNUZ, combine_dtype=FNUZ)
    for outcome in gpus.outcomes(exercise_on_device, case):
        assert "TypeError: sm_" in outcome.failure and "cannot run combine_fp8_fnuz" in outcome.failure


@pytest.mark.parametrize("values", ["bits", "special"])
@pytest.mark.parametrize("dtype", ADDED_DTYPES, ids=lambda dtype: str(dtype).split(".")[1])
def test_combine_arithmetic_on_every_kind_of_value(gpus: GpuPool, seed: int, values: str, dtype: torch.dtype):
    indices = routing("spread", [200] * gpus.world_size, 8, 2)
    steps = round_trips(indices, indices)
    case = Case(
        gpus.world_size, 1000, 8, 2, 200, steps, dtype=dtype, combine_dtype=dtype, values=values, seed=seed % 2**16
    )
    gpus.run(exercise_on_device, case)


@pytest.mark.parametrize("order", ["DDC", "DCC", "DcC", "CD", "DDCCDC", "D"])
def test_orders_of_calls(gpus: GpuPool, seed: int, order: str):
    counts = [45] * gpus.world_size
    steps = [
        Step("dispatch", routing("any", counts, 5, 3, seed=number))
        if letter == "D"
        else Step("combine", external=letter == "C", whole_view=number % 2 == 0)
        for number, letter in enumerate(order)
    ]
    gpus.run(exercise_on_device, Case(gpus.world_size, 672, 5, 3, 45, tuple(steps), values="bits", seed=seed))


# DeepSeek-V3: 8 of 256 experts, hidden 7168; fp8 rows carry 56 float32 scales.
@pytest.mark.parametrize("dtype", [torch.bfloat16, FP8], ids=["bf16", "fp8"])
@pytest.mark.parametrize("tokens", [1, 16, 128, 1024, 4096])
def test_the_shape_of_a_large_model(gpus: GpuPool, seed: int, tokens: int, dtype: torch.dtype):
    experts_per_rank = 256 // gpus.world_size
    indices = routing("distinct", [tokens] * gpus.world_size, 8, experts_per_rank, seed=seed % 1000)
    steps = (Step("dispatch", indices), BOTH_COMBINES[dtype == FP8])
    case = Case(
        gpus.world_size,
        7168,
        8,
        experts_per_rank,
        tokens,
        steps,
        dtype=dtype,
        scale_dim=56 if dtype == FP8 else 0,
        scale_bytes=4,
        values="bits",
        seed=seed,
    )
    gpus.run(exercise_on_device, case, timeout_s=120)


@pytest.mark.parametrize("grid", [(1, 1), (3, 2), (132, 1), (132, 16)], ids=lambda grid: "x".join(map(str, grid)))
@pytest.mark.parametrize("tokens", [513, 3000, 20_001])
def test_more_tokens_than_a_block_counts(gpus: GpuPool, seed: int, tokens: int, grid: tuple[int, int]):
    """They are counted in chunks, by any number of blocks."""
    counts = [tokens, 700] + [0] * (gpus.world_size - 2)
    steps = round_trips(routing("any", counts, 3, 2), routing("wild", counts, 3, 2, seed=1))
    case = Case(gpus.world_size, 4, 3, 2, max(counts), steps, values="bits", seed=seed, grid=grid)
    gpus.run(exercise_on_device, case)


@pytest.mark.parametrize("tokens", [65536, 70000])
def test_more_tokens_than_sixteen_bits_count(gpus: GpuPool, seed: int, tokens: int):
    indices = routing("any", [tokens] + [17] * (gpus.world_size - 1), 2, 1)
    steps = round_trips(indices, indices)
    gpus.run(exercise_on_device, Case(gpus.world_size, 8, 2, 1, tokens, steps, values="bits", seed=seed))
