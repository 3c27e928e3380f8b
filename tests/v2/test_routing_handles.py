"""Handles: what they share with the op, what a snapshot owns, how they are rebuilt, and which are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests import reference
from tests.rank_worker import RankContext
from tests.ranks import pool
from tests.v1 import cases
from tests.v1.cases import BF16, Case, Step, routing
from tests.v1.exercise import require, require_same_bits
from tests.v2.exercise import case_of, new_op

WORLD, HIDDEN, TOPK, EXPERTS, TOKENS = 2, 64, 4, 3, 8


def three_dispatches() -> Case:
    steps = [Step("dispatch", routing("any", [4 + number, 8 - number], TOPK, EXPERTS, number)) for number in range(3)]
    return case_of(WORLD, HIDDEN, TOPK, EXPERTS, TOKENS, steps=tuple(steps))


class Sent:
    """One of the case's dispatches, as sent and as received."""

    def __init__(self, op: Any, case: Case, number: int, rank: int, **options: bool) -> None:
        self.case, self.number, self.rank = case, number, rank
        self.ids = [torch.from_numpy(ids) for ids in case.steps[number].indices]
        self.weights = [cases.weights(case, number, peer) for peer in range(WORLD)]
        self.routing = reference.route(self.ids, EXPERTS)
        rows = cases.payload(case, number, rank)
        self.handle = op.dispatch(rows, self.weights[rank], None, self.ids[rank], return_routing=True, **options)[5]

    def come_back(self, op: Any, handle: Any, seed: int, *, weights: bool = True) -> None:
        """Combines rows of a seed along `handle`, checks sums and folded weights."""
        counts = [self.routing.received(peer) for peer in range(WORLD)]
        returned = [cases.expert_rows(self.case, seed, peer, count) for peer, count in enumerate(counts)]
        out, out_weights = op.combine(returned[self.rank], True if weights else None, routing=handle)
        when = f"dispatch {self.number}, combine {seed}"
        require_same_bits(out, reference.combine(self.routing, returned)[self.rank], f"{when}: rows")
        if weights:
            sent = self.weights[self.rank]
            copies = torch.from_numpy(self.routing.copies(self.rank))[:, None]
            expected = torch.stack([sum([sent] * n, torch.zeros_like(sent)) for n in range(WORLD + 1)])
            expected = torch.gather(expected, 0, copies.expand(-1, TOPK)[None])[0]
            require_same_bits(out_weights, expected, f"{when}: weights")


def shared(context: RankContext) -> None:
    op, case = new_op(context, three_dispatches()), three_dispatches()
    sent = Sent(op, case, 0, context.rank)
    handle = sent.handle
    require(handle.disp_dest_tok_id_map is op.routing_dest_map, "the map is not the op's own")
    require(handle.total_recv_token_num is op.total_recv, "the count is not the op's own")
    require(handle.inter_node_disp_dest_tok_id_map.numel() == 0, "a map between nodes")
    before = handle.disp_dest_tok_id_map.clone()
    # A dispatch that returns no handle notes its ways elsewhere: the rows of the first one can still come back.
    op.dispatch(cases.payload(case, 1, context.rank), None, None, torch.from_numpy(case.steps[1].indices[context.rank]))
    require(torch.equal(before, handle.disp_dest_tok_id_map), "a dispatch without handle has changed the map")
    require(not torch.equal(before, op.token_dest_map), "it has noted nothing")
    sent.come_back(op, handle, 2, weights=False)
    Sent(op, case, 1, context.rank)
    with pytest.raises(ValueError, match="1 later dispatches.*snapshot=True"):
        op.combine(op.combine_in_view(), routing=handle)
    op.close()


def test_a_handle_shares_the_ops_tensors():
    pool(WORLD).run(shared)


def source_positions(context: RankContext) -> None:
    op, case = new_op(context, three_dispatches()), three_dispatches()
    first, second = Sent(op, case, 0, context.rank), None
    early = first.handle.disp_tok_id_to_src_tok_id_local
    kept = early.clone()
    second = Sent(op, case, 1, context.rank)
    require(first.handle.disp_tok_id_to_src_tok_id_local is early, "the copy is not kept")
    require(torch.equal(early, kept), "the copy has changed")
    require(early.shape == (WORLD * TOKENS,), f"{early.shape}")
    late = second.handle.disp_tok_id_to_src_tok_id_local
    source = second.routing.source[context.rank]
    require(late[: len(source)].tolist() == [rank * TOKENS + token for rank, token in source.tolist()], "positions")
    second.come_back(op, second.handle, 2)
    op.close()


def test_source_positions_are_copied_when_they_are_first_read():
    pool(WORLD).run(source_positions)


