"""The explicit communicator: ranks that share symmetric memory and notice each other's end."""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import time
import weakref
from typing import Any

import torch

from mori import _core, env, target
from mori.cco import devices, external, growth
from mori.cco.allocator import Block, SliceAllocator
from mori.cco.bootstrap import Rendezvous
from mori.cco.descriptor_area import AREA_END, DescriptorArea
from mori.cco.descriptors import PeerLink
from mori.cco.dev_comm import DevCommHandle
from mori.cco.faults import communicator_error, peer_left
from mori.cco.requirements import CCODevCommRequirements
from mori.cco.resources import AllocatedMemory, CCOResource
from mori.cco.unique_id import UniqueId, get_unique_id
from mori.cco.whole import whole
from mori.cco.windows import ImportedMemory, ImportedWindow, RegisteredWindow
from mori.errors import BootstrapError, ConfigMismatch, HeapExhausted, MoriError, PeerLost
from mori.target import Target

_PAGE = 4096
_MOST_BYTES = 1 << 47  # an address space has no more
_DEATH_NOTICE_S = 2.0  # the watcher needs far less


class Communicator:
    """A set of ranks, each with a slice of symmetric memory of `per_rank_vmm` bytes. Build one with `init`.

    A rank is a process or, on the host target, a thread: every thread calls `init` with the same id. On GPU targets it
    works on the GPU that was the calling thread's current one at `init`, which no other rank may have. A communicator
    must be used by one thread at a time. In a forked child it is dead: use and destruction there have no effect on the
    ranks.
    """

    def __init__(
        self,
        rendezvous: Rendezvous,
        memory: _core.SymmetricMemory,
        control: _core.SymmetricMemory,
        capacity: int,
        here: Target,
        device: torch.device,
    ) -> None:
        self._rendezvous = rendezvous
        self._memory = memory
        self._control = control  # host memory of the control blocks: the memory itself on the host target
        self._target = here
        self._device = device
        self._native = _core.Communicator(memory, control)
        self._mapped_chunks = 0  # of every peer's memory
        self._rank = rendezvous.rank
        self._allocator = SliceAllocator(AREA_END, capacity)
        self._area = DescriptorArea(memory, rendezvous.rank)
        self._registered = 0  # windows so far
        self._links: list[PeerLink] = []
        self._resources: list[CCOResource] = []
        # Blocks closed here, each with the native holder that knows about live views.
        self._released: list[tuple[Block | None, _core.MemoryBlock | None]] = []
        self._valid = True
        self._owner_pid = os.getpid()

    @staticmethod
    def get_unique_id() -> UniqueId:
        """See `mori.cco.get_unique_id`."""
        return get_unique_id()

    @classmethod
    def init(cls, nranks: int, rank: int, unique_id: UniqueId | bytes, per_rank_vmm: int = 4 << 30) -> Communicator:
        """Collective: meet the other ranks and map each other's memory.

        `per_rank_vmm` bytes of address space are reserved per rank. Memory is used only as far as it is touched (host)
        or as blocks were ever placed (GPU), and given back when the last view of it is gone.
        Deadline: MORI_BOOTSTRAP_TIMEOUT seconds. Errors are raised on every rank: BootstrapTimeout (names the missing
        ranks), BootstrapError (ranks that cannot meet, or reach each other's memory), ConfigMismatch
        (`per_rank_vmm` differs),
        NotImplementedError (ranks on several nodes). On this rank alone, before anything is sent: TypeError (a number
        that is no int), ValueError (nranks or size out of range).
        """
        nranks, rank = whole(nranks, "nranks"), whole(rank, "rank")
        per_rank_vmm = whole(per_rank_vmm, "per_rank_vmm")
        if not 1 <= nranks <= _core.MAX_WORLD_SIZE:
            raise ValueError(f"nranks must be between 1 and {_core.MAX_WORLD_SIZE}, got {nranks}")
        if not 0 < per_rank_vmm <= _MOST_BYTES:
            raise ValueError(f"per_rank_vmm must be between 1 and {_MOST_BYTES}, got {per_rank_vmm}")
        timeout_s = env.get("MORI_BOOTSTRAP_TIMEOUT")
        unique_id = UniqueId.from_bytes(bytes(unique_id))
        here = target.current()
        device = devices.bind(here)
        hello = {"target": here.name, "arch": here.arch, **devices.hello(here, device)}
        with contextlib.ExitStack() as undo:
            rendezvous = Rendezvous.join(unique_id, rank, nranks, hello, timeout_s)
            undo.callback(rendezvous.close)
            _refuse_several_nodes(rendezvous)
            _agree(rendezvous.allgather({"per_rank_vmm": per_rank_vmm}, "communicator", timeout_s), "communicator")
            devices.check_pairs(rendezvous, here, device, timeout_s)

            def create() -> Communicator:
                memory = control = _create(here, device, rank, nranks, per_rank_vmm + AREA_END)
                memory.extend(AREA_END)
                if here.is_device:
                    control = _core.SymmetricMemory.create_host(rank, nranks, _core.COMM_CONTROL_BYTES)
                return cls(rendezvous, memory, control, per_rank_vmm, here, device)

            comm = growth.together(rendezvous, "symmetric memory", timeout_s, create)
            undo.callback(comm._abandon)
            comm._connect(timeout_s)
            rendezvous.barrier("communicator is complete", timeout_s, comm.raise_if_faulted)
            undo.pop_all()
        _live.add(comm)
        return comm

    def _connect(self, timeout_s: float) -> None:
        links = growth.swap_chunk(self._rendezvous, self._control, 0, timeout_s)
        self._links = list(links.values())
        for peer, link in links.items():
            self._native.watch(peer, link.pidfd, link.socket.fileno())
        if self._memory is not self._control:
            growth.swap_new(self._rendezvous, self._memory, 0, timeout_s)
        self._mapped_chunks = self._memory.chunks

    # Facts

    @property
    def rank(self) -> int:
        self._check("read the rank")
        return self._rank

    @property
    def nranks(self) -> int:
        self._check("read the number of ranks")
        return self._rendezvous.nranks

    @property
    def ptr(self) -> int:
        """Address of this rank's slice of symmetric memory in this process."""
        self._check("read the address")
        return int(self._memory.address(self._rank, 0))

    @property
    def device(self) -> torch.device:
        """Where the symmetric memory is."""
        return self._device

    @property
    def target(self) -> Target:
        """What runs the kernels that work on the symmetric memory."""
        return self._target

    @property
    def is_valid(self) -> bool:
        return self._valid

    @property
    def capacity_bytes(self) -> int:
        """Bytes that blocks can take in one slice."""
        return self._allocator.capacity

    @property
    def used_bytes(self) -> int:
        """Bytes of the slice that are in blocks, closed ones that no collective call has reclaimed yet included."""
        return self._allocator.used

    def has_left(self, peer: int) -> bool:
        """Whether rank `peer` has destroyed its communicator or ended its process in order."""
        return bool(self._native.has_left(peer))

    # Collectives

    def barrier(self) -> None:
        """Collective: returns when every rank has called it. Errors as for `allgather`."""
        self.allgather(None, "barrier")

    def allgather(self, value: Any, what: str) -> list[Any]:
        """Collective: every rank's `value` (JSON), by rank. `what` names the step and must be equal on all ranks.

        Raises PeerLost within 2 s of a peer's end, BootstrapTimeout after MORI_BOOTSTRAP_TIMEOUT seconds, OutOfStep if
        a rank is in another step.
        """
        self._check(what)
        try:
            return self._rendezvous.allgather(value, what, env.get("MORI_BOOTSTRAP_TIMEOUT"), self._poll)
        except (BootstrapError, PeerLost):
            self._prefer_fault()
            raise

    def agree(self, fields: dict[str, Any], what: str) -> None:
        """Collective: ConfigMismatch on all ranks unless `fields` (JSON) are equal on all; names field and values.

        Takes back memory that every rank has closed, too. Errors else as for `allgather`.
        """
        self._reclaim(what, fields)

    def _poll(self) -> None:
        """While waiting for peers: a dead one, or one that left, ends the wait."""
        self.raise_if_faulted()
        for peer in range(self._rendezvous.nranks):
            if peer != self._rank and self._native.has_left(peer):
                raise peer_left(peer, self._rendezvous.peers[peer], "a collective call")

    def _prefer_fault(self) -> None:
        """A closed connection is how a death looks from here; the watcher knows more, a moment later."""
        deadline = time.monotonic() + _DEATH_NOTICE_S
        while time.monotonic() < deadline:
            self._poll()
            time.sleep(0.01)

    def raise_if_faulted(self) -> None:
        """Raise PeerLost, PeerTimeout or OutOfStep if the sticky abort word is set."""
        fault = self._native.fault()
        if fault is not None:
            raise communicator_error(fault, self._rendezvous.peers)

    # Memory

    def alloc_mem(self, size: int) -> AllocatedMemory:
        """Symmetric memory of `size` bytes, at the same offset on every rank if all make the same calls in one order.

        Not collective; a following collective call (`register_window`) compares. Contents are undefined.
        RuntimeError (HeapExhausted) if the slice has no gap of that size. `size` 0 gives `ptr` 0.
        """
        self._check("alloc_mem")
        size = whole(size, "size")
        if size < 0:
            raise ValueError(f"size must not be negative, got {size}")
        block = self._allocator.allocate(size, _PAGE) if size else None
        if size and block is None:
            raise self._exhausted(size, "alloc_mem")
        if block is not None:
            try:
                self._memory.extend(block.offset + block.size)  # peers map it in the next collective call
            except RuntimeError as error:
                self._allocator.release(block)
                raise HeapExhausted(f"alloc_mem: {error}") from error
        return AllocatedMemory(self, block, size)

    def allocate_symmetric(
        self,
        size: int,
        what: str,
        agree: dict[str, Any] | None = None,
        alignment: int = _PAGE,
        tracked: bool = True,
    ) -> AllocatedMemory:
        """Collective `alloc_mem`: all ranks agree on `size`, on the offset and on every field of `agree`, or all raise.

        Blocks that every rank has closed, and of which none holds a view, are reclaimed first. ConfigMismatch names the
        field, the ranks and their values; HeapExhausted says how many bytes were needed, used and configured.
        """
        self._reclaim(what, {**(agree or {}), "bytes of symmetric memory": size})
        block = self._allocator.allocate(size, alignment) if size else None
        if size and block is None:
            gc.collect()  # views may hang in reference cycles; all ranks come here alike
            self._reclaim(f"{what}: reclaiming memory", {})
            block = self._allocator.allocate(size, alignment)
            if block is None:
                raise self._exhausted(size, what)
        if block is not None:
            self._provide(block, what)
        return AllocatedMemory(self, block, size, tracked)

    def _provide(self, block: Block, what: str) -> None:
        """Collective: see to it that there is memory behind a new block, on all ranks or on none."""
        end = block.offset + block.size
        if end <= self._memory.extent:  # so it is on every rank: all have the same blocks
            return
        try:
            growth.grow(self._rendezvous, self._memory, end, what, env.get("MORI_BOOTSTRAP_TIMEOUT"), self._poll)
        except HeapExhausted:
            self._allocator.release(block)
            raise
        self._mapped_chunks = self._memory.chunks

    def register_window(self, ptr: int, size: int) -> RegisteredWindow:
        """Collective: let kernels of all ranks address the memory at `ptr` (the base that `alloc_mem` returned).

        RuntimeError, on this rank alone and with nothing changed, if `ptr` is not the base of an allocation or `size`
        reaches beyond it. ConfigMismatch, on all ranks, if they register different offsets or sizes, or in another
        order. RuntimeError when 1024 windows are open.
        """
        ptr, size = whole(ptr, "ptr"), whole(size, "size")
        memory = self._window_memory("register_window", ptr, size)
        self._register("register_window", memory, size)
        return RegisteredWindow(self, memory, size)

    def register_external_window(self, ext_ptr: int, size: int) -> ImportedWindow:
        """Collective: a window over memory that this communicator did not allocate, mapped once more on every rank.

        On CPUs `ext_ptr` is a page's address in a shared mapping whose descriptor this process has open: memory of
        another communicator, a memfd, a torch tensor after `share_memory_()`. On GPUs it is the base address of an
        allocation by the driver's virtual memory calls whose handle can be exported as a descriptor. `size` bytes from
        there on, on every rank the same, of allocations that are of the same size too. The owner keeps the memory until
        the window is closed.
        RuntimeError, on this rank alone, with the remedy, for other memory; ConfigMismatch, on all ranks, if they
        differ in size or order.
        """
        what = "register_external_window"
        self._check(what)
        ext_ptr, size = whole(ext_ptr, "ext_ptr"), whole(size, "size")
        memory = external.import_memory(self, ext_ptr, size, what, tracked=False)
        try:
            self._register(what, memory, size)
            return ImportedWindow(self, memory, size)
        except BaseException:
            memory.close()
            raise

    def create_dev_comm(self, requirements: CCODevCommRequirements | None = None) -> DevCommHandle:
        """Collective: a device communicator, with what `requirements` ask for (None: the defaults).

        TypeError or ValueError, on this rank alone, for requirements out of range; ConfigMismatch, on all ranks, if
        they differ; HeapExhausted if the slice has no room for the barriers.
        """
        self._check("create_dev_comm")
        return DevCommHandle(self, requirements, tracked=True)

    def _window_memory(self, what: str, ptr: int, size: int) -> AllocatedMemory | ImportedMemory:
        self._check(what)
        known = [each for each in self._resources if isinstance(each, (AllocatedMemory, ImportedMemory))]
        memory = next((each for each in known if ptr and each.ptr == ptr), None)
        if memory is None:
            raise RuntimeError(f"{what}: {ptr:#x} is not the base address of memory from alloc_mem")
        if not 0 < size <= memory.size:
            raise RuntimeError(f"{what}: size {size} is not within the {memory.size} bytes of the allocation")
        return memory

    def _register(self, what: str, memory: AllocatedMemory | ImportedMemory, size: int) -> None:
        """Collective: agree on a further window, and see to it that all ranks have all of its memory mapped."""
        facts: dict[str, Any] = {"window number": self._registered, "window offset": memory.offset, "window size": size}
        facts["imported memory"] = "none"
        if isinstance(memory, ImportedMemory):
            state = "mapped" if memory.is_mapped_by_peers else "new"
            # GPUs map allocations as a whole, and all parts of the range have one size.
            facts["imported memory"] = f"{state}, an allocation of {memory.symmetric.bytes_per_rank} bytes"
        self._reclaim(what, facts)
        if isinstance(memory, ImportedMemory):
            external.map_peers(self, memory, env.get("MORI_BOOTSTRAP_TIMEOUT"))
        self._registered += 1

    def _allocations(self) -> list[AllocatedMemory]:
        return [each for each in self._resources if isinstance(each, AllocatedMemory)]

    def _untrack(self, resource: CCOResource) -> None:
        if resource in self._resources:
            self._resources.remove(resource)

    def _reclaim(self, what: str, agree: dict[str, Any]) -> None:
        """Collective: compare `agree` and the allocators, and take back what all ranks have released."""
        self._check(what)
        self._memory.synchronize()  # kernels on this device may still use what was released
        free = [list(block) for block, native in self._released if block and (native is None or native.users == 0)]
        state = {"allocations": self._allocator.fingerprint(), "chunks of symmetric memory": self._memory.chunks}
        answers = self.allgather({**agree, **state, "free": free}, what)
        released = [{tuple(block) for block in answer.pop("free")} for answer in answers]
        _agree(answers, what)
        if self._mapped_chunks < self._memory.chunks:
            growth.swap_new(self._rendezvous, self._memory, self._mapped_chunks, env.get("MORI_BOOTSTRAP_TIMEOUT"))
            self._mapped_chunks = self._memory.chunks
        common = {Block(*block) for block in set.intersection(*released)}
        for block in sorted(common):
            self._allocator.release(block)
            self._memory.release_pages(block.offset, block.size)
        self._released = [each for each in self._released if each[0] is not None and each[0] not in common]

    def _exhausted(self, size: int, what: str) -> HeapExhausted:
        return HeapExhausted(
            f"{what} needs {size} bytes of symmetric memory; {self._allocator.used} of the {self._allocator.capacity} "
            "bytes configured are in use. Raise MORI_SHMEM_HEAP_SIZE (v1) or per_rank_vmm (Communicator.init)"
        )

    def view(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype, peer: int | None = None) -> torch.Tensor:
        """A tensor over memory at `offset` of the slice of `peer` (default: own); see `AllocatedMemory.view`."""
        self._check("view")
        for memory in self._allocations():
            if memory.offset <= offset < memory.offset + max(memory.size, 1):
                return memory.view(offset - memory.offset, shape, dtype, peer)
        raise ValueError(f"offset {offset} lies in no allocation of this communicator")

    # The end

    def close_all_resources(self) -> None:
        """Close everything that this communicator handed out, newest first."""
        for resource in reversed(list(self._resources)):
            with contextlib.suppress(Exception):
                resource.close()

    def destroy(self) -> None:
        """Leave: peers that still need this rank raise PeerLost ("left the communicator"). Idempotent.

        Waits, bounded, until the other ranks leave too, unless a rank is lost already. Views stay valid memory.
        """
        if not self._valid:
            return
        self._valid = False
        _live.discard(self)
        if os.getpid() != self._owner_pid:
            return
        self.close_all_resources()
        self._finish_kernels()
        faulted = self._native.fault() is not None
        self._native.leave()
        if not faulted:
            with contextlib.suppress(MoriError):
                self._rendezvous.barrier(
                    "communicator is destroyed", env.get("MORI_BOOTSTRAP_TIMEOUT"), self.raise_if_faulted
                )
        self._abandon()

    def _finish_kernels(self) -> None:
        """What was enqueued on the device ends before this rank leaves: peers count on it. Bounded: all waits are."""
        with contextlib.suppress(RuntimeError):  # a device that failed has nothing more to finish
            self._memory.synchronize()

    def _abandon(self) -> None:
        """Give back what this process holds, without a word to the peers."""
        self._valid = False
        self._native.close()
        for link in self._links:
            link.close()
        self._links.clear()
        self._released.clear()
        self._rendezvous.close()

    def _leave_at_exit(self) -> None:
        if self._valid and os.getpid() == self._owner_pid:
            self._finish_kernels()
            self._native.leave()

    def _check(self, operation: str) -> None:
        if not self._valid:
            raise RuntimeError(f"Cannot {operation}: Communicator has been destroyed")
        if os.getpid() != self._owner_pid:
            raise RuntimeError(f"Cannot {operation}: this process was forked from the rank; only the parent may call")

    def __enter__(self) -> Communicator:
        return self

    def __exit__(self, *exception: object) -> None:
        self.destroy()

    def __del__(self) -> None:
        if getattr(self, "_valid", False) and os.getpid() == self._owner_pid:
            self._finish_kernels()
            self._native.leave()
            self._abandon()


