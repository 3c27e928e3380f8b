"""Thousands of calls without synchronisation, delays inside the kernels, and call numbers about to wrap."""

from __future__ import annotations

import pytest

from tests.ranks import pool
from tests.v1.storm import Shape, storm, storm_from

NEAR_WRAP = {"2^31": 2**31 - 3, "2^32": 2**32 - 3, "2^40": 2**40 - 3}


@pytest.mark.parametrize("world_size", [4])
def test_two_thousand_pairs_with_delays_inside_the_kernels(world_size: int):
    received = pool(world_size).run(storm, 0, 2000, 60, timeout_s=120)
    assert min(received) > 2000


@pytest.mark.parametrize("world_size,rounds,max_delay_us", [(1, 300, 20), (2, 600, 200), (3, 300, 0), (8, 200, 100)])
def test_pairs_in_other_worlds(world_size: int, rounds: int, max_delay_us: int):
    pool(world_size).run(storm, 10_000, rounds, max_delay_us)


@pytest.mark.parametrize("world_size", [2, 3])
def test_pairs_with_several_threads_per_rank(world_size: int):
    shape = Shape(max_tokens=150, hidden=33, topk=5)
    pool(world_size, MORI_HOST_THREADS="3").run(storm, 20_000, 200, 100, shape)


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("start", NEAR_WRAP.values(), ids=NEAR_WRAP.keys())
def test_call_numbers_pass_the_limits_of_integers(world_size: int, start: int):
    pool(world_size).run(storm_from, [start], 8)


@pytest.mark.parametrize("world_size", [2, 4])
def test_call_number_jumps_far_ahead(world_size: int):
    jump = 2**31 + 5
    large_grid = Shape(max_tokens=600, hidden=16)
    pool(world_size).run(storm_from, [100, 100 + jump, 100 + 2 * jump], 5, large_grid)


@pytest.mark.full
@pytest.mark.parametrize("world_size", [2, 3, 4, 8])
@pytest.mark.parametrize("threads", [1, 4])
def test_twenty_thousand_pairs(world_size: int, threads: int):
    pool(world_size, MORI_HOST_THREADS=str(threads)).run(storm, 0, 20_000 // world_size, 40, timeout_s=170)
