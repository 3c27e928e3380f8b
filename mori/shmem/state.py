"""The one shmem state of this process: not initialised, initialised with a communicator, or finalised.

A process that ends without finalize leaves the communicator in order: the communicator sees to that itself.
"""

from __future__ import annotations

import hashlib
import os
from typing import TYPE_CHECKING, NamedTuple

from mori import env
from mori.errors import ConfigMismatch, NotInitialized

from .heap import Heap

if TYPE_CHECKING:
    from mori.cco.communicator import Communicator

_HOW_TO_INIT = "call mori.shmem.shmem_torch_process_group_init or mori.shmem.shmem_init_attr"


class InitArguments(NamedTuple):
    """What an init call was made with: a second call with equal arguments has no effect, one with others is an error.

    `identity` tells groups apart: the 128 bytes of the unique id, or the global ranks of the process group.
    """

    rank: int
    nranks: int
    identity: bytes | tuple[int, ...]

    def __str__(self) -> str:
        if isinstance(self.identity, bytes):
            # The id holds a secret; a hash is enough to tell two apart.
            how = f"unique id #{hashlib.sha256(self.identity).hexdigest()[:8]}"
        else:
            how = f"the process group of ranks {list(self.identity)}"
        return f"rank {self.rank} of {self.nranks} with {how}"


class Session(NamedTuple):
    """From one init to the next finalize."""

    arguments: InitArguments
    communicator: Communicator
    heap: Heap


class _Process:
    session: Session | None = None
    was_finalized = False
    # In a forked child: the parent's. Kept, so that nothing of it is torn down here (its threads exist there only).
    inherited: list[Session]

    def __init__(self) -> None:
        self.inherited = []


_process = _Process()


def current() -> Session:
    """The live session. NotInitialized, naming the functions to call, before init, after finalize and after a fork."""
    session = _process.session
    if session is not None:
        return session
    if _process.inherited:
        raise NotInitialized(
            f"this process was forked from one with mori.shmem initialised and has no part in it: {_HOW_TO_INIT}, "
            "or start rank processes with the spawn method"
        )
    if _process.was_finalized:
        raise NotInitialized(f"mori.shmem was finalised in this process: to use it again, {_HOW_TO_INIT} on all ranks")
    raise NotInitialized(f"mori.shmem is not initialised in this process: {_HOW_TO_INIT} first")


def already_initialized(arguments: InitArguments) -> bool:
    """Whether init with these arguments is done already. RuntimeError if it was done with others."""
    if _process.session is None:
        return False
    made_with = _process.session.arguments
    if made_with != arguments:
        raise RuntimeError(
            f"mori.shmem is already initialised as {made_with}; it cannot also be {arguments}. "
            "Call shmem_finalize on all ranks first"
        )
    return True


def start(arguments: InitArguments, unique_id: bytes) -> None:
    """Collective: join the ranks that hold `unique_id` and reserve the heap (MORI_SHMEM_HEAP_SIZE, read here only)."""
    from mori.cco.communicator import Communicator
    from mori.cco.unique_id import UniqueId

    heap_bytes = int(env.get("MORI_SHMEM_HEAP_SIZE"))
    try:
        communicator = Communicator.init(
            arguments.nranks, arguments.rank, UniqueId.from_bytes(unique_id), per_rank_vmm=heap_bytes
        )
    except ConfigMismatch as error:
        raise ConfigMismatch(f"{error} (per_rank_vmm is the value of MORI_SHMEM_HEAP_SIZE)") from None
    _process.session = Session(arguments, communicator, Heap(communicator))


def is_current(session: Session) -> bool:
    """Whether `session` is the live one of this very process."""
    return _process.session is session


def stop() -> None:
    """Collective, bounded: leave the communicator. Tensors over its memory stay valid until they die."""
    session, _process.session = _process.session, None
    if session is not None:
        _process.was_finalized = True
        session.communicator.destroy()


def _forget_in_child() -> None:
    session, _process.session = _process.session, None
    if session is not None:
        _process.inherited.append(session)


os.register_at_fork(after_in_child=_forget_in_child)
