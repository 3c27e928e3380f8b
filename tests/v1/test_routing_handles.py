"""Routing handles: the way of one dispatch's rows, kept to send and to combine other rows likewise."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import reference
from tests.rank_worker import RankContext
from tests.ranks import pool
from tests.v1 import cases
from tests.v1.cases import F32, KERNEL_TYPES, Case, Step, routing
from tests.v1.exercise import new_op, raises, require, require_same_bits
from tests.v1.strategies import environments

OFFERED = ("IntraNode", "InterNodeV1")

# A program is calls by name: D dispatch, H dispatch that returns a handle, R0 replay of handle 0, C combine, C0 combine
# by handle 0; c and c0 combine from the registered buffer.
PROGRAMS = {
    "maps and rows": "H C D R0 C C0 D C0 C R0 R0 C0 C0",
    "several alive": "H H H C1 R0 C2 R2 C0 R1 C C1 R0",
    "registered buffer": "H c R0 c D c0 H c1 R1 c1",
    "backward order": "H C H C H C R2 C2 R1 C1 R0 C0",
}


def case_of(program: str, tokens: list[list[int]], topk: int = 4, experts: int = 3, **options) -> Case:
    """A case with a step per call. Dispatches take turns with the `tokens`, numbers by rank; the ids of a replay are
    unrelated to where its rows go."""
    world_size = len(tokens[0])
    steps: list[Step] = []
    handles: list[list[int]] = []
    sent = 0
    for number, call in enumerate(program.split()):
        if call[0] in "DH":
            count = tokens[sent % len(tokens)]
            sent += 1
            if call == "H":
                handles.append(count)
            style = cases.ROUTING_STYLES[number % len(cases.ROUTING_STYLES)]
            steps.append(Step("dispatch", routing(style, count, topk, experts, seed=number)))
        elif call[0] == "R":
            steps.append(Step("dispatch", routing("wild", handles[int(call[1:])], topk, experts, seed=number)))
        else:
            steps.append(Step("combine", external=call[0] == "C", whole_view=number % 3 == 0))
    most = max(max(count) for count in tokens)
    return Case(world_size, 24, topk, experts, max(most, 1), tuple(steps), values="bits", **options)


class Kept:
    """A handle, what it says, and what its tensors held when it was made."""

    def __init__(self, handle, route: reference.Routing) -> None:
        self.handle = handle
        self.route = route
        self.contents = [tensor.clone() for tensor in handle.tensors()]

    def require_unchanged(self, when: str) -> None:
        for tensor, content in zip(self.handle.tensors(), self.contents, strict=True):
            require_same_bits(tensor, content, f"{when}: a tensor of a handle")


class Runner:
    """One op and the handles that its dispatches returned; holds every result against the reference."""

    def __init__(self, context: RankContext, case: Case, op=None) -> None:
        self.context = context
        self.case = case
        self.op = new_op(context, case) if op is None else op
        self.kept: list[Kept] = []
        self.last: reference.Routing | None = None

    def run(self, program: str) -> None:
        for number, call in enumerate(program.split()):
            kept = self.kept[int(call[1:])] if call[1:] else None
            if call[0] in "DH":
                route = reference.route(self.case.steps[number].indices, self.case.experts_per_rank)
                self.send(number, route, return_routing=call == "H")
            elif call[0] == "R":
                assert kept is not None
                self.send(number, kept.route, routing=kept.handle)
            else:
                self.combine(number, kept)
            for each in self.kept:
                each.require_unchanged(f"{call} at {number} of {program}")

    def send(self, number: int, route: reference.Routing, **keywords) -> None:
        case, rank, when = self.case, self.context.rank, f"dispatch {number}"
        ranks = range(case.world_size)
        indices = [torch.from_numpy(ids) for ids in case.steps[number].indices]
        payloads = [cases.payload(case, number, peer) for peer in ranks]
        weights = [cases.weights(case, number, peer) for peer in ranks]
        scales = [cases.scales(case, number, peer) for peer in ranks]
        has_scales = scales[0] is not None
        expected = reference.dispatch(
            route,
            payloads,
            indices,
            weights,
            scales if has_scales else None,  # type: ignore[arg-type]
            case.max_tokens,
        )[rank]
        results = self.op.dispatch(payloads[rank], weights[rank], scales[rank], indices[rank], **keywords)
        total = len(expected.rows)
        require(int(results[4]) == total, f"{when}: received {int(results[4])} rows, expected {total}")
        require_same_bits(results[0][:total], expected.rows, f"{when}: rows")
        require_same_bits(results[1][:total], expected.weights, f"{when}: weights")
        require_same_bits(results[3][:total], expected.indices, f"{when}: indices")
        if has_scales:
            require_same_bits(results[2][:total], expected.scales, f"{when}: scales")
        require_same_bits(self.op.get_dispatch_src_token_pos(), expected.source_position, f"{when}: sources")
        handle = keywords.get("routing")
        if keywords.get("return_routing"):
            *_, handle = results
            require(len(results) == 6, f"{when}: {len(results)} values with a handle")
            source = handle.disp_tok_id_to_src_tok_id_local
            require_same_bits(source[:total], expected.source_position, f"{when}: sources in the handle")
            require(handle.cur_rank_num_token == len(indices[rank]), f"{when}: {handle.cur_rank_num_token} tokens")
            self.kept.append(Kept(handle, route))
        if handle is not None:
            require(results[4] is handle.total_recv_token_num, f"{when}: the count is not the handle's")
        self.last = route

    def combine(self, number: int, kept: Kept | None) -> None:
        case, rank, when = self.case, self.context.rank, f"combine {number}"
        route = self.last if kept is None else kept.route
        assert route is not None
        step = case.steps[number]
        returned = [cases.expert_rows(case, number, peer, route.received(peer)) for peer in range(case.world_size)]
        weights = [cases.returned_weights(case, number, peer, route.received(peer)) for peer in range(case.world_size)]
        own = returned[rank]
        if not step.external:
            buffer = self.op.get_registered_combine_input_buffer(case.combine_dtype, hidden_dim=case.returned_hidden)
            buffer[: len(own)].copy_(own)
            own = buffer
        ids = torch.zeros(len(route.destination[rank]), case.topk, dtype=torch.int32)
        handle = None if kept is None else kept.handle
        out, out_weights = self.op.combine(own, weights[rank], ids, use_external_inp_buf=step.external, routing=handle)
        expected = reference.combine(route, returned)[rank]
        require_same_bits(out[: len(expected)], expected, f"{when}: rows")
        expected_weights = reference.combine_weights(route, weights, case.topk)[rank]
        assert expected_weights is not None
        require_same_bits(out_weights[: len(expected_weights)], expected_weights, f"{when}: weights")


def run_program(context: RankContext, case: Case, program: str) -> None:
    Runner(context, case).run(program)


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("kernel_type", OFFERED)
@pytest.mark.parametrize("name", PROGRAMS)
def test_programs(world_size: int, kernel_type: str, name: str):
    tokens = [[9 - rank % 3 for rank in range(world_size)], [(5 * rank + 3) % 10 for rank in range(world_size)]]
    case = case_of(PROGRAMS[name], tokens, kernel_type=kernel_type, scale_dim=3)
    pool(world_size).run(run_program, case, PROGRAMS[name])


@pytest.mark.parametrize("tokens", [[[0, 6]], [[6, 0]], [[0, 0], [3, 3]], [[0, 5], [0, 0], [5, 0]]], ids=str)
def test_ranks_without_tokens(tokens: list[list[int]]):
    program = PROGRAMS["several alive"]
    pool(2).run(run_program, case_of(program, tokens), program)


@pytest.mark.parametrize("path", ["staged", "auto"])
def test_rows_that_land_before_they_are_moved(path: str):
    program = PROGRAMS["maps and rows"]
    variables = (("MORI_EP_PATH", path), ("MORI_HOST_THREADS", "3"))
    pool(2).run(run_program, case_of(program, [[170, 20], [33, 190]], environment=variables), program)


@st.composite
def programs(draw: st.DrawFn) -> str:
    calls = [draw(st.sampled_from("DH"))]
    handles = calls.count("H")
    for _ in range(draw(st.integers(1, 9))):
        letter = draw(st.sampled_from("DHRCC" if handles else "DHC"))
        by_handle = letter == "R" or (letter == "C" and handles > 0 and draw(st.booleans()))
        calls.append(letter + (str(draw(st.integers(0, handles - 1))) if by_handle else ""))
        handles += letter == "H"
    return " ".join(calls)


@pytest.mark.parametrize("world_size", [2, 3])
@settings(max_examples=20)
@given(data=st.data())
def test_any_program(world_size: int, data: st.DataObject):
    program = data.draw(programs())
    counts = st.lists(st.integers(0, 12), min_size=world_size, max_size=world_size)
    case = case_of(
        program,
        data.draw(st.lists(counts, min_size=1, max_size=3)),
        topk=data.draw(st.integers(1, 6)),
        experts=data.draw(st.integers(1, 3)),
        kernel_type=data.draw(st.sampled_from(OFFERED)),
        dtype=data.draw(st.sampled_from(cases.PAYLOAD_DTYPES)),
        environment=data.draw(environments),
    )
    pool(world_size).run(run_program, case, program)


# ---- handles that travel


def rebuilt(context: RankContext, case: Case) -> None:
    """As after a trip through an autograd context: from copies, when the original tensors are gone."""
    from mori.ops.dispatch_combine import EpDispatchRoutingHandle

    runner = Runner(context, case)
    runner.run("H D")
    kept = runner.kept[0]
    copies = [tensor.clone() for tensor in kept.handle.tensors()]
    tokens = kept.handle.cur_rank_num_token
    for tensor in kept.handle.tensors():
        tensor.fill_(-1)
    kept.handle = EpDispatchRoutingHandle.from_tensors(copies, cur_rank_num_token=tokens)
    require(all(a is b for a, b in zip(kept.handle.tensors(), copies, strict=True)), "from_tensors copies")
    runner.send(2, kept.route, routing=kept.handle)
    runner.combine(3, kept)
    runner.combine(4, None)
    kept.require_unchanged("a handle made of copies")


def test_a_handle_is_rebuilt_from_copies_of_its_tensors():
    pool(2).run(rebuilt, case_of("H D R0 C0 C", [[9, 4], [7, 8]]))


def on_another_op(context: RankContext, case: Case) -> None:
    """An op per layer, say, and one router's decision for all."""
    makers, other = Runner(context, case), Runner(context, case)
    makers.run("H")
    other.kept = makers.kept
    other.run("D R0 C0 C")


