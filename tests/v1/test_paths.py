"""The staged leg and mixes of both legs give what the direct leg gives, under skew, odd shapes and several threads."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.ranks import pool
from tests.v1.exercise import exercise
from tests.v1.storm import Shape, storm, storm_from
from tests.v1.strategies import case_for

# "auto" stages calls of up to 32 tokens, so counts from 0 to 64 put ranks on different legs within one call.
MIXED = Shape(max_tokens=64, hidden=24, topk=3)


@pytest.mark.parametrize("path", ["staged", "auto"])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_pairs_with_delays_inside_the_kernels(world_size: int, path: str):
    pool(world_size, MORI_EP_PATH=path).run(storm, 30_000, 200, 60, MIXED)


@pytest.mark.parametrize("path", ["staged", "auto"])
def test_pairs_with_several_threads_per_rank(path: str):
    pool(2, MORI_EP_PATH=path, MORI_HOST_THREADS="3").run(storm, 40_000, 150, 100, MIXED)


@pytest.mark.parametrize("world_size", [2, 3])
def test_call_numbers_pass_the_limits_of_integers(world_size: int):
    pool(world_size, MORI_EP_PATH="auto").run(storm_from, [2**31 - 3, 2**32 - 3, 2**40 - 3], 8, MIXED)


@pytest.mark.parametrize("world_size", [2, 4])
@settings(max_examples=15)
@given(data=st.data())
def test_any_case(world_size: int, data: st.DataObject):
    pool(world_size, MORI_EP_PATH="auto").run(exercise, data.draw(case_for(world_size)))
