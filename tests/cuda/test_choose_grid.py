"""The table of grids: bounds hold, and small calls get small grids."""

from __future__ import annotations

from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mori import _core

ROW_BYTES = 14336  # bfloat16, 7168 columns: 28 parts of 512 bytes
MULTIPROCESSORS = 132


class Grid(NamedTuple):
    blocks: int
    warps: int
    parts: int
    stagers: int


def choose(tokens: int, row_bytes: int = ROW_BYTES, block_num: int = 0, warps: int = 0, processors: int = 132) -> Grid:
    found = _core.choose_grid(tokens, row_bytes, block_num=block_num, warps=warps, multiprocessors=processors)
    return Grid(*found)


@pytest.mark.parametrize(
    "tokens, blocks, warps, parts",
    [(0, 1, 8, 1), (1, 4, 8, 28), (16, 58, 8, 28), (128, 132, 8, 7), (256, 132, 16, 7), (4096, 132, 16, 1)],
)
def test_choice_without_bounds(tokens: int, blocks: int, warps: int, parts: int) -> None:
    assert choose(tokens)[:3] == (blocks, warps, parts)


@pytest.mark.parametrize(
    "asked, got",
    [((80, 8), (80, 8)), ((1, 1), (1, 1)), ((100000, 100), (132, 16)), ((-1, -1), (132, 16)), ((17, 0), (17, 16))],
)
def test_bounds_of_the_caller(asked: tuple[int, int], got: tuple[int, int]) -> None:
    assert choose(4096, block_num=asked[0], warps=asked[1])[:2] == got


def test_warps_are_bounded_not_chosen_by_the_caller() -> None:
    assert choose(16, block_num=128, warps=16)[:3] == (58, 8, 28)


@pytest.mark.parametrize("tokens, stagers", [(16, 58), (256, 132), (512, 66), (1024, 33), (4096, 22)])
def test_few_tokens_are_staged_by_more_blocks(tokens: int, stagers: int) -> None:
    assert choose(tokens).stagers == stagers


def test_no_grid_is_larger_than_the_words_for_its_blocks() -> None:
    assert choose(1 << 20, block_num=10000, processors=1000).blocks == 256


def test_rows_below_one_part_are_not_split() -> None:
    assert choose(1, row_bytes=1000)[:3] == (1, 8, 1)


@given(
    tokens=st.integers(0, 1 << 20),
    row_bytes=st.integers(1, (1 << 24) - 1),
    block_num=st.integers(-2, 1 << 16),
    warps=st.integers(-2, 64),
    processors=st.integers(1, 300),
)
def test_every_choice_is_legal(tokens: int, row_bytes: int, block_num: int, warps: int, processors: int) -> None:
    grid = choose(tokens, row_bytes, block_num, warps, processors)
    assert 1 <= grid.blocks <= min(processors, 256)
    assert 1 <= grid.warps <= 16
    assert block_num <= 0 or grid.blocks <= block_num
    assert warps <= 0 or grid.warps <= warps
    assert 1 <= grid.parts <= max(1, row_bytes // 512)
    assert 1 <= grid.stagers <= grid.blocks


def test_wider_waves_have_larger_parts() -> None:
    narrow, wide = (
        Grid(*_core.choose_grid(4, ROW_BYTES, block_num=0, warps=0, multiprocessors=304, lanes=lanes))
        for lanes in (32, 64)
    )
    assert (narrow.parts, wide.parts) == (28, 14)