def test_a_handle_of_another_op_with_the_same_config():
    case = case_of("D H R0 C0 C", [[9, 4]])
    dispatches = case.steps[1]
    pool(2).run(on_another_op, case.with_steps(dispatches, *case.steps[2:]))


def gradients(context: RankContext) -> None:
    """<combine(x), g> summed over ranks equals <x, replay(g)>. Exact in integers."""
    import torch.distributed as dist

    case = Case(context.world_size, 8, 3, 2, 7, (), dtype=F32, combine_dtype=F32)
    op = new_op(context, case)
    generator = torch.Generator().manual_seed(context.rank)

    def integers(rows: int) -> torch.Tensor:
        return torch.randint(-8, 9, (rows, 8), generator=generator).float()

    ids = torch.randint(0, 2 * context.world_size, (7, 3), generator=generator, dtype=torch.int32)
    *_, handle = op.dispatch(integers(7), None, None, ids, return_routing=True)
    x, g = integers(int(handle.total_recv_token_num)), integers(7)
    out = op.combine(x, None, ids, routing=handle)[0][:7].clone()
    received = op.dispatch(g, None, None, ids, routing=handle)[0][: len(x)]
    sides = torch.stack([(out * g).sum(), (x * received).sum()])
    dist.all_reduce(sides)
    require(sides[0] == sides[1] != 0, f"{sides.tolist()}")