_live: weakref.WeakSet[Communicator] = weakref.WeakSet()


@atexit.register
def _leave_all() -> None:
    """A process that ends in order has left its communicators; one that is killed is found dead by its peers."""
    for comm in list(_live):
        comm._leave_at_exit()


def _create(here: Target, device: torch.device, rank: int, nranks: int, size: int) -> _core.SymmetricMemory:
    if not here.is_device:
        return _core.SymmetricMemory.create_host(rank, nranks, size)
    handle_type = _core.HANDLE_POSIX_DESCRIPTOR
    return _core.SymmetricMemory.create_gpu(here.name, rank, nranks, size, device.index, handle_type)


def _refuse_several_nodes(rendezvous: Rendezvous) -> None:
    nodes = [peer["node"] for peer in rendezvous.peers]
    for rank, node in enumerate(nodes):
        if node != nodes[0]:
            raise NotImplementedError(
                f"rank 0 is on node {nodes[0]} and rank {rank} on node {node}: communicators that span nodes are not "
                "there yet. Start all ranks on one machine, without MORI_NODE_ID or with one value of it"
            )


def _agree(answers: list[dict[str, Any]], what: str) -> None:
    """ConfigMismatch, equal on all ranks, unless all answers agree in every field."""
    fields = list(dict.fromkeys(field for answer in answers for field in answer))
    for field in fields:
        by_value: dict[str, list[int]] = {}
        for rank, answer in enumerate(answers):
            by_value.setdefault(repr(answer.get(field)), []).append(rank)
        if len(by_value) > 1:
            listing = "; ".join(
                f"{value} on rank{'s' * (len(ranks) > 1)} {_spell(ranks)}" for value, ranks in by_value.items()
            )
            raise ConfigMismatch(f"{what}: ranks disagree on {field}: {listing}. Pass the same value on every rank")


def _spell(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks))
