"""The one engine behind both façades: layout of an op's memory, and plans that launch its kernels.

The engine checks nothing about tensors: façades have done so. It allocates nothing in symmetric memory: façades have
agreed on the memory and hand it in.
"""

from __future__ import annotations

import functools
import os
import warnings
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from mori import _core, env, target
from mori.cco.communicator import Communicator
from mori.cco.resources import AllocatedMemory
from mori.errors import CallFault, CallFaultWarning, MoriError, ReceiveOverflow, RowMismatch
from mori.tensor_utils import dtype_to_int

from . import device_code, streams
from .dtypes import DTYPE_SUFFIX

if TYPE_CHECKING:
    from collections.abc import Iterable

_SPIN_NS = 20_000
_RECEIVE_OVERFLOW = 1  # csrc/layout/ep_layout.hpp
_CAPTURED, _CALL_FAULT, _ABORTED, _BUSY, _OVERLAP = (
    -2,
    1,
    2,
    3,
    4,
)  # csrc/ops/ep_plan.hpp; what is not positive is no failure

_STAGED_TOKENS = {"direct": -1, "auto": 32, "staged": 1 << 32}

# What a call names its kernel by; the table is csrc/kernels/table.hpp.
KERNELS: dict[str, int] = {name: number for number, name in enumerate(_core.KERNELS)}
CallExtras = _core.CallExtras
NO_EXTRAS = CallExtras()

dtype_code = functools.cache(dtype_to_int)


class DispatchWork(NamedTuple):
    """What a dispatch does, whatever the addresses. Sizes in bytes are those of one row."""

    kernel: int
    tokens: int
    row_bytes: int
    scale_bytes: int
    dtype: int


class CombineWork(NamedTuple):
    """What a combine does, whatever the addresses. `weight_rows` may be fewer or more than `input_rows`."""

    kernel: int
    input_rows: int
    weight_rows: int
    row_bytes: int
    dtype: int


@dataclass(frozen=True)
class EpShape:
    """Everything that shapes memory and wire. Equal on all ranks but for `rank`."""

    world_size: int
    rank: int
    max_tokens: int
    hidden_dim: int
    max_element_bytes: int
    scale_dim: int
    scale_element_bytes: int
    experts_per_rank: int
    topk: int
    max_recv_tokens: int
    may_stage: bool = False  # landing areas for the staged path, which calls that are split take
    block_scales: int = 0  # scales per row of a block-wise quantised combine
    slot_stride: int = 0  # flat indices of rows are rank * slot_stride + slot; 0: W*M
    source_stride: int = 0  # those of tokens are rank * source_stride + token; 0: W*M

    @property
    def native(self) -> _core.EpShape:
        return _core.EpShape(**asdict(self))


class Region(NamedTuple):
    """A part of an op's window: `bytes` bytes at `offset`, which is a multiple of `alignment`."""

    name: str
    offset: int
    bytes: int
    alignment: int


class Layout:
    """All regions of an op's window, in order, and the bytes that they take."""

    def __init__(self, regions: Iterable[Region], total_bytes: int) -> None:
        self.regions = tuple(regions)
        self.total_bytes = total_bytes
        self._by_name = {region.name: region for region in self.regions}

    def region(self, name: str) -> Region:
        """The region of that name; KeyError if there is none."""
        return self._by_name[name]


def layout(shape: EpShape) -> Layout:
    """Where everything an op of this shape owns lies in its window. Pure; the same on every rank."""
    regions, total_bytes = shape.native.regions()
    return Layout((Region(*region) for region in regions), total_bytes)


def compile_order(kernels: Iterable[str], rank: int) -> list[str]:
    """Ranks share a cache of compiled kernels, so each begins with another one and finds the rest done."""
    names = list(kernels)
    first = rank % len(names) if names else 0
    return names[first:] + names[:first]


