"""What ops do besides plain dispatch and combine of bf16, executed: every call of the public API goes through the HIP
driver to simulated devices, and every result is held against the reference, bit for bit."""

from __future__ import annotations

import os
import re
import signal

import pytest
import torch

from mori import archs
from tests.amd.end_to_end.pool import WORLD, SimulatedPool
from tests.gpu.bridge import exercise_on_device, new_exercise
from tests.rank_worker import RankContext
from tests.v1 import test_routing_handles as handles
from tests.v1 import test_standard_moe as standard_moe
from tests.v1.cases import Case, Step, routing
from tests.v1.exercise import new_op, require

TOPK, EXPERTS, TOKENS, ROOM = 2, 2, 4, 6
FP8 = {"ocp": torch.float8_e4m3fn, "fnuz": torch.float8_e4m3fnuz}
# All ops have one shape, whose kernels are compiled once: room for f32, and for fewer rows than may come.
ROUTED = routing("any", [3, 3], TOPK, EXPERTS)
CASE = Case(
    WORLD,
    48,
    TOPK,
    EXPERTS,
    TOKENS,
    (Step("dispatch", ROUTED), Step("combine")),
    dtype=torch.float32,
    receive_cap=ROOM,
    grid=(2, 2),
)


def fp8_of(arch: str) -> torch.dtype:
    (flavour,) = archs.find(arch).fp8
    return FP8[flavour]


def with_options(**options: object) -> Case:
    return Case(**{**vars(CASE), **options})


@pytest.mark.parametrize("values", ["bits", "special"])
@pytest.mark.parametrize("dtype", ["f32", "fp8"])
def test_combines_of_other_types(arch: str, ranks: SimulatedPool, dtype: str, values: str) -> None:
    combined = torch.float32 if dtype == "f32" else fp8_of(arch)
    steps = (*CASE.steps, Step("dispatch", ROUTED), Step("combine", external=False))
    ranks.run(exercise_on_device, with_options(steps=steps, combine_dtype=combined, values=values))


def test_a_direct_cast(arch: str, ranks: SimulatedPool) -> None:
    case = with_options(quant_type="fp8_direct_cast", values="wide", wire_fp8=fp8_of(arch))
    ranks.run(exercise_on_device, case)


def test_calls_in_two_halves(ranks: SimulatedPool) -> None:
    ranks.run(exercise_on_device, with_options(kernel_type="AsyncLL", dtype=torch.bfloat16))


def replay(context: RankContext, program: str, case: Case) -> None:
    handles.Runner(context, case).run(program)


def test_replays_along_handles(ranks: SimulatedPool) -> None:
    program = "H H R0 C0 R1 C1"
    steps = handles.case_of(program, [[3, 3], [0, 2]], TOPK, EXPERTS).steps
    ranks.run(replay, program, with_options(steps=steps, combine_dtype=torch.float32))


def by_expert(context: RankContext, case: Case, fused: bool) -> None:
    standard_moe.Runner(context, case).there_and_back(0, fused, fused)


@pytest.mark.parametrize("fused", [True, False])
def test_rows_by_expert(ranks: SimulatedPool, fused: bool) -> None:
    ranks.run(by_expert, with_options(combine_dtype=torch.float32), fused)


def overflow(context: RankContext, case: Case) -> list[int]:
    """All tokens go to rank 0, which has no room for them; then the case, as if nothing had been."""
    import mori

    exercise = new_exercise(context, case)
    op = exercise.op
    ids = torch.zeros(TOKENS, TOPK, dtype=torch.int32)
    op.dispatch(torch.ones(TOKENS, case.hidden), None, None, ids, **exercise.grid())
    try:
        op.check()
    except mori.ReceiveOverflow as error:
        numbers = [int(number) for number in re.findall(r"\d+", str(error))]
    require(op._plan.received == 0, f"{op._plan.received} rows were received all the same")
    out, _ = op.combine(torch.ones(0, case.hidden, dtype=torch.bfloat16), None, ids, **exercise.grid())
    require(not out[:TOKENS].view(torch.int16).any(), "combine after an overflow is not zero")
    exercise.run()
    return numbers


def test_an_overflow_is_told_on_both_ranks_and_the_op_goes_on(ranks: SimulatedPool) -> None:
    call, flooded, no_cap = 1, 0, 0
    assert ranks.run(overflow, CASE) == [[call, flooded, WORLD * TOKENS, ROOM, no_cap]] * WORLD


def outlive(context: RankContext, case: Case) -> tuple[int | None, str]:
    """Rank 1 dies while the kernel of rank 0 waits for it."""
    import mori

    op = new_op(context, case)
    rows, ids = torch.ones(1, case.hidden), torch.zeros(1, case.topk, dtype=torch.int32)
    if context.rank == 0:
        op.dispatch(rows, None, None, ids)  # returns at once
    with torch._C.DisableTorchFunction():  # which would wait for the kernel
        context.barrier()
    if context.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        op.check()
    except mori.PeerLost as error:
        return error.peer, str(error)
    return None, "nothing was raised"


def test_a_dead_peer_ends_a_kernel_that_waits_for_it(ranks: SimulatedPool) -> None:
    outcomes = ranks.outcomes(outlive, CASE)
    assert outcomes[1].exit_code == -signal.SIGKILL
    assert outcomes[0].failure is None, outcomes[0].failure
    peer, text = outcomes[0].value
    assert peer == 1, text
