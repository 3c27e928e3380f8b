"""Communicators as functions, for programs that are written against such an interface: thin over `Communicator`.

Every failure is a RuntimeError "<function of the C interface> failed: -1", followed by what the high-level interface
says. The C functions that the messages name do not exist here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from mori.cco import external
from mori.cco.communicator import Communicator
from mori.cco.dev_comm import DevCommHandle
from mori.cco.requirements import (
    GDA_CONNECTION_CROSSNODE,
    GDA_CONNECTION_FULL,
    GDA_CONNECTION_NONE,
    GDA_CONNECTION_RAIL,
)
from mori.cco.requirements import CCODevCommRequirements as DevCommRequirements
from mori.cco.resources import CCOResource
from mori.cco.unique_id import UniqueId

__all__ = [
    "GDA_CONNECTION_CROSSNODE",
    "GDA_CONNECTION_FULL",
    "GDA_CONNECTION_NONE",
    "GDA_CONNECTION_RAIL",
    "Comm",
    "DevComm",
    "DevCommRequirements",
    "barrier_all",
    "comm_create",
    "comm_destroy",
    "dev_comm_create",
    "dev_comm_destroy",
    "mem_alloc",
    "mem_free",
    "mem_import",
    "window_deregister",
    "window_register",
    "window_register_external",
    "window_register_ptr",
]

Comm = Communicator
DevComm = DevCommHandle

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


def _named(function_of_c: str) -> Callable[[Callable[Parameters, Result]], Callable[Parameters, Result]]:
    def decorate(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
        @functools.wraps(function)
        def call(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
            try:
                return function(*args, **kwargs)
            except (RuntimeError, ValueError, TypeError) as error:
                raise RuntimeError(f"{function_of_c} failed: -1 ({error})") from error

        return call

    return decorate


def _find(comm: Comm, attribute: str, value: int) -> CCOResource:
    for resource in comm._resources:
        if value and getattr(resource, attribute, None) == value:
            return resource
    raise ValueError(f"{value:#x} is the {attribute} of nothing that is open on this communicator")


@_named("ccoCommCreate")
def comm_create(unique_id: UniqueId | bytes, nranks: int, rank: int, per_rank_vmm: int = 4 << 30) -> Comm:
    """Collective: see `Communicator.init`."""
    return Communicator.init(nranks, rank, unique_id, per_rank_vmm)


@_named("ccoCommDestroy")
def comm_destroy(comm: Comm | None) -> None:
    """See `Communicator.destroy`; None is nothing to destroy."""
    if comm is not None:
        comm.destroy()


@_named("ccoMemAlloc")
def mem_alloc(comm: Comm, size: int) -> int:
    """The address of `size` bytes of symmetric memory; 0 for no bytes. See `Communicator.alloc_mem`."""
    memory = comm.alloc_mem(size)
    if size == 0:
        memory.close()
        return 0
    return memory.ptr


@_named("ccoMemImport")
def mem_import(comm: Comm, ext_ptr: int, size: int) -> int:
    """The address of an alias of somebody else's memory, which `window_register_ptr` takes."""
    comm._check("mem_import")
    return external.import_memory(comm, ext_ptr, size, "mem_import", tracked=True).ptr


@_named("ccoMemFree")
def mem_free(comm: Comm, ptr: int) -> None:
    """Give back what `mem_alloc` or `mem_import` returned; after its windows."""
    _find(comm, "ptr", ptr).close()


@_named("ccoWindowRegister")
def window_register(comm: Comm, size: int) -> tuple[int, int]:
    """Collective: a window over new memory; its handle and this rank's address. Free the address after the window."""
    memory = comm.alloc_mem(size)
    try:
        return comm.register_window(memory.ptr, size).handle, memory.ptr
    except BaseException:
        memory.close()
        raise


@_named("ccoWindowRegister")
def window_register_ptr(comm: Comm, ptr: int, size: int) -> int:
    """Collective: the handle of a window over memory of `mem_alloc` or `mem_import`."""
    return comm.register_window(ptr, size).handle


@_named("ccoWindowRegister")
def window_register_external(comm: Comm, ext_ptr: int, size: int) -> tuple[int, int]:
    """Collective: a window over somebody else's memory; its handle and the address of the alias, which goes with it."""
    window = comm.register_external_window(ext_ptr, size)
    return window.handle, window.local_ptr


@_named("ccoWindowDeregister")
def window_deregister(comm: Comm, handle: int) -> None:
    """Close the window of this handle."""
    _find(comm, "handle", handle).close()


@_named("ccoDevCommCreate")
def dev_comm_create(comm: Comm, requirements: DevCommRequirements | None = None) -> DevComm:
    """Collective: see `Communicator.create_dev_comm`."""
    return comm.create_dev_comm(requirements)


@_named("ccoDevCommDestroy")
def dev_comm_destroy(comm: Comm, dev_comm: DevComm) -> None:
    """Close a device communicator."""
    comm._check("dev_comm_destroy")
    dev_comm.close()


@_named("ccoBarrierAll")
def barrier_all(comm: Comm) -> None:
    """Collective, on the host: see `Communicator.barrier`."""
    comm.barrier()
