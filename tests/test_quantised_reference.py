"""The reference of quantised combine, and of combine in fp8 and fp4, against values worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests import quantised_reference as quantised
from tests import reference

FP8 = torch.float8_e4m3fn
FNUZ = torch.float8_e4m3fnuz
FP4 = torch.float4_e2m1fn_x2
NAN = float("nan")
INF = float("inf")


def one_token(*rows: list[float]) -> tuple[reference.Routing, list[torch.Tensor]]:
    """One token of rank 0, sent to as many ranks as there are rows; rank d returns rows[d] in bf16."""
    world_size = len(rows)
    nobody = torch.empty(0, world_size, dtype=torch.int32)
    indices = [torch.arange(world_size, dtype=torch.int32)[None]] + [nobody] * (world_size - 1)
    return reference.route(indices, 1), [torch.tensor([row], dtype=torch.bfloat16) for row in rows]


def bf16(row: list[float]) -> torch.Tensor:
    return torch.tensor([row], dtype=torch.bfloat16)


def codes(tensor: torch.Tensor) -> list[int]:
    return tensor.view(torch.uint8).flatten().tolist()


def combine_codes(dtype: torch.dtype, *rows: list[int]) -> list[int]:
    """One token whose rows have these bytes."""
    routing, _ = one_token(*([0.0] for _ in rows))
    returned = [torch.tensor([row], dtype=torch.uint8).view(dtype) for row in rows]
    [total, *_] = reference.combine(routing, returned)
    assert total.dtype == dtype
    return codes(total)


def test_fp8_rows_are_added_in_float32():
    # 1 is 0x38 and its neighbour 1.125 is 0x39. The sum 2.125 is a tie between 2 and 2.25.
    assert combine_codes(FP8, [0x38], [0x39]) == [0x40]
    # 16 + 1 is a tie that would go back to 16 each time; 16 + 1 + 1 is 18, which fp8 has.
    assert combine_codes(FP8, [0x58], [0x38], [0x38]) == [0x59]
    assert combine_codes(FNUZ, [0x60], [0x40], [0x40]) == [0x61]


def test_fp8_saturates_and_keeps_nan():
    assert combine_codes(FP8, [0x7E, 0xFE, 0x7F, 0xFF, 0x80], [0x7E, 0xFE, 0x00, 0x38, 0x80]) == [
        0x7E,
        0xFE,
        0x7F,
        0x7F,
        0,
    ]
    assert combine_codes(FNUZ, [0x7F, 0xFF, 0x80], [0x7F, 0xFF, 0x40]) == [0x7F, 0xFF, 0x80]


def test_fp4_pairs_are_added_by_halves():
    # Low half 1.5 + 0.5 = 2, high half 6 + 6 saturates; then -0.5 + 1 and 3 + 0.5, a tie that goes to 4.
    assert combine_codes(FP4, [0x73, 0x59], [0x71, 0x12]) == [0x74, 0x61]
    assert combine_codes(FP4, [0xF8], [0xF8]) == [0xF0]


def test_fp4_rows_without_tokens():
    routing = reference.route([torch.empty(0, 2, dtype=torch.int32)], 1)
    [total] = reference.combine(routing, [torch.empty(0, 3, dtype=torch.uint8).view(FP4)])
    assert total.shape == (0, 3) and total.dtype == FP4


def test_pairs_hold_the_even_element_in_the_low_half():
    packed = np.array([[0x21, 0x43]], dtype=np.uint8)
    assert reference.unpack_pairs(packed).tolist() == [[1, 2, 3, 4]]
    assert reference.pack_pairs(reference.unpack_pairs(packed)).tolist() == packed.tolist()


def test_direct_cast_rounds_each_row():
    # 17 is a tie between 16 and 18 that goes to 16; 1000 saturates.
    routing, rows = one_token([17.0, 1000.0, -1000.0, NAN], [1.0, 1.0, 1.0, 1.0])
    [total, _] = quantised.fp8_direct_cast_combine(routing, rows)
    assert total.dtype == torch.bfloat16
    assert total[0, :3].tolist() == [17.0, 448.0, -448.0]  # 449 and -447 in bf16
    assert total.view(torch.int16)[0, 3].item() == 0x7FC0
    [total, _] = quantised.fp8_direct_cast_combine(routing, rows, FNUZ)
    assert total[0, :3].tolist() == [17.0, 241.0, -239.0]


def test_fp8_blocks_that_fit_are_not_scaled():
    found = quantised.quantise(bf16([448.0, -2.0, 0.0009, 1.0]), 2, FP8)
    assert found.scales.tolist() == [[1.0, 1.0]]
    assert found.codes.tolist() == [[0x7E, 0xC0, 0x00, 0x38]]  # 0.0009 is nearer to nothing than to 2^-9
    assert quantised.dequantise(found, FP8).tolist() == [[448.0, -2.0, 0.0, 1.0]]


def test_one_large_block_makes_the_first_scale_negative():
    found = quantised.quantise(bf16([1.0, 2.0, 896.0, -448.0]), 2, FP8)
    assert found.scales.tolist() == [[-1.0, 2.0]]
    assert found.codes.tolist() == [[0x38, 0x40, 0x7E, 0xF6]]  # 1, 2; 448, -224
    assert quantised.dequantise(found, FP8).tolist() == [[1.0, 2.0, 896.0, -448.0]]
    assert quantised.quantise(bf16([1.0, 2.0, 480.0, -240.0]), 2, FNUZ).scales.tolist() == [[-1.0, 2.0]]


def test_fp4_blocks_are_always_scaled():
    found = quantised.quantise(bf16([12.0, -2.0, 0.0, 0.0, 0.75, 0.25]), 3, FP4)
    assert found.scales.tolist() == [[-2.0, 1.0, 0.125]]
    assert found.codes.tolist() == [[7, 0xA, 0, 0, 7, 4]]  # 6, -1; 0, 0; 6, 2
    assert quantised.dequantise(found, FP4).tolist() == [[12.0, -2.0, 0.0, 0.0, 0.75, 0.25]]
    assert quantised.quantise(bf16([0.0, 0.0]), 1, FP4).scales.tolist() == [[-1.0]]


@pytest.mark.parametrize(
    "hidden, scale_dim, lengths", [(7168, 56, [128] * 56), (10, 4, [3, 3, 3, 1]), (5, 4, [2, 2, 1, 0])]
)
def test_blocks_are_as_long_as_the_first_and_the_last_may_be_empty(hidden: int, scale_dim: int, lengths: list[int]):
    row = torch.zeros(1, hidden, dtype=torch.bfloat16)
    length = quantised.block_length(hidden, scale_dim)
    assert [max(0, min(length, hidden - block * length)) for block in range(scale_dim)] == lengths
    begin = 0
    for block, size in enumerate(lengths):
        for position in (begin, begin + size - 1) if size else ():
            row.zero_()[0, position] = 896.0
            scales = np.abs(quantised.quantise(row, scale_dim, FP8).scales[0])
            assert scales[block] == 2.0 and scales.sum() == scale_dim + 1
        begin += size


def test_nan_does_not_raise_a_scale_and_infinity_spoils_its_block():
    found = quantised.quantise(bf16([NAN, 896.0, INF, 1.0, 3.0, 4.0]), 3, FP8)
    assert found.scales.tolist() == [[-2.0, INF, 1.0]]
    assert found.codes[0, :2].tolist() == [0x7F, 0x7E]
    values = quantised.dequantise(found, FP8)[0]
    assert np.isnan(values).tolist() == [True, False, True, True, False, False]
    assert values[4:].tolist() == [3.0, 4.0]


def test_blockwise_sums_are_rounded_once():
    # Scale 1000 / 448 is no power of two: each row has one rounding in fp8 and one in its product.
    routing, rows = one_token([1000.0, 3.0], [1000.0, 3.0], [0.5, 0.25])
    scale = np.float32(1000) / np.float32(448)
    small = np.float32(1.375)  # 3 * 0.448 = 1.344 between 1.25 and 1.375
    row = np.array([np.float32(448) * scale, small * scale], dtype=np.float32)
    expected = reference.narrow((row + row + np.array([0.5, 0.25], dtype=np.float32))[None], torch.bfloat16)
    [total, *_] = quantised.fp8_blockwise_combine(routing, rows, scale_dim=1)
    assert torch.equal(total, expected)
    [total, *_] = quantised.fp4_blockwise_combine(routing, rows, scale_dim=1)
    # 3 * 0.006 goes to 0; 0.25 * 12 = 3 is kept.
    assert total.tolist() == [[2000.0, 0.25]]


def test_own_rows_are_quantised_too():
    routing, rows = one_token([17.0])
    assert quantised.fp8_direct_cast_combine(routing, rows)[0].tolist() == [[16.0]]
    assert quantised.fp8_blockwise_combine(routing, rows, 1)[0].tolist() == [[16.0]]
    routing, rows = one_token([6.0, 2.5])
    assert quantised.fp4_blockwise_combine(routing, rows, 1)[0].tolist() == [[6.0, 2.0]]
