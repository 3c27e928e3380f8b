"""Dispatch and combine on the host target beside a memcpy of the same bytes, by the same threads at the same moment.

    python benchmarks/host_ep.py                    both cases, a JSON record for each in benchmarks/results/
    python benchmarks/host_ep.py --ranks 2          one of them

Every rank is a process with one thread. A round times, each after a barrier:
    dispatch             against memcpy of the rows received
    combine, zero copy   against memcpy of the rows returned
    combine, external    against the latter plus memcpy of the rows staged (as many as were received)
Of each round the slowest rank counts; percentiles are over rounds. Inputs rotate over several buffers, so that no cache
holds them. The results of the last round are verified bit for bit in the same run.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import quantiles
from typing import Any

import torch
import torch.distributed as dist

import mori
from mori.cli import info
from mori.demo.check import verify
from mori.demo.measure import copy, timed

BUFFERS = 3
PHASES = ("dispatch", "memcpy_received", "combine_zero_copy", "memcpy_returned", "combine_external")


@dataclass(frozen=True)
class Case:
    ranks: int
    tokens: int
    experts: int
    topk: int = 8
    hidden: int = 7168
    warm_up_rounds: int = 5
    rounds: int = 50

    @property
    def experts_per_rank(self) -> int:
        return self.experts // self.ranks

    @property
    def name(self) -> str:
        return f"host_ep_{self.ranks}x{self.tokens}"


CASES = (Case(ranks=2, tokens=1024, experts=16), Case(ranks=8, tokens=256, experts=256))


def run_rank(rank: int, case: Case, rendezvous: str, output: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=case.ranks)
    torch._C._distributed_c10d._register_process_group("default", dist.group.WORLD)
    mori.shmem.shmem_torch_process_group_init("default")
    times_ms, bytes_moved = measure(rank, case)
    dist.all_reduce(times_ms, op=dist.ReduceOp.MAX)
    dist.all_reduce(bytes_moved, op=dist.ReduceOp.MAX)
    if rank == 0:
        Path(output).write_text(json.dumps(record(case, bytes_moved.tolist(), times_ms)))
    mori.shmem.shmem_finalize()
    dist.destroy_process_group()


def build_op(rank: int, case: Case) -> mori.ops.EpDispatchCombineOp:
    config = mori.ops.EpDispatchCombineConfig(
        data_type=torch.bfloat16,
        rank=rank,
        world_size=case.ranks,
        hidden_dim=case.hidden,
        scale_dim=0,
        scale_type_size=1,
        max_token_type_size=2,
        max_num_inp_token_per_rank=case.tokens,
        num_experts_per_rank=case.experts_per_rank,
        num_experts_per_token=case.topk,
        use_external_inp_buf=False,
    )
    return mori.ops.EpDispatchCombineOp(config)


def measure(rank: int, case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """Milliseconds [rounds, phases] of this rank, and bytes of the rows it receives and of those it gets back."""
    op = build_op(rank, case)
    torch.manual_seed(rank)
    inputs = [torch.randn(case.tokens, case.hidden).bfloat16() for _ in range(BUFFERS)]
    weights = torch.rand(case.tokens, case.topk)
    # One routing for all rounds: with it all rounds move the same bytes.
    ids = torch.stack([torch.randperm(case.experts)[: case.topk] for _ in range(case.tokens)]).int()
    distinct_ranks = (ids // case.experts_per_rank)[:, :, None].eq(torch.arange(case.ranks)).any(dim=1)
    received = int(op.dispatch(inputs[0], weights, None, ids)[4][0])
    received_bytes, returned_bytes = (int(rows) * case.hidden * 2 for rows in (received, distinct_ranks.sum()))

    registered = op.get_registered_combine_input_buffer(torch.bfloat16)
    staged = [torch.zeros(received, case.hidden, dtype=torch.bfloat16) for _ in range(BUFFERS)]
    copies = [torch.ones(2, max(received_bytes, returned_bytes), dtype=torch.uint8) for _ in range(BUFFERS)]
    times_ms = []
    for number in range(case.warm_up_rounds + case.rounds):
        tokens, rows, (target, source) = (pool[number % BUFFERS] for pool in (inputs, staged, copies))
        dispatch_ms, (out, out_weights, _, _, count) = timed(op.dispatch, tokens, weights, None, ids)
        received_ms, _ = timed(copy, target, source, received_bytes)
        registered[:received].copy_(out[:received])
        zero_copy_ms, _ = timed(op.combine, registered, out_weights, ids)
        returned_ms, _ = timed(copy, target, source, returned_bytes)
        rows.copy_(out[:received])
        op.dispatch(tokens, weights, None, ids)
        external_ms, (combined, _) = timed(op.combine, rows, out_weights, ids, use_external_inp_buf=1)
        times_ms.append([dispatch_ms, received_ms, zero_copy_ms, returned_ms, external_ms])
    verify(rank, case.ranks, tokens, ids, out, count, combined, case.experts_per_rank)
    measured = torch.tensor(times_ms[case.warm_up_rounds :], dtype=torch.float64)
    return measured, torch.tensor([received_bytes, returned_bytes])


def record(case: Case, bytes_moved: list[int], times_ms: torch.Tensor) -> dict[str, Any]:
    percentiles = {}
    for phase, column in zip(PHASES, times_ms.T.tolist(), strict=True):
        cuts = quantiles(column, n=100, method="inclusive")
        percentiles[phase] = {"p50": round(cuts[49], 4), "p95": round(cuts[94], 4)}
    p50 = {phase: both["p50"] for phase, both in percentiles.items()}
    return {
        "case": asdict(case),
        "largest_bytes_of_a_rank": dict(zip(("received", "returned"), bytes_moved, strict=True)),
        "ms": percentiles,
        "times_memcpy": {
            "dispatch": round(p50["dispatch"] / p50["memcpy_received"], 3),
            "combine_zero_copy": round(p50["combine_zero_copy"] / p50["memcpy_returned"], 3),
            "combine_external": round(p50["combine_external"] / (p50["memcpy_returned"] + p50["memcpy_received"]), 3),
        },
        "verified": "rows and order of dispatch, sums of combine, bit for bit, last round",
        "conditions": conditions(),
    }


def conditions() -> dict[str, Any]:
    return {
        "date": time.strftime("%Y-%m-%d"),
        "cpu": info.cpu_model(),
        "machine": platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "host_kernels": info.simd_variant(),
        "threads_per_rank": int(os.environ["MORI_HOST_THREADS"]),
        "load_average_before": float(os.environ["HOST_EP_LOAD"]),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "mori": mori.__version__,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, choices=[case.ranks for case in CASES], help="only this case")
    parser.add_argument(
        "--output", type=Path, default=Path(__file__).with_name("results"), help="folder of the records"
    )
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    os.environ.update(MORI_TARGET="host", MORI_HOST_THREADS="1", OMP_NUM_THREADS="1")
    os.environ["HOST_EP_LOAD"] = str(os.getloadavg()[0])
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    for case in CASES:
        if arguments.ranks not in (None, case.ranks):
            continue
        file = arguments.output / f"{case.name}.json"
        with tempfile.TemporaryDirectory() as folder:
            written = Path(folder) / "record.json"
            torch.multiprocessing.spawn(run_rank, (case, f"{folder}/rendezvous", str(written)), nprocs=case.ranks)
            result = json.loads(written.read_text())
        file.write_text(json.dumps(result, indent=2) + "\n")
        print(f"{case.ranks} ranks x {case.tokens} tokens, 1 thread each, ms of the slowest rank (p50 / p95)")
        for phase, both in result["ms"].items():
            ratio = result["times_memcpy"].get(phase)
            print(
                f"  {phase:18} {both['p50']:8.3f} /{both['p95']:8.3f}" + (f"   {ratio:.2f} x memcpy" if ratio else "")
            )


if __name__ == "__main__":
    main()
