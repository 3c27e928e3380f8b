"""Times of dispatch and combine at the example's shape, through the public API, beside a memcpy of the same bytes.

Zero copy: the "experts" write into the registered buffer, outside the measured time. Between the phases the ranks wait
for each other, so every time starts with all ranks ready; it ends when this rank has its rows. The memcpy runs in the
same processes at the same moment, so that it shares the cores in the same way.
"""

from __future__ import annotations

import ctypes
import json
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist

import mori
from mori.demo.adapt import EXPERTS_PER_RANK

ROUNDS = 10
WARM_UP_ROUNDS = 2


def measure(rank: int, world_size: int, input_data: torch.Tensor, indices: torch.Tensor, report: str) -> None:
    """Collective. Rank 0 writes one dictionary per rank, as JSON, to the file `report`."""
    tokens, hidden = input_data.shape
    config = mori.ops.EpDispatchCombineConfig(
        data_type=input_data.dtype,
        rank=rank,
        world_size=world_size,
        hidden_dim=hidden,
        scale_dim=0,
        scale_type_size=1,
        max_token_type_size=input_data.element_size(),
        max_num_inp_token_per_rank=tokens,
        num_experts_per_rank=EXPERTS_PER_RANK,
        num_experts_per_token=indices.size(1),
        use_external_inp_buf=False,
    )
    op = mori.ops.EpDispatchCombineOp(config)
    registered = op.get_registered_combine_input_buffer(input_data.dtype)
    weights = torch.rand(tokens, indices.size(1))

    dispatch_ms, combine_ms, copy_in_ms, copy_out_ms = [], [], [], []
    for _ in range(WARM_UP_ROUNDS + ROUNDS):
        milliseconds, (rows, row_weights, _, _, count) = timed(lambda: op.dispatch(input_data, weights, None, indices))
        dispatch_ms.append(milliseconds)
        received = int(count[0])
        registered[:received].copy_(rows[:received])
        milliseconds, _ = timed(lambda w=row_weights: op.combine(registered, w, indices))  # type: ignore[misc]
        combine_ms.append(milliseconds)

    sent = int((indices // EXPERTS_PER_RANK)[:, :, None].eq(torch.arange(world_size)).any(dim=1).sum())
    into, out_of = torch.ones(2, received, hidden, dtype=input_data.dtype)
    back, there = torch.ones(2, sent, hidden, dtype=input_data.dtype)
    for _ in range(WARM_UP_ROUNDS + ROUNDS):
        copy_in_ms.append(timed(lambda: copy(into, out_of))[0])
        copy_out_ms.append(timed(lambda: copy(back, there))[0])

    row_bytes = hidden * input_data.element_size()
    mine = {
        "rank": rank,
        "tokens_sent": tokens,
        "rows_received": received,
        "bytes_in": received * row_bytes,
        "bytes_out": sent * row_bytes,
        "dispatch_ms": median(dispatch_ms[WARM_UP_ROUNDS:]),
        "combine_ms": median(combine_ms[WARM_UP_ROUNDS:]),
        "copy_in_ms": median(copy_in_ms[WARM_UP_ROUNDS:]),
        "copy_out_ms": median(copy_out_ms[WARM_UP_ROUNDS:]),
    }
    everyone: list[dict[str, float]] | None = [{} for _ in range(world_size)] if rank == 0 else None
    dist.gather_object(mine, everyone)
    if everyone is not None:
        Path(report).write_text(json.dumps(everyone))


def copy(target: torch.Tensor, source: torch.Tensor) -> None:
    """memcpy of the whole source, which is contiguous."""
    ctypes.memmove(target.data_ptr(), source.data_ptr(), source.nbytes)


def timed(call: Callable[[], object]) -> tuple[float, tuple[torch.Tensor, ...]]:
    """Milliseconds of a call that all ranks start together, and its result."""
    mori.shmem.shmem_barrier_all()
    start = time.perf_counter()
    result = call()
    return (time.perf_counter() - start) * 1e3, result  # type: ignore[return-value]


def table(ranks: list[dict[str, float]]) -> str:
    """Lines for people. GB/s = bytes of the rows that reach this rank / time, for the call and for the memcpy."""
    lines = [
        f"median of {ROUNDS} rounds; zero copy; memcpy = the same bytes copied by all ranks at once",
        "rank  tokens   rows    MB     MB  dispatch        memcpy         combine        memcpy",
        "        sent  recvd    in    out      ms   GB/s      ms   GB/s      ms   GB/s      ms   GB/s",
    ]
    for r in ranks:
        cells = [
            f"{r[time_ms]:8.2f}{r[size] / r[time_ms] / 1e6:7.2f}"
            for time_ms, size in (
                ("dispatch_ms", "bytes_in"),
                ("copy_in_ms", "bytes_in"),
                ("combine_ms", "bytes_out"),
                ("copy_out_ms", "bytes_out"),
            )
        ]
        sizes = f"{r['bytes_in'] / 1e6:6.1f}{r['bytes_out'] / 1e6:7.1f}"
        lines.append(f"{r['rank']:4}{r['tokens_sent']:8}{r['rows_received']:7}{sizes}{''.join(cells)}")
    return "\n".join(lines)
