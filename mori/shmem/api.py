"""The process-global symmetric-memory API ("shmem"): one communicator and one heap per process.

A PE is a rank. Unless a function says otherwise it raises `mori.NotInitialized` before init and after finalize.
Collective functions must be called by all ranks in the same order; each has a deadline and names the missing ranks.
"""

from __future__ import annotations

from typing import Any

from mori import env

from . import groups, state

MORI_SHMEM_INIT_WITH_MPI_COMM = 0
MORI_SHMEM_INIT_WITH_UNIQUEID = 1

UNIQUE_ID_BYTES = 128
# Of every allocation: results of vector loads and of neighbours' cache lines never meet.
ALIGNMENT_BYTES = 256


def shmem_get_unique_id() -> bytes:
    """128 bytes that name a communicator yet to be built. Call on one process and send them to all ranks.

    This process listens for the ranks in a background thread until all have joined or MORI_BOOTSTRAP_TIMEOUT has
    passed; it must live that long. The bytes hold a secret: whoever has them can join. Works before init.
    """
    from mori.cco.unique_id import get_unique_id

    return bytes(get_unique_id())


def shmem_init_attr(flags: int, rank: int, nranks: int, unique_id: bytes) -> int:
    """Collective: join the `nranks` ranks that hold the same `unique_id`, as `rank`. Returns 0.

    flags: MORI_SHMEM_INIT_WITH_UNIQUEID. unique_id: from `shmem_get_unique_id`. Reserves MORI_SHMEM_HEAP_SIZE bytes of
    address space per rank. On GPU targets the heap is on the calling thread's current GPU from now on, so call
    torch.cuda.set_device first; each rank needs its own. A second call with equal arguments returns 0 without effect.

    RuntimeError: initialised already with other arguments, MPI asked for, or a unique id of another length.
    ValueError: rank or flags out of range. mori.ConfigMismatch: heap size or version differ between ranks.
    mori.BootstrapTimeout: ranks are missing after MORI_BOOTSTRAP_TIMEOUT.
    """
    if flags == MORI_SHMEM_INIT_WITH_MPI_COMM:
        raise RuntimeError(
            "mori is built without MPI: pass MORI_SHMEM_INIT_WITH_UNIQUEID (1) and broadcast the id with MPI yourself"
        )
    if flags != MORI_SHMEM_INIT_WITH_UNIQUEID:
        raise ValueError(f"unknown shmem init flags {flags!r}: pass MORI_SHMEM_INIT_WITH_UNIQUEID (1)")
    identity = _unique_id_bytes(unique_id)
    _check_rank(rank, nranks)
    arguments = state.InitArguments(int(rank), int(nranks), identity)
    if not state.already_initialized(arguments):
        state.start(arguments, identity)
    return 0


def _unique_id_bytes(unique_id: Any) -> bytes:
    """Accepts bytes, whatever `bytes()` accepts except an int, and the id object of mori.cco."""
    if isinstance(unique_id, int):
        raise TypeError(f"unique_id must be bytes as made by shmem_get_unique_id, got the int {unique_id}")
    raw = bytes(unique_id)
    if len(raw) != UNIQUE_ID_BYTES:
        raise RuntimeError(
            f"Invalid unique ID size: got {len(raw)} bytes, expected {UNIQUE_ID_BYTES} as made by shmem_get_unique_id"
        )
    return raw


def _check_rank(rank: int, nranks: int) -> None:
    if nranks < 1 or not 0 <= rank < nranks:
        raise ValueError(f"rank {rank} is outside 0..{nranks - 1} for nranks {nranks}")


def shmem_torch_process_group_init(group_name: str) -> int:
    """Collective over a torch process group: rank and size of the PEs are those of the group. Returns 0.

    group_name: any name registered with c10d, `group.group_name` included; "default" means WORLD when nothing is
    registered under it. The group may have any backend and need not contain global rank 0; it carries the unique id
    and is not used afterwards (it may be destroyed before finalize). A second call for the same ranks returns 0
    without effect; for others it raises RuntimeError. Further errors as in `shmem_init_attr`.

    RuntimeError: torch.distributed is not initialised. ValueError: no group of that name.
    """
    membership = groups.resolve(group_name)
    arguments = state.InitArguments(membership.rank, membership.size, membership.global_ranks)
    if not state.already_initialized(arguments):
        state.start(arguments, groups.share_unique_id(membership))
    return 0


def shmem_mpi_init() -> int:
    """Always RuntimeError: mori is built without MPI."""
    raise RuntimeError("mori is built without MPI: use shmem_init_attr with a unique id broadcast by MPI")


