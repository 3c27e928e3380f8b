"""Times of dispatch and combine at the example's shape, through the public API, beside a memcpy of the same bytes.

Zero copy: the "experts" write into the registered buffer, outside the measured time. A measured call starts when all
ranks are ready, and of each round the slowest rank counts: with more ranks than cores only this says how long the work
takes, for the library and for memcpy alike. The memcpy runs in the same processes, all of them at once.
"""

from __future__ import annotations

import ctypes
import json
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

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

    sent = int((indices // EXPERTS_PER_RANK)[:, :, None].eq(torch.arange(world_size)).any(dim=1).sum())
    target, source = torch.ones(2, world_size * tokens, hidden, dtype=input_data.dtype)
    times_ms = []
    for _ in range(WARM_UP_ROUNDS + ROUNDS):
        dispatch_ms, (rows, row_weights, _, _, count) = timed(op.dispatch, input_data, weights, None, indices)
        received = int(count[0])
        copy_in_ms, _ = timed(copy, target, source, rows[:received].nbytes)
        registered[:received].copy_(rows[:received])
        combine_ms, _ = timed(op.combine, registered, row_weights, indices)
        copy_out_ms, _ = timed(copy, target, source, rows[:sent].nbytes)
        times_ms.append([dispatch_ms, combine_ms, copy_in_ms, copy_out_ms])
    slowest_ms = torch.tensor(times_ms[WARM_UP_ROUNDS:], dtype=torch.float64)
    dist.all_reduce(slowest_ms, op=dist.ReduceOp.MAX)
    dispatch_ms, combine_ms, copy_in_ms, copy_out_ms = (median(column) for column in slowest_ms.T.tolist())

    row_bytes = hidden * input_data.element_size()
    mine = {
        "rank": rank,
        "tokens_sent": tokens,
        "rows_received": received,
        "bytes_in": received * row_bytes,
        "bytes_out": sent * row_bytes,
        "dispatch_ms": dispatch_ms,
        "combine_ms": combine_ms,
        "copy_in_ms": copy_in_ms,
        "copy_out_ms": copy_out_ms,
    }
    everyone: list[dict[str, float]] | None = [{} for _ in range(world_size)] if rank == 0 else None
    dist.gather_object(mine, everyone)
    if everyone is not None:
        Path(report).write_text(json.dumps(everyone))


def timed(call: Callable[..., Any], *arguments: Any, **options: Any) -> tuple[float, Any]:
    """Milliseconds of a call that starts when all ranks are ready, and its result."""
    mori.shmem.shmem_barrier_all()
    start = time.perf_counter()
    result = call(*arguments, **options)
    return (time.perf_counter() - start) * 1e3, result


def copy(target: torch.Tensor, source: torch.Tensor, size_bytes: int) -> None:
    ctypes.memmove(target.data_ptr(), source.data_ptr(), size_bytes)


def table(ranks: list[dict[str, float]]) -> str:
    """Lines for people. GB/s = bytes of the rows that reach this rank in the phase / ms."""
    lines = [
        f"ms: slowest rank, median of {ROUNDS} rounds, zero copy; memcpy: the same bytes, all ranks at once",
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
