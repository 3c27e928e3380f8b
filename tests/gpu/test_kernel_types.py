"""Kernel types, quantised combine, routing handles and standard-MoE layouts on GPUs."""

from __future__ import annotations

import pytest
import torch

from tests.gpu.bridge import exercise_on_device
from tests.gpu.ranks import GpuPool, device_of, synchronize
from tests.rank_worker import RankContext
from tests.v1.cases import BLOCKWISE, KERNEL_TYPES, QUANT_TYPES, Case, Step, routing
from tests.v1.exercise import new_op, require

pytestmark = pytest.mark.gpu

TOKENS, TOPK, EXPERTS = 45, 4, 6


def steps_of(world_size: int, tokens: int = TOKENS, external: bool = True) -> tuple[Step, ...]:
    steps: list[Step] = []
    for number, style in enumerate(("any", "wild", "distinct")):
        indices = routing(style, [tokens - number] * world_size, TOPK, EXPERTS, seed=number)
        steps += [Step("dispatch", indices), Step("combine", external=external, whole_view=number == 1)]
    return tuple(steps)


@pytest.mark.parametrize("external", [True, False], ids=["external", "zero_copy"])
@pytest.mark.parametrize("kernel_type", KERNEL_TYPES)
def test_every_kernel_type(gpus: GpuPool, seed: int, kernel_type: str, external: bool):
    steps = steps_of(gpus.world_size, external=external)
    case = Case(gpus.world_size, 672, TOPK, EXPERTS, TOKENS, steps, values="bits", seed=seed, kernel_type=kernel_type)
    gpus.run(exercise_on_device, case)


@pytest.mark.parametrize("hidden", [7, 96, 2880, 7168])
@pytest.mark.parametrize("values", ["wide", "special"])
@pytest.mark.parametrize("quant_type", QUANT_TYPES[1:])
def test_every_quantisation(gpus: GpuPool, seed: int, quant_type: str, values: str, hidden: int):
    offered = [name for name in KERNEL_TYPES if name in BLOCKWISE.get(quant_type, KERNEL_TYPES)]
    for kernel_type in offered[:: max(1, len(offered) - 1)]:
        steps = steps_of(gpus.world_size)
        options = {"kernel_type": kernel_type, "quant_type": quant_type, "values": values, "seed": seed}
        gpus.run(exercise_on_device, Case(gpus.world_size, hidden, TOPK, EXPERTS, TOKENS, steps, **options))


def split_in_a_graph(context: RankContext, seed: int) -> int:
    """Send halves of two ops, then their receive halves, replayed with new data; IntraNode says what must come out."""
    case = Case(context.world_size, 672, TOPK, EXPERTS, TOKENS, (), seed=seed)
    plain = new_op(context, case)
    split = [new_op(context, Case(**{**vars(case), "kernel_type": "AsyncLL"})) for _ in range(2)]
    device = device_of(context)
    generator = torch.Generator(device).manual_seed(seed + context.rank)
    rows = [torch.zeros(TOKENS, 672, dtype=torch.bfloat16, device=device) for _ in split]
    ids = [torch.full((TOKENS, TOPK), -1, dtype=torch.int32, device=device) for _ in split]
    graph = torch.cuda.CUDAGraph()
    synchronize()
    context.barrier()
    with torch.cuda.graph(graph):
        sent = [
            op.dispatch_send(*each)
            for op, each in zip(split, [(x, None, None, i) for x, i in zip(rows, ids, strict=True)], strict=True)
        ]
        for op in split:
            op.dispatch_recv()
        combined = [op.combine_send(out[0], None, i)[0] for op, out, i in zip(split, sent, ids, strict=True)]
        for op in split:
            op.combine_recv()
    for _ in range(5):
        for x, i in zip(rows, ids, strict=True):
            x.normal_(generator=generator)
            i.random_(-1, EXPERTS * context.world_size, generator=generator)
        graph.replay()
        for which in range(2):
            out = plain.dispatch(rows[which], None, None, ids[which])
            count = int(out[4])
            require(int(sent[which][4]) == count, f"{int(sent[which][4])} rows, expected {count}")
            require(torch.equal(sent[which][0][:count], out[0][:count]), "rows differ")
            expected, _ = plain.combine(out[0], None, ids[which])
            require(torch.equal(combined[which][:TOKENS], expected[:TOKENS]), "sums differ")
    return 5