def test_a_replay_is_the_transpose_of_the_combine():
    pool(3).run(gradients)


def counts_of_experts(context: RankContext) -> None:
    op = new_op(context, Case(context.world_size, 8, 2, 2, 6, ()))
    rows, ids = torch.ones(6, 8, dtype=torch.bfloat16), torch.tensor([[0, 2]] * 6, dtype=torch.int32)
    for keywords in ({}, {"return_routing": True}):
        *_, handle = op.dispatch(rows, None, None, ids, call_local_expert_count=True, **keywords)
        require(op.local_expert_count.tolist() == [12, 0], f"{op.local_expert_count.tolist()}")
    other_ids = torch.tensor([[1, 3]] * 6, dtype=torch.int32)
    op.dispatch(rows[:2], None, None, ids[:2])
    op.dispatch(rows, None, None, other_ids, call_local_expert_count=True, routing=handle)
    require(op.local_expert_count.tolist() == [0, 12], "a replay counts the ids that travelled with it")


def test_expert_counts_of_calls_with_handles():
    pool(2).run(counts_of_experts)


# ---- what is refused, and faults


def refused(context: RankContext) -> None:
    from mori.ops.dispatch_combine import EpDispatchRoutingHandle

    case = Case(context.world_size, 8, 2, 2, 6, ())
    op = new_op(context, case)
    rows, ids = torch.ones(6, 8, dtype=torch.bfloat16), torch.tensor([[0, 2]] * 6, dtype=torch.int32)
    received, *_, handle = op.dispatch(rows[:4], None, None, ids[:4], return_routing=True)
    large = new_op(context, replace(case, max_tokens=7)).dispatch(rows, None, None, ids, return_routing=True)[5]
    capped = new_op(context, replace(case, receive_cap=6))
    tensors = list(handle.tensors())
    strided = torch.zeros(2 * tensors[0].numel(), dtype=torch.int32)[::2]

    def made_of(*replaced: torch.Tensor | None, tokens: int = 4) -> EpDispatchRoutingHandle:
        return EpDispatchRoutingHandle.from_tensors([*replaced, *tensors[len(replaced) :]], tokens)

    def replay(routing, count: int = 4, **keywords):
        return op.dispatch(rows[:count], None, None, ids[:count], routing=routing, **keywords)

    def combine(routing, count: int = 4):
        return op.combine(received, None, ids[:count], routing=routing)

    raises(ValueError, lambda: replay(handle, return_routing=True), says="exclude each other")
    raises(ValueError, lambda: replay(handle, count=6), says="input has 6 rows, the routing handle was made for 4")
    raises(ValueError, lambda: op.dispatch(rows[:4], None, None, ids[:5], routing=handle), says="indices has 5 rows")
    raises(ValueError, lambda: replay(made_of(tokens=0)), says="from_tensors takes the count")
    raises(ValueError, lambda: combine(handle, count=5), says="indices has 5 rows but this rank dispatched 4")
    for call in (replay, combine):
        raises(TypeError, lambda call=call: call("the last one"), says="must be an EpDispatchRoutingHandle, got str")
        raises(TypeError, lambda call=call: call(tuple(tensors)), says="got tuple")
        raises(ValueError, lambda call=call: call(large), says="it comes from an op with another config")
        raises(ValueError, lambda call=call: call(made_of(tokens=7)), says="cur_rank_num_token is 7, must be in 0..6")
        raises(TypeError, lambda call=call: call(made_of(None)), says="disp_dest_tok_id_map must be an int32 tensor")
        raises(TypeError, lambda call=call: call(made_of(tensors[0].long())), says="must be an int32 tensor")
        raises(ValueError, lambda call=call: call(made_of(strided)), says="must be a contiguous tensor")
    raises(ValueError, lambda: capped.dispatch(rows[:4], None, None, ids[:4], routing=handle), says="8 received rows")
    raises(ValueError, lambda: capped.combine(received, None, ids[:4], routing=handle), says="this op holds 6")
    raises(ValueError, lambda: EpDispatchRoutingHandle.from_tensors(tensors[:4]), says="has 5 tensors, got 4")
    raises(ValueError, lambda: op.combine(received[:1], None, ids[:4]), says="received")
    # Nothing was sent by any of these, and the handle is as it was.
    out, _ = combine(handle)
    require_same_bits(out[:4], rows[:4] * 2, "a combine by the handle after all that")


