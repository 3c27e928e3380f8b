"""Standard-MoE layouts: received rows by local expert and back, in one launch or in two, against the reference."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import reference, standard_moe_reference
from tests.rank_worker import RankContext
from tests.ranks import pool
from tests.v1 import cases
from tests.v1.cases import BF16, KERNEL_TYPES, PAYLOAD_DTYPES, ROUTING_STYLES, Case, Step, routing
from tests.v1.exercise import environment, new_op, raises, require, require_same_bits
from tests.v1.strategies import case_for

OFFERED = ("IntraNode", "InterNodeV1LL")
SPLIT_AND_FUSED = tuple(product((False, True), repeat=2))  # of the way there, and of the way back


class Runner:
    """Takes the dispatches of a case there and back, and holds all that comes of them against the reference."""

    def __init__(self, context: RankContext, case: Case, delay_us: int = 0) -> None:
        self.context = context
        self.case = case
        self.op = new_op(context, case)
        if delay_us:
            self.op._plan.set_test_delays(context.rank + 1, delay_us)
        self.counts_address: int | None = None

    @property
    def places_per_expert(self) -> int:
        return self.case.world_size * self.case.max_tokens

    def expect(self, number: int) -> None:
        """What a dispatch of the step brings to every rank, and where it goes."""
        case = self.case
        ranks = range(case.world_size)
        step = case.steps[number]
        self.indices = [torch.from_numpy(ids) for ids in step.indices]
        self.payloads = [cases.payload(case, number, rank) for rank in ranks]
        self.weights = [cases.weights(case, number, rank) for rank in ranks]
        self.route = reference.route(self.indices, case.experts_per_rank)
        self.received = reference.dispatch(self.route, self.payloads, self.indices, self.weights, None, case.max_tokens)
        self.places = [
            standard_moe_reference.place(received, rank, case.experts_per_rank)
            for rank, received in enumerate(self.received)
        ]

    def dispatch(self, number: int, fused: bool, **keywords) -> tuple[torch.Tensor, ...]:
        rank, op = self.context.rank, self.op
        scales = cases.scales(self.case, number, rank)
        arguments = (self.payloads[rank], self.weights[rank], scales, self.indices[rank])
        if fused:
            packed = op.dispatch_standard_moe(*arguments)
        else:
            rows, _, _, ids, *_ = op.dispatch(*arguments, **keywords)
            packed = op.convert_dispatch_output(rows, ids)
        self.check_packed(packed, f"dispatch {number}, fused={fused}")
        return packed

    def check_packed(self, packed: tuple[torch.Tensor, ...], when: str) -> None:
        case, rank = self.case, self.context.rank
        received, places = self.received[rank], self.places[rank]
        rows, counts, sources, layout = packed
        experts, per_expert = case.experts_per_rank, self.places_per_expert
        require(tuple(rows.shape) == (experts, per_expert, case.hidden), f"{when}: rows are {tuple(rows.shape)}")
        require(rows.dtype == case.dtype and rows.is_contiguous(), f"{when}: rows are {rows.dtype}")
        require(tuple(sources.shape) == (experts, per_expert), f"{when}: sources are {tuple(sources.shape)}")
        require(layout.dtype == torch.int64 and layout.numel() == 0, f"{when}: the layout range is {layout!r}")
        require(self.counts_address in (None, counts.data_ptr()), f"{when}: the counts have moved")
        self.counts_address = counts.data_ptr()
        wanted = torch.tensor([len(of_expert) for of_expert in places.rows], dtype=torch.int32)
        require_same_bits(counts, wanted, f"{when}: counts")
        for expert, of_expert in enumerate(places.rows):
            what = f"{when}: expert {expert}"
            expected = standard_moe_reference.packed_rows(received, places, expert)
            require_same_bits(rows[expert, : len(expected)], expected, f"{what}: rows")
            require_same_bits(
                sources[expert, : len(expected)], received.source_position[torch.from_numpy(of_expert)], what
            )
        positions = self.op.get_dispatch_src_token_pos()
        require_same_bits(positions, received.source_position, f"{when}: sources of received rows")

    def outputs(self, number: int, rank: int) -> torch.Tensor:
        """[E, P, h] what the experts of a rank make; what no row has a place for must not matter."""
        case, per_expert = self.case, self.places_per_expert
        made = cases.expert_rows(case, number, rank, case.experts_per_rank * per_expert)
        made = made.view(case.experts_per_rank, per_expert, case.returned_hidden)
        for expert, of_expert in enumerate(self.places[rank].rows):
            made[expert, len(of_expert) :].view(torch.uint8).fill_(0xFF)
        return made

    def combine(self, number: int, fused: bool) -> None:
        case, rank, op, when = self.case, self.context.rank, self.op, f"combine {number}, fused={fused}"
        outputs = [self.outputs(number, peer) for peer in range(case.world_size)]
        returned = [
            standard_moe_reference.contributions(self.received[peer], self.places[peer], outputs[peer])
            for peer in range(case.world_size)
        ]
        ids = self.indices[rank]
        if fused:
            out, nothing = op.combine_standard_moe(outputs[rank], torch.full(ids.shape, float("nan")), ids)
        else:
            view = op.convert_combine_input(outputs[rank], None, None)
            shape = (case.receive_rows, case.returned_hidden)
            require(tuple(view.shape) == shape, f"{when}: the registered buffer has shape {tuple(view.shape)}")
            require_same_bits(view[: len(returned[rank])], returned[rank], f"{when}: what goes into combine")
            out, nothing = op.combine(view, None, ids, use_external_inp_buf=0)
        require(nothing is None, f"{when}: weights came back")
        expected = reference.combine(self.route, returned)[rank]
        require(tuple(out.shape) == (case.max_tokens, case.returned_hidden), f"{when}: shape {tuple(out.shape)}")
        require_same_bits(out[: len(expected)], expected, f"{when}: rows")

    def there_and_back(self, number: int, fused_there: bool, fused_back: bool) -> None:
        self.expect(number)
        self.dispatch(number, fused_there)
        self.combine(number, fused_back)


def there_and_back(context: RankContext, case: Case, delay_us: int = 0) -> None:
    runner = Runner(context, case, delay_us)
    for number in range(len(case.steps)):
        for fused in SPLIT_AND_FUSED:
            runner.there_and_back(number, *fused)


def layouts_case(world_size: int, styles: tuple[str, ...], tokens: int = 9, topk: int = 5, **options) -> Case:
    counts = [tokens - 4 * (rank % 2) for rank in range(world_size)]
    experts = options.pop("experts", 3)
    steps = tuple(
        Step("dispatch", routing(style, counts, topk, experts, seed=number), weights=number % 4 != 3)
        for number, style in enumerate(styles)
    )
    return Case(world_size, options.pop("hidden", 24), topk, experts, tokens, steps, **options)


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("dtype", PAYLOAD_DTYPES, ids=str)
@pytest.mark.parametrize("kernel_type", OFFERED)
def test_every_dtype(world_size: int, kernel_type: str, dtype: torch.dtype):
    """Repeated experts, experts without rows, ids that name nobody; a step in four without weights."""
    styles = ("any", "one expert", "wild", "distinct")
    options = {"dtype": dtype, "combine_dtype": dtype, "kernel_type": kernel_type, "values": "special"}
    pool(world_size).run(there_and_back, layouts_case(world_size, styles, **options))


@pytest.mark.parametrize("world_size", [2])
@pytest.mark.parametrize("hidden", [1, 7, 2880, 4097])
def test_odd_rows_and_another_dtype_on_the_way_back(world_size: int, hidden: int):
    case = layouts_case(world_size, ("any",), hidden=hidden, dtype=torch.float8_e4m3fn, combine_hidden=hidden + 1)
    pool(world_size).run(there_and_back, replace(case, spare_hidden=3, scale_dim=4, values="wide"))


@pytest.mark.parametrize("world_size", [1, 2])
def test_more_experts_than_anything_else(world_size: int):
    pool(world_size).run(there_and_back, layouts_case(world_size, ("any", "distinct"), experts=260, hidden=4))


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_capped_receive(world_size: int):
    case = layouts_case(world_size, ("spread",), topk=2)
    most = max(reference.route(case.steps[0].indices, 3).received(rank) for rank in range(world_size))
    pool(world_size).run(there_and_back, replace(case, receive_cap=most))


@pytest.mark.parametrize("world_size", [2, 4])
def test_the_order_does_not_depend_on_who_is_late(world_size: int):
    styles = tuple(ROUTING_STYLES[number % len(ROUTING_STYLES)] for number in range(12))
    case = layouts_case(world_size, styles, tokens=40, environment=(("MORI_HOST_THREADS", "3"),))
    pool(world_size).run(there_and_back, case, 100)


@st.composite
def layouts_cases(draw: st.DrawFn, world_size: int) -> Case:
    case = draw(case_for(world_size, ("D", "DD")))
    return replace(case, kernel_type=draw(st.sampled_from(OFFERED)), quant_type="none")


@pytest.mark.parametrize("world_size", [2, 3])
@settings(max_examples=12)
@given(data=st.data())
def test_any_case(world_size: int, data: st.DataObject):
    pool(world_size).run(there_and_back, data.draw(layouts_cases(world_size)))


# ---- mixtures of calls


def repeated(context: RankContext, case: Case) -> None:
    """Conversions start afresh, and rows in their places may be combined more than once."""
    runner = Runner(context, case)
    for number in range(len(case.steps)):
        runner.expect(number)
        first = runner.dispatch(number, fused=number % 2 == 0)
        if number % 2:
            rows, _, _, ids, _ = runner.op.dispatch(runner.payloads[context.rank], None, None, case_ids(runner))
            runner.received = [each._replace(weights=torch.zeros_like(each.weights)) for each in runner.received]
            for passed in (case.receive_rows, len(runner.received[context.rank].rows)):
                again = runner.op.convert_dispatch_output(rows[:passed], ids[:passed])
                runner.check_packed(again, f"conversion again, {number}")
                require(again[0].data_ptr() != first[0].data_ptr(), "packed rows are new tensors")
        runner.combine(number, fused=True)
        runner.combine(number, fused=True)


def case_ids(runner: Runner) -> torch.Tensor:
    return runner.indices[runner.context.rank]


def test_conversions_and_combines_repeated():
    pool(2).run(repeated, layouts_case(2, ("any", "wild", "distinct", "any")))


def some_in_one_launch(context: RankContext, case: Case) -> None:
    """How a rank makes its contributions is its own affair."""
    runner = Runner(context, case)
    for number in range(len(case.steps)):
        runner.expect(number)
        runner.dispatch(number, fused=True)
        runner.combine(number, fused=(context.rank + number) % 2 == 0)


def test_ranks_that_come_back_by_different_calls():
    pool(3).run(some_in_one_launch, layouts_case(3, ("any", "wild", "distinct")))


def with_handles(context: RankContext, case: Case) -> None:
    """Conversions and combines belong to the last dispatch, also if that returned a handle or followed one."""
    runner = Runner(context, case)
    op, rank = runner.op, context.rank
    runner.expect(1)
    runner.dispatch(1, fused=True)
    runner.expect(0)
    arguments = (runner.payloads[rank], runner.weights[rank], None, case_ids(runner))
    rows, _, _, ids, _, handle = op.dispatch(*arguments, return_routing=True)
    for fused in (False, True):  # in this order: the registered buffer is written before a combine, not behind one
        runner.check_packed(op.convert_dispatch_output(rows, ids), "after a dispatch that returned a handle")
        runner.combine(0, fused)
    runner.expect(1)
    runner.dispatch(1, fused=False)
    runner.combine(1, fused=True)
    runner.expect(0)
    runner.dispatch(0, fused=False, routing=handle)
    runner.combine(0, fused=True)
    runner.combine(0, fused=True)


def test_after_dispatches_with_routing_handles():
    case = layouts_case(2, ("any", "one rank"))
    pool(2).run(with_handles, case)


def mixed_dispatches(context: RankContext, odd: int) -> str:
    import mori

    runner = Runner(context, layouts_case(context.world_size, ("any",)))
    runner.there_and_back(0, True, True)
    rank, op = context.rank, runner.op
    dispatch = op.dispatch_standard_moe if rank == odd else op.dispatch
    try:
        dispatch(runner.payloads[rank], runner.weights[rank], None, case_ids(runner))
    except mori.errors.RowMismatch as error:
        text = str(error)
    else:
        raise AssertionError("ranks that want different layouts got no error")
    runner.there_and_back(0, False, True)
    return text


@pytest.mark.parametrize("world_size,odd", [(2, 0), (2, 1), (3, 1)])
def test_ranks_that_dispatch_by_different_calls_all_raise(world_size: int, odd: int):
    texts = pool(world_size).run(mixed_dispatches, odd)
    assert len(set(texts)) == 1 and "for standard-MoE layouts" in texts[0]


def test_a_direct_cast_does_not_concern_these_rows():
    """Sums made on the way travel as they are, like those from the registered buffer."""
    pool(2).run(there_and_back, layouts_case(2, ("any",), quant_type="fp8_direct_cast", values="wide"))


# ---- what is refused


def calls_of(op, case: Case) -> dict:
    tokens, per_expert = 4, case.world_size * case.max_tokens
    rows, ids = torch.ones(tokens, case.hidden, dtype=BF16), torch.zeros(tokens, case.topk, dtype=torch.int32)
    packed = torch.ones(case.experts_per_rank, per_expert, case.hidden, dtype=BF16)
    return {
        "dispatch_standard_moe": lambda: op.dispatch_standard_moe(rows, None, None, ids),
        "convert_dispatch_output": lambda: op.convert_dispatch_output(rows, ids),
        "combine_standard_moe": lambda: op.combine_standard_moe(packed, None, ids),
        "convert_combine_input": lambda: op.convert_combine_input(packed, None, None),
    }


def switched_off(context: RankContext) -> None:
    case = layouts_case(context.world_size, ())
    for name, call in calls_of(new_op(context, case), case).items():
        with environment(("ENABLE_STANDARD_MOE_ADAPT", "OFF")):
            text = f"{name} is not available. Rebuild with ENABLE_STANDARD_MOE_ADAPT=ON."
            raises(RuntimeError, call, says=text)


def test_methods_that_are_switched_off():
    pool(1).run(switched_off)


def not_offered(context: RankContext, kernel_type: str) -> None:
    case = layouts_case(context.world_size, (), kernel_type=kernel_type)
    for name, call in calls_of(new_op(context, case), case).items():
        text = f"{name} only supports InterNodeV1LL, IntraNode, got kernel_type {kernel_type}"
        raises(ValueError, call, says=text)


@pytest.mark.parametrize("kernel_type", [name for name in KERNEL_TYPES if name not in OFFERED])
def test_kernel_types_without_these_layouts(kernel_type: str):
    pool(1).run(not_offered, kernel_type)


def refused(context: RankContext) -> None:
    case = layouts_case(context.world_size, ("any",))
    runner = Runner(context, case)
    op, per_expert = runner.op, runner.places_per_expert
    runner.there_and_back(0, True, True)
    ids = case_ids(runner)
    rows, _, _, received_ids, count = op.dispatch(runner.payloads[context.rank], None, None, ids)
    shape = (case.experts_per_rank, per_expert, case.hidden)
    packed = torch.ones(shape, dtype=BF16)
    ways_back = {
        "combine_standard_moe": lambda x: op.combine_standard_moe(x, None, ids),
        "convert_combine_input": lambda x: op.convert_combine_input(x, None, None),
    }
    for name, call in ways_back.items():
        raises(RuntimeError, call, packed, says=f"{name}: the rows of the last dispatch were not put into places")
    for short in (rows[: int(count) - 1], received_ids[: int(count) - 1]):
        arguments = (short, received_ids[: len(short)]) if short.dtype == BF16 else (rows[: len(short)], short)
        raises(ValueError, op.convert_dispatch_output, *arguments, says=f"must have at least {int(count)}")
    raises(ValueError, op.convert_dispatch_output, rows, received_ids[:-1], says="input has")
    raises(
        ValueError, op.convert_dispatch_output, rows, received_ids[:, :-1].contiguous(), says="num_experts_per_token"
    )
    raises(TypeError, op.convert_dispatch_output, rows, received_ids.long(), says="int32")
    raises(TypeError, op.convert_dispatch_output, rows.int(), received_ids, says="int32")
    raises(ValueError, op.convert_dispatch_output, rows[:, ::2], received_ids, says="contiguous")
    runner.expect(0)
    op.convert_dispatch_output(rows, received_ids)
    registered = op.get_registered_combine_input_buffer(BF16)
    inside = registered.view(case.experts_per_rank, per_expert, 8)  # narrow rows, so that they fit
    for name, call in ways_back.items():
        raises(ValueError, call, packed[0], says=f"{name}: input must have 3 dimensions")
        raises(ValueError, call, packed[1:].contiguous(), says="num_experts_per_rank 3")
        raises(ValueError, call, packed[:, 1:].contiguous(), says="world_size x max_num_inp_token_per_rank")
        raises(ValueError, call, packed[:, :, ::2], says="contiguous")
        raises(ValueError, call, torch.ones(*shape[:2], 25, dtype=BF16), says="hidden_dim 24")
        raises(ValueError, call, packed.float(), says="max_token_type_size")
        raises(TypeError, call, packed.half(), says="float16")
        raises(ValueError, call, inside, says="overlaps the registered combine buffer")
    raises(ValueError, op.combine_standard_moe, packed, None, ids[:-1], says=f"this rank dispatched {len(ids)}")
    runner.received = [each._replace(weights=torch.zeros_like(each.weights)) for each in runner.received]
    runner.combine(0, fused=True)  # nothing of all that has done anything


def test_what_is_refused():
    pool(2).run(refused)


def too_many_places(context: RankContext) -> None:
    case = replace(layouts_case(1, ()), experts_per_rank=2**16, max_tokens=2**16, hidden=1, topk=1)
    op = new_op(context, case)
    ids = torch.zeros(1, 1, dtype=torch.int32)
    raises(
        ValueError,
        lambda: op.dispatch_standard_moe(torch.ones(1, 1, dtype=BF16), None, None, ids),
        says="4294967296 places",
    )


def test_places_that_cannot_be_numbered():
    pool(1).run(too_many_places)