def test_split_calls_of_two_ops_in_a_graph(gpus: GpuPool, seed: int):
    assert gpus.run(split_in_a_graph, seed) == [5] * gpus.world_size


def handles(context: RankContext, seed: int) -> None:
    op = new_op(context, Case(context.world_size, 672, TOPK, EXPERTS, TOKENS, (), seed=seed))
    device = device_of(context)
    generator = torch.Generator(device).manual_seed(seed + context.rank)

    def draw() -> tuple[torch.Tensor, torch.Tensor]:
        rows = torch.randn(TOKENS, 672, generator=generator, device=device).to(torch.bfloat16)
        return rows, torch.randint(-1, EXPERTS * context.world_size, (TOKENS, TOPK), generator=generator, device=device)

    kept = []
    for _ in range(3):
        rows, ids = draw()
        ids = ids.to(torch.int32)
        *out, handle = op.dispatch(rows, None, None, ids, return_routing=True)
        received = out[0][: int(out[4])].clone()
        kept.append((rows, ids, handle, received, op.combine(out[0], None, ids)[0][:TOKENS].clone()))
    for rows, ids, handle, received, expected in reversed(kept):
        out = op.dispatch(rows, None, None, torch.zeros_like(ids), routing=handle)
        require(int(out[4]) == len(received), "the count of a replay differs")
        require(torch.equal(out[0][: len(received)], received), "a replay's rows differ")
        combined, _ = op.combine(received, None, ids, routing=handle)
        require(torch.equal(combined[:TOKENS], expected), "a combine along a handle differs")
    op.check()


def test_replays_along_handles(gpus: GpuPool, seed: int):
    gpus.run(handles, seed)


def by_expert(context: RankContext, seed: int, dtype: torch.dtype) -> None:
    op = new_op(context, Case(context.world_size, 672, TOPK, EXPERTS, TOKENS, (), seed=seed, dtype=dtype))
    device = device_of(context)
    generator = torch.Generator(device).manual_seed(seed + context.rank)
    rows = torch.randn(TOKENS, 672, generator=generator, device=device).to(dtype)
    weights = torch.rand(TOKENS, TOPK, generator=generator, device=device)
    ids = torch.randint(-1, EXPERTS * context.world_size, (TOKENS, TOPK), generator=generator, device=device)
    ids = ids.to(torch.int32)
    ids[:, 3] = ids[:, 0]  # an expert that is named twice
    out = op.dispatch(rows, weights, None, ids)
    count = int(out[4])
    received, received_weights, received_ids = (out[place][:count].clone() for place in (0, 1, 3))
    packed, counts, sources, _ = op.convert_dispatch_output(out[0], out[3])
    positions = op.get_dispatch_src_token_pos()
    first = context.rank * EXPERTS
    contribution = torch.zeros(count, 672, device=device)
    for expert in range(EXPERTS):
        wanted = (received_ids == first + expert).any(dim=1)
        require(int(counts[expert]) == int(wanted.sum()), f"expert {expert} has {int(counts[expert])} rows")
        require(torch.equal(packed[expert, : counts[expert]], received[wanted]), f"rows of expert {expert} differ")
        require(torch.equal(sources[expert, : counts[expert]], positions[wanted]), f"sources of {expert} differ")
    for k in range(TOPK):
        local = (received_ids[:, k] >= first) & (received_ids[:, k] < first + EXPERTS)
        contribution += torch.where(local[:, None], received.float() * received_weights[:, k : k + 1], 0.0)
    view = op.convert_combine_input(packed, sources, None)
    require(torch.equal(view[:count], contribution.to(dtype)), "weighted sums differ")
    expected = op.combine(view, None, ids, use_external_inp_buf=0)[0][:TOKENS].clone()
    fused = op.dispatch_standard_moe(rows, weights, None, ids)
    require(torch.equal(fused[1], counts), "counts of the fused launch differ")
    for expert in range(EXPERTS):
        most = int(counts[expert])
        require(torch.equal(fused[0][expert, :most], received[(received_ids == first + expert).any(dim=1)]), "rows")
    combined, _ = op.combine_standard_moe(fused[0], None, ids)
    require(torch.equal(combined[:TOKENS], expected), "the fused combine differs")
    op.check()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "f32"])
def test_rows_by_expert(gpus: GpuPool, seed: int, dtype: torch.dtype):
    gpus.run(by_expert, seed, dtype)