def test_what_is_refused():
    pool(2).run(refused)


def not_offered(context: RankContext, kernel_type: str) -> None:
    case = Case(context.world_size, 8, 2, 2, 6, ())
    op, maker = new_op(context, replace(case, kernel_type=kernel_type)), new_op(context, case)
    rows, ids = torch.ones(6, 8, dtype=torch.bfloat16), torch.tensor([[0, 2]] * 6, dtype=torch.int32)
    received, *_, handle = maker.dispatch(rows, None, None, ids, return_routing=True)
    for call in (
        lambda: op.dispatch(rows, None, None, ids, return_routing=True),
        lambda: op.dispatch(rows, None, None, ids, routing=handle),
        lambda: op.combine(received, None, ids, routing=handle),
    ):
        raises(NotImplementedError, call, says=f"offered by kernel types InterNodeV1, IntraNode, not by {kernel_type}")


@pytest.mark.parametrize("kernel_type", [name for name in KERNEL_TYPES if name not in OFFERED])
def test_kernel_types_without_handles(kernel_type: str):
    pool(2).run(not_offered, kernel_type)


def faults(context: RankContext, returns_handle: bool) -> None:
    """What a dispatch that failed leaves behind is that nothing was sent, whatever handle the one before returned."""
    import mori

    op = new_op(context, Case(context.world_size, 8, 2, 2, 6, (), receive_cap=8))
    rows, ids = torch.full((6, 8), 2.0, dtype=torch.bfloat16), torch.tensor([[0, 2]] * 6, dtype=torch.int32)
    received, *_, handle = op.dispatch(rows[:4], None, None, ids[:4], return_routing=True)
    raises(
        mori.errors.ReceiveOverflow,
        lambda: op.dispatch(rows, None, None, ids, return_routing=returns_handle),
    )
    require(len(op.get_dispatch_src_token_pos()) == 0, "rows are said to have been received")
    out, _ = op.combine(received, None, ids)
    require_same_bits(out[:6], torch.zeros(6, 8, dtype=torch.bfloat16), "a combine after a dispatch that failed")
    out, _ = op.combine(received, None, ids[:4], routing=handle)
    require_same_bits(out[:4], rows[:4] * 2, "a combine by the handle")


@pytest.mark.parametrize("returns_handle", [False, True])
def test_a_dispatch_that_fails_after_one_that_returned_a_handle(returns_handle: bool):
    pool(2).run(faults, returns_handle)


def different_replays(context: RankContext) -> None:
    import mori

    op = new_op(context, Case(context.world_size, 8, 2, 2, 6, ()))
    rows, ids = torch.full((4, 8), 2.0, dtype=torch.bfloat16), torch.tensor([[0, 2]] * 4, dtype=torch.int32)
    *_, handle = op.dispatch(rows, None, None, ids, return_routing=True)
    before = [tensor.clone() for tensor in handle.tensors()]
    narrow = rows[:, :4].contiguous() if context.rank else rows
    raises(mori.errors.RowMismatch, lambda: op.dispatch(narrow, None, None, ids, routing=handle), says="8 bytes")
    for tensor, content in zip(handle.tensors(), before, strict=True):
        require_same_bits(tensor, content, "a tensor of the handle after a replay that failed")
    received, *_, count = op.dispatch(rows, None, None, ids, routing=handle)
    require(int(count) == 8 and bool((received[:8] == 2).all()), "the replay after it")


def test_a_replay_in_which_ranks_send_different_rows():
    pool(2).run(different_replays)