def shmem_finalize() -> int:
    """Collective, bounded: leave the communicator and give up the heap. Returns 0, also when not initialised.

    Views of ops and heap tensors stay valid memory until they die. Init may be called again afterwards.
    """
    state.stop()
    return 0


def shmem_module_init(module: Any) -> int:
    """Always NotImplementedError: device modules that call into shmem are not served by this version."""
    raise NotImplementedError(
        "shmem_module_init is not available: the host target has no device modules, and on GPUs this version offers no "
        "device-side shmem calls. Kernels of your own reach peers' memory by the addresses of shmem_ptr_p2p"
    )


def shmem_mype() -> int:
    """Rank of this process."""
    return state.current().arguments.rank


def shmem_npes() -> int:
    """Number of ranks."""
    return state.current().arguments.nranks


def shmem_num_qp_per_pe() -> int:
    """Queue pairs per peer between nodes (MORI_NUM_QP_PER_PE)."""
    state.current()
    return int(env.get("MORI_NUM_QP_PER_PE"))


def shmem_barrier_all() -> None:
    """Collective: returns when all ranks have entered. mori.PeerLost when one cannot come any more.

    A barrier of the host: it does not wait for GPUs.
    """
    state.current().communicator.barrier()


def shmem_barrier_on_stream(stream: Any = None) -> None:
    """Collective: a barrier in stream order. Calls are synchronous on CPUs, so there it is `shmem_barrier_all`.

    stream: None (current), a torch stream or a raw handle; not looked at on CPUs. On GPUs this version waits for the
    stream on the host and then for all ranks: what is enqueued afterwards comes after everything that any rank had
    enqueued before. It cannot be captured into a graph.
    """
    communicator = state.current().communicator
    if communicator.device.type != "cpu":
        from mori.ops import streams

        streams.synchronize(stream, communicator.device)
    communicator.barrier()


def shmem_malloc(size: int) -> int:
    """Collective: address of `size` bytes at the same offset on every rank, aligned to 256. 0 for size 0.

    ValueError: negative size. mori.ConfigMismatch: ranks ask for different sizes. mori.HeapExhausted: on all ranks,
    with the bytes needed, used and configured. The memory holds zeros, or what an earlier owner left.
    """
    return shmem_malloc_align(ALIGNMENT_BYTES, size)


def shmem_malloc_align(alignment: int, size: int) -> int:
    """As `shmem_malloc`, with the offset in the heap aligned to `alignment` bytes. 0 when that is no power of two.

    Beyond a page (4096 bytes) the address itself is aligned only as far as the system placed the heap.
    """
    heap = state.current().heap
    if size < 0:
        raise ValueError(f"shmem_malloc: size {size} is negative")
    if size == 0 or alignment <= 0 or alignment & (alignment - 1):
        return 0
    return heap.allocate(int(size), max(int(alignment), ALIGNMENT_BYTES), what="shmem_malloc")


def shmem_ext_malloc_with_flags(size: int, flags: int) -> int:
    """As `shmem_malloc`; `flags` has no meaning for this heap."""
    return shmem_malloc(size)


def shmem_free(ptr: int) -> None:
    """Mark an allocation free; 0 is accepted. Not collective: the bytes come back inside a later collective call.

    Other ranks may go on using their part until all have freed it. ValueError: no live allocation starts at `ptr`.
    """
    if ptr != 0:
        state.current().heap.free(int(ptr))


def shmem_buffer_register(ptr: int, size: int) -> int:
    """Make caller-owned memory known to the transport. Returns 0: inside one node nothing has to be done."""
    state.current()
    if ptr == 0 or size <= 0:
        raise ValueError(f"shmem_buffer_register: ptr {ptr:#x} with size {size} names no memory")
    return 0


def shmem_buffer_deregister(ptr: int, size: int) -> int:
    """Undo `shmem_buffer_register`. Returns 0."""
    state.current()
    return 0


def shmem_ptr_p2p(ptr: int, my_pe: int, dest_pe: int) -> int:
    """Address under which this process reaches `dest_pe`'s copy of its own heap address `ptr`.

    `ptr` itself when dest_pe is this rank; 0 when `ptr` is not in the heap, a rank is out of range, or my_pe is not
    this rank.
    """
    session = state.current()
    if my_pe != session.arguments.rank:
        return 0
    if dest_pe == my_pe:
        return int(ptr)
    return session.heap.peer_address(int(ptr), int(dest_pe))
