"""The reference itself, against cases small enough to be worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests import reference

NAN = float("nan")
INF = float("inf")


def ids(*rows: list[int]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.int32)


def no_ids(topk: int) -> torch.Tensor:
    return torch.empty(0, topk, dtype=torch.int32)


def test_first_entry_of_each_destination_is_kept():
    # Two experts per rank: 0, 1 live on rank 0; 2, 3 on rank 1.
    routing = reference.route([ids([1, 2, 0], [3, 2, 3]), ids([0, 0, 1])], experts_per_rank=2)
    assert routing.destination[0].tolist() == [[0, 1, -1], [1, -1, -1]]
    assert routing.destination[1].tolist() == [[0, -1, -1]]
    assert routing.copies(0).tolist() == [2, 1]


def test_rows_are_ordered_by_source_rank_then_token():
    routing = reference.route([ids([0], [1], [0]), ids([1], [0])], experts_per_rank=1)
    assert routing.source[0].tolist() == [[0, 0], [0, 2], [1, 1]]
    assert routing.source[1].tolist() == [[0, 1], [1, 0]]
    assert routing.row[0].tolist() == [[0], [0], [1]]
    assert routing.row[1].tolist() == [[1], [2]]


@pytest.mark.parametrize("nobody", [-1, -2, 4, 2**30, -(2**31), 2**31 - 1])
def test_ids_outside_the_experts_are_dropped(nobody):
    routing = reference.route([ids([nobody, 3], [nobody, nobody]), no_ids(2)], experts_per_rank=2)
    assert routing.destination[0].tolist() == [[-1, 1], [-1, -1]]
    assert routing.dropped == (3, 0)
    assert (routing.received(0), routing.received(1)) == (0, 1)


def test_a_dropped_entry_does_not_hide_a_later_one():
    routing = reference.route([ids([-1, 0, -1, 0, 1])], experts_per_rank=2)
    assert routing.destination[0].tolist() == [[-1, 0, -1, -1, -1]]


def test_dispatch_moves_rows_weights_scales_and_ids():
    indices = [ids([0, 1], [1, 1]), ids([1, -1])]
    rows = [torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[5.0, 6.0]])]
    weights = [torch.tensor([[0.25, 0.75], [0.5, 0.5]]), None]
    scales = [torch.tensor([[10], [11]], dtype=torch.uint8), torch.tensor([[12]], dtype=torch.uint8)]
    routing = reference.route(indices, experts_per_rank=1)
    first, second = reference.dispatch(routing, rows, indices, weights, scales, max_tokens=4)
    assert first.rows.tolist() == [[1.0, 2.0]]
    assert first.source_position.tolist() == [0]
    assert second.rows.tolist() == [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]
    assert second.weights.tolist() == [[0.25, 0.75], [0.5, 0.5], [0.0, 0.0]]
    assert second.scales is not None and second.scales.tolist() == [[10], [11], [12]]
    assert second.indices.tolist() == [[0, 1], [1, 1], [1, -1]]
    assert second.source_position.tolist() == [0, 1, 8]  # rank 1 starts at W * M = 2 * 4
    assert second.source_position.dtype == torch.int32


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float4_e2m1fn_x2])
def test_dispatch_keeps_every_bit(dtype):
    every_byte = torch.arange(256, dtype=torch.uint8).reshape(2, 128)
    [received] = reference.dispatch(
        reference.route([ids([0], [0])], 1), [every_byte.view(dtype)], [ids([0], [0])], [None], None, max_tokens=2
    )
    assert received.rows.dtype == dtype
    assert torch.equal(received.rows.view(torch.uint8), every_byte)


def test_nothing_sent_gives_empty_tensors():
    [received] = reference.dispatch(
        reference.route([no_ids(3)], 1), [torch.empty(0, 5)], [no_ids(3)], [None], None, max_tokens=2
    )
    assert received.rows.shape == (0, 5) and received.weights.shape == (0, 3) and received.source_position.shape == (0,)


def combine_one(rows: list[list[float]], dtype: torch.dtype, order: list[int] | None = None) -> torch.Tensor:
    """One token of rank 0, sent to as many ranks as there are rows; rank d returns rows[d]."""
    world_size = len(rows)
    indices = [ids(order or list(range(world_size)))] + [no_ids(world_size)] * (world_size - 1)
    returned = [torch.tensor([row], dtype=torch.float64).to(dtype) for row in rows]
    return reference.combine(reference.route(indices, 1), returned)[0]


def bits(tensor: torch.Tensor) -> list[int]:
    width = {2: torch.int16, 4: torch.int32}[tensor.element_size()]
    mask = (1 << (8 * tensor.element_size())) - 1
    return [value & mask for value in tensor.view(width).flatten().tolist()]


def test_combine_adds_in_float32_and_rounds_once():
    # 256 + 1 + 1 is 258 exactly, but 257 is a tie in bf16 that would round back to 256 at each step.
    assert combine_one([[256.0], [1.0], [1.0]], torch.bfloat16).tolist() == [[258.0]]


@pytest.mark.parametrize(("addend", "expected"), [(1.0, 256.0), (3.0, 260.0), (1.0078125, 258.0)])
def test_ties_go_to_even(addend, expected):
    assert combine_one([[256.0], [addend]], torch.bfloat16).tolist() == [[expected]]


def test_order_of_addition_is_ascending_column():
    big = 2.0**24
    assert combine_one([[big], [1.0], [-big]], torch.float32).tolist() == [[0.0]]
    assert combine_one([[big], [1.0], [-big]], torch.float32, order=[0, 2, 1]).tolist() == [[1.0]]


def test_the_sum_starts_from_plus_zero():
    assert bits(combine_one([[-0.0]], torch.bfloat16)) == [0x0000]
    assert bits(combine_one([[-0.0], [-0.0]], torch.float32)) == [0x00000000]


def test_every_nan_is_canonical():
    signalling = torch.tensor([[0x7F800001, -1]], dtype=torch.int32).view(torch.float32)
    [total] = reference.combine(reference.route([ids([0])], 1), [signalling])
    assert bits(total) == [0x7FC00000, 0x7FC00000]
    assert bits(combine_one([[INF, NAN], [-INF, 1.0]], torch.bfloat16)) == [0x7FC0, 0x7FC0]


def test_infinities_denormals_and_overflow():
    largest = 3.3895313892515355e38
    assert combine_one([[INF], [1.0]], torch.bfloat16).tolist() == [[INF]]
    assert combine_one([[largest], [largest]], torch.bfloat16).tolist() == [[INF]]
    smallest = torch.tensor([[1]], dtype=torch.int32).view(torch.float32)
    [total] = reference.combine(reference.route([ids([0])], 1), [smallest])
    assert bits(total) == [1]


def test_token_without_destination_combines_to_plus_zero():
    [total] = reference.combine(reference.route([ids([-1], [7])], 1), [torch.empty(0, 3, dtype=torch.bfloat16)])
    assert bits(total) == [0] * 6


def test_combine_weights_sum_what_comes_back():
    routing = reference.route([ids([0, 1], [1, 1]), ids([1, 1])], experts_per_rank=1)
    passed = [torch.tensor([[1.0, 2.0]]), torch.tensor([[10.0, 20.0], [30.0, 40.0], [50.0, 60.0]])]
    first, second = reference.combine_weights(routing, passed, topk=2)
    assert first is not None and first.tolist() == [[11.0, 22.0], [30.0, 40.0]]
    assert second is not None and second.tolist() == [[50.0, 60.0]]


def test_missing_weight_rows_add_nothing():
    routing = reference.route([ids([0, 1], [1, 1]), ids([1, 1])], experts_per_rank=1)
    first, second = reference.combine_weights(routing, [None, torch.tensor([[10.0, 20.0]])], topk=2)
    assert first is None
    assert second is not None and second.tolist() == [[0.0, 0.0]]


def test_rounding_agrees_with_torch_on_all_halfway_neighbours():
    upper = np.arange(0x10000, dtype=np.uint32) << 16
    for lower in (0x0000, 0x0001, 0x7FFF, 0x8000, 0x8001, 0xFFFF):
        values = (upper | np.uint32(lower)).view(np.float32)
        finite = values[~np.isnan(values)]
        ours = reference.narrow(finite, torch.bfloat16)
        theirs = torch.from_numpy(finite.copy()).to(torch.bfloat16)
        assert torch.equal(ours.view(torch.int16), theirs.view(torch.int16))
