"""What bench_dispatch_combine.py does for each of its commands, on every rank."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.intra_node import tuning
from benchmarks.intra_node.clock import Clock, clock_for
from benchmarks.intra_node.options import Options
from benchmarks.intra_node.session import Inputs, Session
from benchmarks.timing import capture
from mori import env

STRESS_ROUNDS_PER_ITERATION = 10
GRAPH_SIZES = (1, 2, 1 << 30)
"""Tokens per rank of the graphs of a stress run: one, two, all."""

Say = Callable[[str], None]


def gathered(value: Any, world_size: int) -> list[Any]:
    values = [None] * world_size
    dist.all_gather_object(values, value)
    return values


def bench(session: Session, clock: Clock, say: Say) -> list[dict[str, Any]]:
    """Verifies, times, and prints a table of every rank's latency and bandwidth."""
    options, rank = session.options, session.rank
    inputs = session.inputs(0)
    if options.report_scale_stats:
        for line in gathered(inputs.blocks_beyond_fp8(rank), options.world_size):
            say(line)
    if options.verify:
        session.round(inputs)
        say("verified: rows, weights, scales, ids and sums of one round")
    else:
        session.dispatch(inputs)
        session.answer()
    times = clock.times_us(session, inputs, options)
    found = []
    for phase, dtype in (("dispatch", options.dispatched), ("combine", options.combined)):
        rows = inputs.received(rank)
        remote = rows - int(inputs.routing.counts[rank, rank])
        mine = {
            "rank": rank,
            "us": times[phase],
            "rows": rows,
            "bytes": rows * options.row_bytes(dtype),
            "wire_bytes": remote * options.row_bytes(dtype),
        }
        found.append({"phase": phase} | summary(gathered(mine, options.world_size)))
        say(table(found[-1]))
    append_lines(session, found)
    return found


def summary(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """Per rank the best repetition; overall the repetition with the best mean of bandwidths over the ranks."""
    means = [
        sum(each["bytes"] / us / 1e3 for each, us in zip(ranks, repetition, strict=True)) / len(ranks)
        for repetition in zip(*(each["us"] for each in ranks), strict=True)
    ]
    best = means.index(max(means))
    for each in ranks:
        each["best_us"] = min(each["us"])
        each["gbps"] = each["bytes"] / each["best_us"] / 1e3
        each["wire_gbps"] = each["wire_bytes"] / each["best_us"] / 1e3
    return {
        "ranks": ranks,
        "latency_us": sum(each["us"][best] for each in ranks) / len(ranks),
        "algorithmic_gbps": means[best],
    }


def table(found: dict[str, Any]) -> str:
    """GB are 10^9 bytes; `wire` leaves out the rows that a rank sends to itself."""
    lines = [f"{found['phase']:9} {'rows':>7} {'us':>10} {'GB/s':>8} {'wire GB/s':>10}"]
    for each in found["ranks"]:
        lines.append(
            f"  rank {each['rank']:2} {each['rows']:7} {each['best_us']:10.1f} {each['gbps']:8.2f} "
            f"{each['wire_gbps']:10.2f}"
        )
    lines.append(f"  average {'':6} {found['latency_us']:10.1f} {found['algorithmic_gbps']:8.2f}")
    return "\n".join(lines)


def append_lines(session: Session, found: list[dict[str, Any]]) -> None:
    path = env.get("MORI_PERF_OUT")
    if path is None or session.rank:
        return
    with open(path, "a", encoding="utf-8") as file:
        for each in found:
            file.write(json.dumps({"options": vars(session.options)} | each) + "\n")


def stress(session: Session, clock: Clock, say: Say) -> list[dict[str, Any]]:
    """Rounds with other token counts each time, then replays of graphs of several sizes in turn; all are verified."""
    options = session.options
    generator = torch.Generator().manual_seed(7)
    rounds = options.iters * STRESS_ROUNDS_PER_ITERATION
    for number in range(rounds):
        counts = torch.randint(0, options.max_tokens + 1, (options.world_size,), generator=generator).tolist()
        session.round(session.inputs(number, counts))
    say(f"stress: {rounds} rounds of 0 to {options.max_tokens} tokens, every result as expected")
    replays = replay_graphs(session, generator, rounds) if clock.has_graphs else 0
    if replays:
        say(f"stress: {replays} replays of {len(GRAPH_SIZES)} graphs, every result as expected")
    return [{"phase": "stress", "rounds": rounds, "replays": replays}]


def replay_graphs(session: Session, generator: torch.Generator, replays: int) -> int:
    """Graphs of several batch sizes, with new data in place before each replay."""
    options, rank = session.options, session.rank
    kept: list[tuple[Any, Inputs, tuple, tuple]] = []
    for size in GRAPH_SIZES:
        inputs = session.inputs(size % 97, [min(size, options.max_tokens)] * options.world_size)
        session.round(inputs)
        calls = [
            lambda inputs=inputs: session.dispatch(inputs),
            session.answer,
            lambda inputs=inputs: session.combine(inputs),
        ]
        kept.append((capture(calls), inputs, session.views, session.result))
    for number in torch.randint(0, len(kept), (replays,), generator=generator).tolist():
        graph, inputs, session.views, session.result = kept[number]
        new = session.inputs(int(torch.randint(0, 10**6, (1,), generator=generator)), inputs.counts)
        for name in ("rows", "weights", "scales", "ids"):
            tables = getattr(inputs, name)
            as_raw(tables[rank]).copy_(as_raw(getattr(new, name)[rank]))
        graph.replay()
        session.verify_dispatch(new)
        session.verify_combine(new)
    return replays


def as_raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8) if tensor.numel() else tensor


COMMANDS: dict[str, Callable[[Session, Clock, Say], list[dict[str, Any]]]] = {
    "bench": bench,
    "stress": stress,
    "tuning": tuning.tune,
}


def execute(rank: int, options: Options, device: torch.device) -> list[dict[str, Any]]:
    """The command of the options. Collective, after mori.shmem was initialised."""
    session = Session(rank, options, device)
    say: Say = print if rank == 0 else lambda text: None
    return COMMANDS[options.cmd](session, clock_for(device), say)


def run_rank(rank: int, options: Options, rendezvous: str, written: str) -> None:
    """One rank process; rank 0 writes what `execute` returned to `written`."""
    import mori

    device = torch.device("cpu")
    if mori.target.current().is_device:
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=options.world_size)
    torch._C._distributed_c10d._register_process_group("default", dist.group.WORLD)
    mori.shmem.shmem_torch_process_group_init("default")
    found = execute(rank, options, device)
    if rank == 0:
        with open(written, "w", encoding="utf-8") as file:
            json.dump(found, file)
    dist.barrier()
    mori.shmem.shmem_finalize()
    dist.destroy_process_group()
