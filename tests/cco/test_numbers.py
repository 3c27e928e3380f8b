"""Numbers that callers pass: what is none must not get into an allocator, a message to peers or native code."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from mori.cco import CCODevCommRequirements, Communicator, get_unique_id
from mori.cco.whole import whole
from mori.errors import BootstrapError
from tests.cco.members import SLICE_BYTES

NO_INTS = (None, 1.0, "1", True, [1], float("nan"))


@pytest.fixture(scope="module")
def comm() -> Iterator[Communicator]:
    with Communicator.init(1, 0, get_unique_id(), SLICE_BYTES) as alone:
        yield alone


def refused(call: Callable[[Any], object], name: str, values: tuple[Any, ...] = NO_INTS) -> None:
    for value in values:
        with pytest.raises(TypeError) as caught:
            call(value)
        assert str(caught.value) == f"{name} must be an int, got {value!r}"


def test_an_int_is_an_int() -> None:
    for value in (3, np.int64(3), np.uint8(3), torch.tensor(3)):
        assert type(whole(value, "count")) is int
        assert whole(value, "count") == 3
    refused(lambda value: whole(value, "count"), "count")


def test_joining_refuses_what_is_no_number_before_the_lobby_hears_of_it() -> None:
    unique_id = get_unique_id()
    refused(lambda value: Communicator.init(value, 0, unique_id), "nranks")
    refused(lambda value: Communicator.init(1, value, unique_id), "rank")
    refused(lambda value: Communicator.init(1, 0, unique_id, value), "per_rank_vmm")
    with pytest.raises(ValueError, match=f"between 1 and {1 << 47}, got {1 << 70}"):
        Communicator.init(1, 0, unique_id, 1 << 70)
    with Communicator.init(np.int64(1), np.int64(0), unique_id, np.int64(SLICE_BYTES)) as comm:
        assert comm.capacity_bytes == SLICE_BYTES


def test_the_allocator_sees_ints_only(comm: Communicator) -> None:
    used = comm.used_bytes
    refused(comm.alloc_mem, "size")
    assert comm.used_bytes == used
    memory = comm.alloc_mem(np.int64(64))
    assert comm.used_bytes == used + 64
    refused(lambda value: comm.register_window(value, 64), "ptr")
    refused(lambda value: comm.register_window(memory.ptr, value), "size")
    refused(lambda value: comm.register_external_window(value, 64), "ext_ptr")
    refused(lambda value: comm.register_external_window(memory.ptr, value), "size")
    refused(lambda value: comm.create_dev_comm(CCODevCommRequirements(barrier_count=value)), "barrier_count")
    comm.register_window(np.int64(memory.ptr), np.int64(64)).close()
    comm.barrier()


def test_views_are_of_ints_and_of_a_dtype(comm: Communicator) -> None:
    memory = comm.alloc_mem(64)
    refused(lambda value: memory.view(value, (1,), torch.uint8), "offset")
    refused(lambda value: memory.view(0, (value,), torch.uint8), "an extent of shape")
    refused(lambda value: memory.view(0, (1,), torch.uint8, value), "peer", NO_INTS[1:])
    for shape in ((-4,), (4, -1), (-1, -1)):
        with pytest.raises(ValueError, match=r"no extent below 0, got \(-?\d"):
            memory.view(0, shape, torch.uint8)
    with pytest.raises(TypeError, match="dtype must be a torch.dtype, got 'f4'"):
        memory.view(0, (1,), "f4")  # type: ignore[arg-type]
    assert memory.view(np.int64(4), [np.int64(2), 3], torch.int32).shape == (2, 3)  # type: ignore[arg-type]
    assert memory.view(0, (), torch.float32).shape == ()


def test_what_is_no_json_ends_no_step(comm: Communicator) -> None:
    for value in (np.int64(1), torch.float32, {1, 2}):
        with pytest.raises(TypeError, match="not JSON serializable"):
            comm.allgather(value, "facts")
    assert comm.allgather((1, 2), "facts") == [[1, 2]]


def test_an_error_that_is_raised_again_does_not_grow() -> None:
    comm = Communicator.init(1, 0, get_unique_id(), SLICE_BYTES)
    comm._rendezvous.close()
    depths = set()
    for _ in range(3):
        with pytest.raises(BootstrapError, match="has been closed on this rank") as caught:
            comm._rendezvous.barrier("late", 1)
        depths.add(len(traceback.extract_tb(caught.value.__traceback__)))
    assert len(depths) == 1
    comm.destroy()
