"""Tensors over the symmetric heap. All of them keep the mapping alive, also past free and finalize."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from . import api, state
from .heap import Heap

_MARK = "__symm_tensor__"


class MoriShmemBuffer:
    """`nbytes` bytes of symmetric memory at `ptr`, exported through DLPack as a flat tensor of `dtype`.

    ptr may be a peer's address as `shmem_ptr_p2p` gives it. With `own_data` the allocation is marked free when the
    buffer dies or on `free()`; tensors made from it stay valid memory all the same.
    """

    def __init__(self, ptr: int, nbytes: int, dtype: torch.dtype, own_data: bool = True) -> None:
        self.ptr = int(ptr)
        self.nbytes = int(nbytes)
        self.dtype = dtype
        self.own_data = own_data
        self._heap = state.current().heap
        self._tensor = self._heap.tensor(self.ptr, (self.nbytes // dtype.itemsize,), dtype)

    def tensor(self, shape: Sequence[int] | None = None) -> torch.Tensor:
        """The memory as a tensor of `shape` (default: flat)."""
        return self._tensor if shape is None else self._tensor[: math.prod(shape)].view(tuple(shape))

    def free(self) -> None:
        """Mark the allocation free now (owners only; a second call has no effect)."""
        owned, self.own_data = self.own_data, False
        if owned:
            self._heap.free(self.ptr)

    def __dlpack__(self, **options: Any) -> Any:
        return self._tensor.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self._tensor.__dlpack_device__()

    def __del__(self) -> None:
        if getattr(self, "own_data", False):
            self.free()


def mori_shmem_create_tensor(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Collective: a tensor at the same heap offset on every rank; `__symm_tensor__` is set on it.

    Contents are unspecified. Give the memory back with `mori_shmem_free_tensor`; errors as in `shmem_malloc`.
    """
    shape = tuple(shape)
    # At least one element: tensors need an address to be found again by.
    nbytes = max(math.prod(shape), 1) * dtype.itemsize
    address = api.shmem_malloc(nbytes)
    heap = state.current().heap
    tensor = heap.tensor(address, shape, dtype)
    setattr(tensor, _MARK, _Origin(heap, address))
    return tensor


def mori_shmem_free_tensor(tensor: torch.Tensor) -> None:
    """Mark the memory of a tensor from `mori_shmem_create_tensor` free. ValueError for any other tensor."""
    origin = _origin_of(tensor)
    origin.heap.free(origin.address)


def symm_mori_shmem_tensor(tensor: torch.Tensor, peer: int) -> torch.Tensor:
    """The peer's copy of a tensor from `mori_shmem_create_tensor`; the tensor itself for the own rank."""
    origin = _origin_of(tensor)
    arguments = state.current().arguments
    if not 0 <= peer < arguments.nranks:
        raise ValueError(f"peer {peer} is outside 0..{arguments.nranks - 1}")
    if peer == arguments.rank:
        return tensor
    return origin.heap.tensor(origin.heap.peer_address(origin.address, peer), tuple(tensor.shape), tensor.dtype)


def mori_shmem_create_tensor_list_intra_node(
    shape: Sequence[int], dtype: torch.dtype, num_ranks: int | None = None
) -> list[torch.Tensor]:
    """Collective: one symmetric tensor as seen in each rank's memory; entry p is rank p's, the own entry is owned.

    num_ranks: how many entries, from rank 0 on (default: all ranks).
    """
    count = api.shmem_npes() if num_ranks is None else num_ranks
    if not 0 <= count <= api.shmem_npes():
        raise ValueError(f"num_ranks {count} is outside 0..{api.shmem_npes()}")
    own = mori_shmem_create_tensor(shape, dtype)
    return [symm_mori_shmem_tensor(own, peer) for peer in range(count)]


class _Origin(NamedTuple):
    """Where a symmetric tensor came from: addresses mean something only together with the heap that gave them."""

    heap: Heap
    address: int


def _origin_of(tensor: torch.Tensor) -> _Origin:
    origin = getattr(tensor, _MARK, None)
    if not isinstance(origin, _Origin):
        raise ValueError("not a symmetric tensor: pass the very tensor that mori_shmem_create_tensor returned")
    if origin.heap is not state.current().heap:
        raise ValueError("this symmetric tensor belongs to a shmem heap that was finalised since it was created")
    return origin
