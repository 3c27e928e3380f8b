"""Dispatch and combine, as mori.jit builds them for AMD GPUs, executed: several ranks, every result held against the
reference bit for bit, whatever the order in which waves run and memory operations arrive."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch

from mori import archs
from mori.ops import device_code
from mori.ops.engine import EpShape
from tests import quantised_reference, reference
from tests.amd.build import BUILDS, build_kernel
from tests.amd.sim.launch_layout import LaunchLayout
from tests.amd.sim.machine import Code, Machine
from tests.amd.sim.program import Program
from tests.amd.sim.ranks import Grid, Group, Kernels
from tests.amd.sim.toolchain import ARCHS, compile_spec

WORLD, MAX_TOKENS, EXPERTS, TOPK, BLOCK_SCALES = 2, 8, 2, 2, 4
PLAIN = EpShape(
    world_size=WORLD,
    rank=0,
    max_tokens=MAX_TOKENS,
    hidden_dim=256,
    max_element_bytes=2,
    scale_dim=0,
    scale_element_bytes=0,
    experts_per_rank=EXPERTS,
    topk=TOPK,
    max_recv_tokens=WORLD * MAX_TOKENS,
)
EQUIPPED = replace(PLAIN, may_stage=True, block_scales=BLOCK_SCALES)
MOST_INSTRUCTIONS = 1_000_000

Sums = Callable[[str, reference.Routing, Sequence[torch.Tensor]], list[torch.Tensor]]


def fp8_in_blocks(arch: str, routing: reference.Routing, rows: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    flavour = torch.float8_e4m3fnuz if arch == "gfx942" else torch.float8_e4m3fn
    return quantised_reference.fp8_blockwise_combine(routing, rows, BLOCK_SCALES, flavour)


def fp4_in_blocks(arch: str, routing: reference.Routing, rows: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return quantised_reference.fp4_blockwise_combine(routing, rows, BLOCK_SCALES)


class Scenario(NamedTuple):
    """`calls` is what every rank does, D and C; every C returns rows for the D before it."""

    name: str
    shape: EpShape = PLAIN
    combine: str = "combine_bf16"
    sums: Sums = lambda arch, routing, rows: reference.combine(routing, rows)
    calls: str = "DCDC"
    tokens: tuple[int, int] = (5, 6)
    hidden: int = 128
    grid: Grid = Grid(blocks=2, warps=2, parts=1, stagers=1)
    resident_blocks: int | None = None
    weighted: bool = True
    staged: tuple[bool, bool] = (False, False)
    """Which ranks send their rows by way of the landing areas."""

    def __str__(self) -> str:
        return self.name


TWO_ROUNDS = Scenario("two rounds")
OTHERS = [
    Scenario("a rank without tokens, rows of odd size", tokens=(0, 8), hidden=65),
    Scenario(
        "rows split over waves, one resident block", tokens=(1, 3), hidden=256, grid=Grid(3, 2, 2, 2), resident_blocks=1
    ),
    Scenario("combine after combine, no weights", calls="DDCC", tokens=(4, 7), hidden=64, weighted=False),
    Scenario("direct and staged", EQUIPPED, staged=(True, False)),
    Scenario("fp8 in blocks", EQUIPPED, "combine_fp8_blockwise", fp8_in_blocks, calls="DC"),
    Scenario("fp4 in blocks", EQUIPPED, "combine_fp4_blockwise", fp4_in_blocks, calls="DC", hidden=120),
]


OTHER_RUNS = [
    (scenario, arch) for scenario in OTHERS for arch in ARCHS if archs.runs_on(scenario.combine, archs.find(arch))
]


@functools.cache
def code(kernel: str, shape: EpShape, arch: str) -> Code:
    base = 0x1_0000_0000 if kernel == "dispatch" else 0x2_0000_0000
    return Code(Program(compile_spec(device_code.spec(kernel, shape, arch)), base))


@pytest.fixture(scope="session")
def layout(tmp_path_factory: pytest.TempPathFactory) -> LaunchLayout:
    return LaunchLayout(tmp_path_factory.mktemp("layout"))


class Round(NamedTuple):
    """A dispatch: what goes in, for all ranks, and what has to come out of it and of a combine of it."""

    rows: list[torch.Tensor]
    weights: list[torch.Tensor]
    indices: list[torch.Tensor]
    routing: reference.Routing
    received: list[reference.Received]
    returned: list[torch.Tensor]
    returned_weights: list[torch.Tensor]
    combined: list[torch.Tensor]
    combined_weights: list[torch.Tensor | None]

    @staticmethod
    def random(scenario: Scenario, arch: str, generator: torch.Generator) -> Round:
        def numbers(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator)

        rows = [numbers(n, scenario.hidden).bfloat16() for n in scenario.tokens]
        weights = [numbers(n, TOPK) for n in scenario.tokens]
        # From -1, which names no expert, to one beyond the last.
        indices = [
            torch.randint(-1, WORLD * EXPERTS + 1, (n, TOPK), dtype=torch.int32, generator=generator)
            for n in scenario.tokens
        ]
        routing = reference.route(indices, EXPERTS)
        received = reference.dispatch(routing, rows, indices, weights, None, MAX_TOKENS)
        returned = [numbers(*one.rows.shape).bfloat16() for one in received]
        returned_weights = [numbers(*one.weights.shape) for one in received]
        given: list[Any] = returned_weights if scenario.weighted else [None] * WORLD
        return Round(
            rows,
            weights,
            indices,
            routing,
            received,
            returned,
            returned_weights,
            scenario.sums(arch, routing, returned),
            reference.combine_weights(routing, given, TOPK),
        )


def bits(tensor: torch.Tensor) -> list[Any]:
    return reference.as_bytes(tensor.reshape(len(tensor), -1) if len(tensor) else tensor.reshape(0, 1)).tolist()


def check_dispatch(group: Group, rank: int, expected: Round) -> None:
    wanted = expected.received[rank]
    got = group.ranks[rank].received(wanted.rows.shape[1])
    assert len(got.rows) == len(wanted.rows)
    for name in ("rows", "weights", "indices", "source_position"):
        assert bits(getattr(got, name)) == bits(getattr(wanted, name)), name
    destination, row = (torch.from_numpy(table[rank]) for table in (expected.routing.destination, expected.routing.row))
    nowhere = WORLD * WORLD * MAX_TOKENS
    flat = torch.where(destination < 0, nowhere, destination * WORLD * MAX_TOKENS + row)
    assert group.ranks[rank].sender_map(len(flat)).tolist() == flat.tolist()


def check_combine(group: Group, rank: int, expected: Round) -> None:
    assert bits(group.ranks[rank].combined_rows(*expected.combined[rank].shape)) == bits(expected.combined[rank])
    weights = expected.combined_weights[rank]
    if weights is not None:
        assert bits(group.ranks[rank].combined_weights(len(weights))) == bits(weights)


def streams(group: Group, scenario: Scenario, rounds: Iterator[Round], checked: list[str]) -> list[list[Any]]:
    """Per rank: launches, and checks of what they left behind."""
    work: list[list[Any]] = [[] for _ in range(WORLD)]
    current: Round | None = None
    for call in scenario.calls:
        if call == "D":
            current = next(rounds)
        assert current is not None
        for rank, stream in zip(group.ranks, work, strict=True):
            number = rank.rank
            if call == "D":
                given = current.rows[number], current.weights[number], current.indices[number]
                stream.append(rank.dispatch(*given, staged=scenario.staged[number]))
                check = check_dispatch
            else:
                weights = current.returned_weights[number] if scenario.weighted else None
                stream.append(rank.combine(current.returned[number], weights, scenario.tokens[number]))
                check = check_combine
            stream.append(functools.partial(check, group, number, current))
            stream.append(functools.partial(checked.append, call))
    return work


def execute(layout: LaunchLayout, arch: str, scenario: Scenario, seed: int) -> None:
    shape, generator = scenario.shape, torch.Generator().manual_seed(seed)
    kernels = Kernels(dispatch=code("dispatch", shape, arch), combine=code(scenario.combine, shape, arch))
    group = Group(layout, kernels, shape, scenario.grid)
    checked: list[str] = []
    rounds = iter(lambda: Round.random(scenario, arch, generator), None)
    work = streams(group, scenario, rounds, checked)
    machine = Machine(group.memory, seed, scenario.resident_blocks)
    machine.run(*work, most_instructions=MOST_INSTRUCTIONS)
    assert sorted(checked) == sorted(scenario.calls * WORLD)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_two_rounds(layout: LaunchLayout, arch: str, seed: int) -> None:
    execute(layout, arch, TWO_ROUNDS, seed)


@pytest.mark.parametrize("scenario, arch", OTHER_RUNS, ids=str)
def test_other_calls(layout: LaunchLayout, arch: str, scenario: Scenario) -> None:
    execute(layout, arch, scenario, seed=4)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(10, 30))
@pytest.mark.parametrize("scenario, arch", [*[(TWO_ROUNDS, arch) for arch in ARCHS], *OTHER_RUNS], ids=str)
def test_many_orders(layout: LaunchLayout, arch: str, scenario: Scenario, seed: int) -> None:
    execute(layout, arch, scenario, seed)


@pytest.mark.parametrize("kernel", ["dispatch", "combine_bf16"])
def test_every_instruction_is_known(arch: str, kernel: str) -> None:
    built = code(kernel, PLAIN, arch)
    for index in range(len(built.program.instructions)):
        built.bound(index)
    assert len(built.program.instructions) > 1000


@pytest.mark.full
@pytest.mark.parametrize("kernel, arch", BUILDS)
def test_every_instruction_of_every_kernel_is_known(kernel: str, arch: str) -> None:
    built = Code(build_kernel(kernel, arch).program)
    for index in range(len(built.program.instructions)):
        built.bound(index)
    assert len(built.program.instructions) > 100


def test_launch_structs_have_no_other_fields(layout: LaunchLayout) -> None:
    for launch, fields in layout.fields.items():
        end = 0
        for name, (offset, size) in sorted(fields.items(), key=lambda field: field[1]):
            assert 0 <= offset - end < 8, f"{launch}: {offset - end} bytes before {name}"
            end = offset + size
        assert layout.bytes_of(launch) - end < 8


def test_a_launch_struct_needs_all_its_fields(layout: LaunchLayout) -> None:
    with pytest.raises(KeyError, match="tokens"):
        layout.pack("DispatchArgs", {name: 0 for name in layout.fields["DispatchArgs"] if name != "tokens"})