def snapshots(context: RankContext) -> None:
    """Kept through later dispatches, combined in any order and more than once, also with folded weights."""
    op, case = new_op(context, three_dispatches()), three_dispatches()
    sent = [Sent(op, case, number, context.rank, snapshot=True) for number in range(3)]
    for seed, number in enumerate((1, 0, 2, 1, 1, 0)):
        sent[number].come_back(op, sent[number].handle, seed % 3, weights=seed != 3)
    for one, other in zip(sent[0].handle.tensors(), sent[1].handle.tensors(), strict=True):
        require(not one.numel() or one.data_ptr() != other.data_ptr(), "two snapshots share memory")
    require(int(sent[0].handle.total_recv_token_num) == sent[0].routing.received(context.rank), "count")
    op.close()


def test_snapshots_outlive_later_dispatches():
    pool(WORLD).run(snapshots)


def rebuilt(context: RankContext) -> None:
    from mori.ops.dispatch_combine_v2 import EpDispatchRoutingHandle

    op, case = new_op(context, three_dispatches()), three_dispatches()
    sent = Sent(op, case, 0, context.rank, snapshot=True)
    saved = [tensor.clone() for tensor in sent.handle.tensors()]
    require(len(saved) == 5, f"{len(saved)} tensors")
    Sent(op, case, 1, context.rank)
    again = EpDispatchRoutingHandle.from_tensors(saved, sent.handle.cur_rank_num_token)
    require(again.disp_tok_id_to_src_tok_id_local is saved[4], "the positions are not those that were given")
    sent.come_back(op, again, 2, weights=False)
    op.close()


def test_a_handle_is_rebuilt_from_its_tensors():
    pool(WORLD).run(rebuilt)


def refused(context: RankContext) -> None:
    from mori.ops.dispatch_combine_v2 import EpDispatchRoutingHandle

    op, case = new_op(context, three_dispatches()), three_dispatches()
    tensors = list(Sent(op, case, 0, context.rank).handle.tensors())

    def combine(count: int, **changes: Any) -> None:
        changed = [changes.get(f"at{number}", tensor) for number, tensor in enumerate(tensors)]
        op.combine(op.combine_in_view(), routing=EpDispatchRoutingHandle.from_tensors(changed, count))

    with pytest.raises(ValueError, match="has 5 tensors, got 4"):
        EpDispatchRoutingHandle.from_tensors(tensors[:4], 1)
    with pytest.raises(ValueError, match=r"cur_rank_num_token is 9, must be in 0\.\.8"):
        combine(9)
    with pytest.raises(ValueError, match="disp_dest_tok_id_map has 31 elements, handles of this op have 32"):
        combine(4, at0=tensors[0][:31])
    with pytest.raises(TypeError, match="disp_dest_tok_id_map must be an int32"):
        combine(4, at0=tensors[0].long())
    with pytest.raises(ValueError, match="must be a contiguous tensor on cpu"):
        combine(4, at0=tensors[0].to("meta"))
    with pytest.raises(ValueError, match="inter_node_disp_send_map has 0 elements"):
        combine(4, at2=tensors[1])
    with pytest.raises(ValueError, match="one of 1000 received rows, this op holds 16"):
        combine(4, at2=torch.full_like(tensors[2], 1000))
    op.combine(op.combine_in_view(), routing=EpDispatchRoutingHandle.from_tensors(tensors, 1))
    op.close()


def test_handles_that_do_not_fit_are_refused():
    pool(WORLD).run(refused)


def of_another_op(context: RankContext) -> None:
    """One of the same shape serves: what matters is where rows lie, and that is the same."""
    case = three_dispatches()
    op, twin, other = new_op(context, case), new_op(context, case), new_op(context, case_of(WORLD, HIDDEN, 3, 2, 8))
    sent = Sent(op, case, 0, context.rank)
    with pytest.raises(ValueError, match="has 32 elements, handles of this op have 24"):
        other.combine(torch.zeros(16, HIDDEN, dtype=BF16), routing=sent.handle)
    sent.come_back(twin, sent.handle, 1, weights=False)
    for each in (op, twin, other):
        each.close()


def test_handles_of_other_ops():
    pool(WORLD).run(of_another_op)


def test_repr_says_what_it_is():
    from mori.ops.dispatch_combine_v2 import EpDispatchRoutingHandle

    map_, none = torch.zeros(4, dtype=torch.int32), torch.zeros(0, dtype=torch.int32)
    handle = EpDispatchRoutingHandle(map_, none, none, map_[:1], None, 3, reverse_src_view=map_)
    assert repr(handle) == "EpDispatchRoutingHandle(3 tokens)"
    assert repr(handle.snapshot(torch.zeros(1))) == "EpDispatchRoutingHandle(3 tokens, snapshot)"