class EpPlan:
    """A shape resolved to launches on one communicator and one block of memory. Construction is collective.

    `kernels`: names of those to have ready; any other one is compiled when a call first names it.

    On the host target a call is synchronous: when it returns, this rank's results are there. It raises PeerLost,
    PeerTimeout or OutOfStep when the communicator is lost, and a CallFault, equal on all ranks, when only the call is.
    On GPUs a call is enqueued on the current stream of the communicator's device. It raises what is known by then of
    the communicator; `check` waits and tells the rest.
    """

    def __init__(
        self, shape: EpShape, comm: Communicator, memory: AllocatedMemory, kernels: Iterable[str] = ()
    ) -> None:
        self._shape = shape
        self._comm = comm
        self._memory = memory
        self._regions = layout(shape)
        self._stream = streams.getter(comm.device)
        self._checks_itself = env.get("MORI_EP_SYNC_ERRORS")
        self._seen_fault = 0  # number of the last faulty call that somebody was told about
        self._unseen_fault = 0  # of one that the host has come to know of since, until it warns of it
        self._warned_fault = 0
        failure = None
        try:
            timeout_ns = round(1e9 * env.get("MORI_TIMEOUT_S"))
            self._native = _core.EpPlan(comm._native, memory.native, shape.native, _launcher(shape, comm), timeout_ns)
            self._loaded = set(KERNELS.values()) if self._native.synchronous else set()
            for name in compile_order(kernels, shape.rank):
                self._load(KERNELS[name])
            self._native.prepare()
        except Exception as error:
            failure = error
        # No peer stores a word before it is zeroed.
        answers = comm.allgather(failure and str(failure), "EP plan is prepared")
        if failure is not None:
            raise failure
        for rank, answer in enumerate(answers):
            if answer is not None:
                raise MoriError(f"rank {rank} could not prepare its kernels or memory: {answer}")
        self._synchronous = self._native.synchronous
        # Tokens of this rank's last dispatch; None before any, and on GPUs once a dispatch was captured: replays tell
        # the host nothing.
        self.dispatched_tokens: int | None = None
        self._captured = False

    def view(self, region: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A tensor over the first bytes of a region; it keeps the memory alive. ValueError if the region is smaller."""
        found = self._regions.region(region)
        needed = dtype.itemsize
        for extent in shape:
            needed *= extent
        if needed > found.bytes:
            raise ValueError(f"a view of {shape} {dtype} needs {needed} bytes, region {region} has {found.bytes}")
        return self._memory.view(found.offset, shape, dtype)

    def dispatch(
        self,
        work: DispatchWork,
        addresses: tuple[int, ...],
        *,
        extras: _core.CallExtras = NO_EXTRAS,
        block_num: int = 0,
        warp_per_block: int = 0,
    ) -> None:
        """Send every row once to each distinct rank among its experts. See the façades for the contract.

        `addresses`: of input, weights, scales and indices; 0 for none. `block_num` and `warp_per_block` bound GPU grids
        from above, 0 leaves the choice open; the host runs its own threads whatever they say.
        """
        if self._unseen_fault:
            self._warn()
        if work.kernel not in self._loaded:
            self._load(work.kernel)
        outcome = self._native.dispatch(*work, *addresses, extras, block_num, warp_per_block, self._stream())
        if outcome == _CAPTURED or self._captured:
            self._captured, self.dispatched_tokens = True, None
        elif outcome <= _CALL_FAULT:  # a faulty call was one all the same
            self.dispatched_tokens = work.tokens
        if outcome > 0:
            self._raise(outcome, "dispatch", "receive memory")
        if self._checks_itself:
            self._check_eager()

    def combine(
        self,
        work: CombineWork,
        addresses: tuple[int, ...],
        *,
        tokens: int,
        extras: _core.CallExtras = NO_EXTRAS,
        block_num: int = 0,
        warp_per_block: int = 0,
    ) -> None:
        """Return one row per received row to the token's owner, which adds them up. `tokens`: rows of the result.

        `addresses`: of input and weights. Input 0: the rows lie in region combine_in_rows already. Rows beyond those
        passed count as zeros.
        """
        if self._unseen_fault:
            self._warn()
        if work.kernel not in self._loaded:
            self._load(work.kernel)
        outcome = self._native.combine(*work, tokens, *addresses, extras, block_num, warp_per_block, self._stream())
        if outcome > 0:
            self._raise(outcome, "combine", "results")
        if self._checks_itself:
            self._check_eager()

    def receive(self) -> None:
        """The second half of the last call, which was split; on any stream that waits for the first half's."""
        outcome = self._native.receive(self._stream())
        if outcome > 0:
            self._raise(outcome)
        if self._checks_itself:
            self._check_eager()

    def convert(
        self, kernel: int, row_bytes: int, addresses: tuple[int, ...], block_num: int = 0, warp_per_block: int = 0
    ) -> None:
        """Between received rows and the places of their experts; on this rank alone.

        `addresses`: of rows and indices (only read by kernel `pack`), of packed rows and their sources.
        """
        if kernel not in self._loaded:
            self._load(kernel)
        outcome = self._native.convert(kernel, row_bytes, *addresses, block_num, warp_per_block, self._stream())
        if outcome > 0:
            self._raise(outcome)

    def _load(self, kernel: int) -> None:
        if kernel not in self._loaded:
            arch = target.current().arch
            with torch.cuda.device(self._comm.device):
                self._native.load(kernel, device_code.kernel(_core.KERNELS[kernel], self._shape, arch))
            self._loaded.add(kernel)

    @property
    def synchronous(self) -> bool:
        """Whether a call has ended when it returns, so that looking at its results costs no wait."""
        return self._synchronous

    @property
    def has_captured(self) -> bool:
        """Whether a dispatch was captured: the host does not know then which one came last."""
        return self._captured

    @property
    def capturing(self) -> bool:
        """Whether the current stream is being captured into a graph."""
        return bool(self._native.capturing(self._stream()))

    @property
    def received(self) -> int:
        """Rows that the last dispatch brought to this rank. Waits for the device."""
        self._refuse_capture("reading the number of received rows")
        self._native.synchronize()
        received, _, fault = self._native.state(self._stream())
        self._notice(fault)
        return int(received)

    def stats(self) -> dict[str, Any]:
        """Counts since construction or `reset_stats`: calls, rows to and from each rank, ids that named no expert.

        Waits for the device.
        """
        self._refuse_capture("reading statistics")
        self._native.synchronize()
        return dict(self._native.stats(self._shape.world_size, self._stream()))

    def reset_stats(self) -> None:
        """In the order of the current stream."""
        self._native.clear_stats(self._stream())

    def check(self) -> None:
        """Raise if the communicator is lost; on GPUs wait for the current stream and raise a call fault not yet seen.

        On the host target faults of single calls were raised by the calls themselves.
        """
        self._comm.raise_if_faulted()
        if self._synchronous:
            return
        self._refuse_capture("check()")
        _, _, fault = self._native.state(self._stream())
        self._comm.raise_if_faulted()
        if fault[1] > self._seen_fault:
            self._seen_fault, self._unseen_fault = fault[1], 0
            raise _call_fault(fault)

    def _check_eager(self) -> None:
        if not self._synchronous and not self.capturing:
            self.check()

    def _notice(self, fault: tuple[int, ...]) -> None:
        if not self._synchronous and fault[1] > max(self._seen_fault, self._warned_fault):
            self._unseen_fault = fault[1]

    def _warn(self) -> None:
        """Once per fault: whoever goes on without `check` works with zeros."""
        call, self._warned_fault, self._unseen_fault = self._unseen_fault, self._unseen_fault, 0
        warnings.warn(
            f"call {call} on this op failed and its results are zeros; nobody has asked why: op.check() after each "
            "step raises the cause, MORI_EP_SYNC_ERRORS=1 makes every call do so",
            CallFaultWarning,
            stacklevel=4,
        )

    def _refuse_capture(self, what: str) -> None:
        if not self._synchronous and self.capturing:
            raise RuntimeError(f"{what} waits for the device, which cannot be captured: do it after the graph's replay")

    def close(self) -> None:
        """Let go of the memory; later calls raise AttributeError. Views stay valid."""
        self.__dict__.pop("_native", None)

    @property
    def call_number(self) -> int:
        """Of the last call on this rank, dispatches and combines alike. Waits for the current stream."""
        self._refuse_capture("reading the call number")
        return int(self._native.state(self._stream())[1])

    def set_call_number(self, value: int) -> None:
        """On every rank, between two barriers: make `value` the number of the last call. It must not go back."""
        self._native.set_call_number(value)

    # Test hooks: see csrc/ops/ep_plan.hpp.

    def set_path(self, path: str) -> None:
        """How this rank's dispatches move rows: "direct", "staged", or "auto" (staged when tokens are few).

        Needs a shape that may stage; without one every dispatch is direct. Ranks may differ, and so may calls.
        """
        self._native.set_staged_tokens(_STAGED_TOKENS[path])

    def set_test_delays(self, seed: int, longest_us: int) -> None:
        """Make kernels pause at random places, up to `longest_us` microseconds each; 0 switches it off.

        On GPUs only in a process with ENABLE_PROFILER=1: other kernels hold no code for it.
        """
        if not self._synchronous and not device_code.is_traced():
            raise RuntimeError("kernels without ENABLE_PROFILER=1 cannot be delayed")
        self._native.set_test_delays(seed, longest_us)

    def _raise(self, outcome: int, call: str = "", memory: str = "") -> None:
        if outcome >= _OVERLAP:
            name = ("input", "weights", "scales", "indices")[outcome - _OVERLAP]
            raise ValueError(
                f"{call}: {name} overlaps the {memory} of this op, which this very call overwrites: "
                f"pass {name}.clone(), or a second op for the second hop"
            )
        if outcome == _ABORTED:
            self._comm.raise_if_faulted()
        if outcome == _BUSY:
            raise RuntimeError("another thread is inside a call on this op: one op, one call at a time")
        raise _call_fault(self._native.state(0)[2])


def _launcher(shape: EpShape, comm: Communicator) -> _core.Launcher:
    """How kernels are run on the device of the communicator."""
    if comm.target.is_device:
        return _core.Launcher.gpu(comm.target.name, comm.device.index, shape.native)
    threads = env.get("MORI_HOST_THREADS") or max(1, _cores() // shape.world_size)
    if threads > _core.MAX_BLOCKS:
        raise ValueError(f"MORI_HOST_THREADS={threads}: a rank has at most {_core.MAX_BLOCKS} threads; 0 chooses")
    oversubscribed = threads * shape.world_size > _cores()
    return _core.Launcher.host(env.get("MORI_HOST_ISA"), threads, 0 if oversubscribed else _SPIN_NS)


def _call_fault(fault: tuple[int, ...]) -> CallFault:
    kind, call, rank, expected, seen = fault
    if kind == _RECEIVE_OVERFLOW:
        return ReceiveOverflow(
            f"call {call}: rank {rank} would receive {seen} rows, its buffers hold {expected}. Raise "
            "max_total_recv_tokens (0 = no cap) or spread the routing"
        )
    return RowMismatch(
        f"call {call}: rank {rank} passed {_describe(seen)}, lower ranks {_describe(expected)}: "
        "dtype, row size, the presence of scales and the kind of call must be equal on all ranks"
    )


def _describe(header: int) -> str:
    """What a header word (csrc/layout/words.hpp) says of the rows."""
    names = {dtype_to_int(dtype): str(dtype).removeprefix("torch.") for dtype in DTYPE_SUFFIX}
    code = header >> 4 & 0xF
    rows = f"rows of {header >> 8 & 0xFFFFFF} bytes of {names.get(code, f'dtype {code}')}"
    if header >> 3 & 1:  # a combine
        return f"{rows}, quantised" if header & 4 else rows
    layout = ", for standard-MoE layouts" if header & 4 else ""
    return f"{rows} {'with' if header & 2 else 'without'} scales{layout}"


def _cores() -> int:
    return len(os.sched_getaffinity(0))
