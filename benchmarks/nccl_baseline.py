"""What a user would write without a library for it: index operations and NCCL's all-to-all, on the same data.

    python -m benchmarks.nccl_baseline --output benchmarks/results/NAME.json

Two ways: counts exchanged in each call, which waits for the device, as a real program must; and counts known before,
which no real program has: what remains are gathering, NCCL and adding up. Eager calls, verified in the same run.
"""

from __future__ import annotations

import json
import os
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer

from benchmarks import records
from benchmarks.bench_ep import DTYPES, TOKENS, Options, line, name_of, numbers, shared_fields, spawn
from benchmarks.expected import Routing, as_bytes, require_equal
from benchmarks.timing import barrier, wall_times_us
from benchmarks.workload import Case, Data

CALLS = 10


class Plan:
    """Which tokens go where, and how many come: from counts that the ranks exchange."""

    def __init__(self, ids: torch.Tensor, case: Case) -> None:
        ranks = torch.arange(case.ep_size, device=ids.device)
        hits = (ids[:, :, None] // case.experts_per_rank == ranks).any(dim=1)
        sent = hits.sum(dim=0)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent)
        self.tokens = hits.t().nonzero()[:, 1]
        """Tokens to send, ordered by destination."""
        self.sent, self.received = sent.tolist(), received.tolist()


class Baseline:
    """Dispatch and combine of one rank."""

    def __init__(self, rank: int, case: Case, device: torch.device) -> None:
        self.rank, self.case = rank, case
        data = Data(case, device)
        self.data = data
        self.rows, self.weights, self.scales = data.rows(rank, 0), data.weights(rank, 0), data.scales(rank, 0)
        self.ids = [data.ids(rank, call) for call in range(CALLS)]
        self.answers = data.answers(rank)
        self.known: list[Plan] = []

    def plan(self, call: int, known: bool) -> Plan:
        return self.known[call] if known else Plan(self.ids[call], self.case)

    def exchange(self, table: torch.Tensor, plan: Plan, back: bool = False) -> torch.Tensor:
        """Rows as bytes to their destinations, or back to where they came from."""
        give, take = (plan.received, plan.sent) if back else (plan.sent, plan.received)
        rows = as_bytes(table if back else table[plan.tokens])
        out = torch.empty(sum(take), rows.shape[1], dtype=torch.uint8, device=rows.device)
        dist.all_to_all_single(out, rows, take, give)
        return out

    def dispatch(self, plan: Plan, call: int) -> list[torch.Tensor]:
        small = [as_bytes(self.weights), as_bytes(self.ids[call])]
        if self.scales is not None:
            small.append(as_bytes(self.scales))
        rows = as_bytes(self.rows)
        return [self.exchange(rows, plan), self.exchange(torch.cat(small, dim=1), plan)]

    def combine(self, plan: Plan) -> torch.Tensor:
        """float32 sums, rank after rank, rounded once."""
        total = sum(plan.received)
        returned = self.exchange(self.answers[:total], plan, back=True).view(torch.bfloat16)
        summed = torch.zeros(self.case.tokens, self.case.hidden, dtype=torch.float32, device=returned.device)
        for tokens, rows in zip(plan.tokens.split(plan.sent), returned.split(plan.sent), strict=True):
            summed.index_add_(0, tokens, rows.float())
        return summed.bfloat16()

    def verify(self, call: int) -> None:
        routing = Routing([self.data.ids(peer, call) for peer in range(self.case.ep_size)], self.case.experts_per_rank)
        plan = self.plan(call, known=False)
        rows, _ = self.dispatch(plan, call)
        sent = [self.data.rows(peer, 0) for peer in range(self.case.ep_size)]
        require_equal(f"rank {self.rank}: rows by NCCL", rows, routing.gather(self.rank, sent))
        combined = self.combine(plan)
        expected = routing.combine(self.rank, [self.data.answers(peer) for peer in range(self.case.ep_size)])
        if self.case.ep_size <= 2:
            require_equal(f"rank {self.rank}: sums by NCCL", combined, expected)
        else:  # adds in another order
            torch.testing.assert_close(combined, expected, rtol=2e-2, atol=2e-2)

    def times(self, known: bool, replays: int) -> dict[str, list[float]]:
        """Microseconds per call: of a dispatch, and of a dispatch with its combine."""
        if known and not self.known:
            self.known = [Plan(ids, self.case) for ids in self.ids]

        def dispatches() -> None:
            for call in range(CALLS):
                self.dispatch(self.plan(call, known), call)

        def pairs() -> None:
            for call in range(CALLS):
                plan = self.plan(call, known)
                self.dispatch(plan, call)
                self.combine(plan)

        align = torch.zeros(1, device=self.rows.device)
        whole = wall_times_us({"dispatch": dispatches, "pair": pairs}, lambda: dist.all_reduce(align), replays)
        return {name: [each / CALLS for each in times] for name, times in whole.items()}


