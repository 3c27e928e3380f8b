"""Symmetric memory as it comes: steps that all ranks take together or not at all, and the swap of new chunks."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from mori.cco.descriptors import PeerLink, exchange_descriptors
from mori.errors import BootstrapError, HeapExhausted, MoriError

if TYPE_CHECKING:
    from mori import _core
    from mori.cco.bootstrap import Rendezvous
    from mori.cco.wire import Poll

Result = TypeVar("Result")


def together(
    rendezvous: Rendezvous,
    what: str,
    timeout_s: float,
    step: Callable[[], Result],
    poll: Poll | None = None,
    error: type[MoriError] = BootstrapError,
) -> Result:
    """Collective: the result of `step`, once it has succeeded on all ranks. Else `error` on all, naming the ranks."""
    result, failure = None, None
    try:
        result = step()
    except (RuntimeError, OSError) as problem:
        failure = str(problem)
    answers = rendezvous.allgather(failure, what, timeout_s, poll)
    failed = [f"rank {rank}: {answer}" for rank, answer in enumerate(answers) if answer is not None]
    if failed:
        raise error(f"{what}: {'; '.join(failed[:4])}")
    return result  # type: ignore[return-value]


def swap_chunk(
    rendezvous: Rendezvous, memory: _core.SymmetricMemory, chunk: int, timeout_s: float, begins: list[int] | None = None
) -> dict[int, PeerLink]:
    """Collective: map every peer's chunk of that number, which all ranks have. The links are the caller's to close.

    `begins`: by rank, where in what its descriptor leads to the chunk begins.
    """
    descriptor = memory.export_chunk(chunk)
    try:
        links = exchange_descriptors(rendezvous, descriptor, timeout_s)
    finally:
        os.close(descriptor)

    def map_peers() -> None:
        for peer, link in links.items():
            try:
                memory.map_peer(peer, chunk, link.fd, begins[peer] if begins else 0)
            except RuntimeError as problem:
                raise RuntimeError(
                    f"the memory of rank {peer} cannot be mapped ({problem}). All processes must see all GPUs: choose "
                    "among them by torch.cuda.set_device, not by a CUDA_VISIBLE_DEVICES per process"
                ) from problem
            finally:
                os.close(link.fd)  # the mapping holds the memory
                link.fd = -1

    try:
        together(rendezvous, "symmetric memory of the peers", timeout_s, map_peers)
    except BaseException:
        for link in links.values():
            link.close()
        raise
    return links


def grow(
    rendezvous: Rendezvous, memory: _core.SymmetricMemory, end: int, what: str, timeout_s: float, poll: Poll
) -> None:
    """Collective, with one `end` on all ranks: memory exists and is mapped at least up to offset `end`."""
    before = memory.chunks
    try:
        together(rendezvous, f"{what}: memory", timeout_s, lambda: memory.extend(end), poll, HeapExhausted)
        swap_new(rendezvous, memory, before, timeout_s)
    except MoriError:
        memory.drop_chunks(before)
        raise


def swap_new(rendezvous: Rendezvous, memory: _core.SymmetricMemory, known: int, timeout_s: float) -> None:
    """Collective: map the peers' chunks beyond the first `known` ones."""
    for chunk in range(known, memory.chunks):
        for link in swap_chunk(rendezvous, memory, chunk, timeout_s).values():
            link.close()