def measure(rank: int, options: Options) -> list[records.Record]:
    found = []
    shared = shared_fields(options.gpus) | {
        "library": "nccl",
        "library_version": records.conditions()["nccl"],
        "path": "all_to_all",
    }
    for dtype in options.dtypes:
        for tokens in options.tokens:
            case = options.case(tokens, dtype)
            baseline = Baseline(rank, case, torch.device("cuda", rank))
            baseline.verify(CALLS - 1)
            for known in (False, True):
                times = baseline.times(known, options.replays)
                combine = [pair - alone for pair, alone in zip(times["pair"], times["dispatch"], strict=True)]
                for phase, values in (("dispatch", times["dispatch"]), ("combine", combine)):
                    found.append(_record(shared, baseline, phase, known, values))
                    if rank == 0:
                        print(line(found[-1]), found[-1].note, flush=True)
    return found


def _record(
    shared: dict[str, Any], baseline: Baseline, phase: str, known: bool, times_us: list[float]
) -> records.Record:
    case = baseline.case
    p50, p95 = records.percentiles(times_us)
    small_bytes = case.topk * 8 + case.scales * 4 if phase == "dispatch" else 0
    logical, wire = baseline.data.busiest(phase, CALLS, small_bytes)
    return records.Record(
        **shared,
        tokens=case.tokens,
        hidden=case.hidden,
        topk=case.topk,
        experts=case.experts,
        phase=phase,
        dtype=name_of(case.dtype if phase == "dispatch" else torch.bfloat16),
        scale_bytes=case.scales * 4 if phase == "dispatch" else 0,
        combine_input="staged" if phase == "combine" else None,
        block_num=None,
        warp_per_block=None,
        geometry_source="library",
        mode="eager",
        clock="wall",
        calls_per_repetition=CALLS,
        repetitions=len(times_us),
        p50_us=p50,
        p95_us=p95,
        logical_bytes=logical,
        wire_bytes=wire,
        logical_gbps=records.gbps(logical, p50),
        wire_gbps=records.gbps(wire, p50),
        link_limit_gbps=None,
        link_limit_kind=None,
        verified=True,
        note="counts known before" if known else "counts exchanged in each call",
    )


def run_rank(rank: int, options: Options, rendezvous: str, written: str) -> None:
    torch.cuda.set_device(rank)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl",
        init_method=f"file://{rendezvous}",
        rank=rank,
        world_size=options.gpus,
        timeout=timedelta(seconds=120),
        device_id=torch.device("cuda", rank),
    )
    found = measure(rank, options)
    if rank == 0:
        Path(written).write_text(json.dumps(records.document(found)))
    barrier()
    dist.destroy_process_group()


def main(
    output: Annotated[Path, typer.Option(help="JSON file of the records")],
    gpus: Annotated[int, typer.Option(help="ranks, one per GPU; 0: all GPUs")] = 0,
    tokens: Annotated[str, typer.Option(help="tokens per rank, with commas")] = ",".join(map(str, TOKENS)),
    dtypes: Annotated[str, typer.Option(help="bf16, fp8 or both with a comma")] = ",".join(DTYPES),
    replays: Annotated[int, typer.Option(help="timed repetitions of 10 calls each")] = 20,
) -> None:
    """Time index operations and NCCL's all-to-all, verify them, and write records."""
    try:
        options = Options(
            gpus=gpus or torch.cuda.device_count() or 1,
            tokens=numbers(tokens),
            dtypes=tuple(dtypes.split(",")),
            replays=replays,
        )
    except ValueError as problem:
        raise typer.BadParameter(str(problem)) from None
    # Multicast over NVLink can put GPUs that others share out of service.
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    content = spawn(run_rank, options, options.gpus)
    records.write(output, content)
    if found := records.problems(content):
        print("\n".join(found[:20]))
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
