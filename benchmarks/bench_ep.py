"""Times dispatch and combine on the GPUs of one host, verifies them in the same run, and writes records.

    python -m benchmarks.bench_ep --output benchmarks/results/NAME.json
    python -m benchmarks.bench_ep --tokens 128 --dtypes bf16 --sweep ...

The clock: CUDA graphs of 50 calls with fresh routing each, inputs in turn from several buffers, with weights, ids and,
for fp8, a float32 scale per 128 values. A graph of dispatches and graphs of dispatch+combine pairs, once zero copy and
once external, are replayed in turns; of each replay the slowest rank counts. Time of a dispatch = replay / 50; time of
a combine = (replay of pairs - replay of dispatches) / 50. Link limits are measured in the same run.
"""

from __future__ import annotations

import dataclasses
import json
import os
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer

from benchmarks import link_limit, records
from benchmarks.timing import barrier, capture, host_times_us, slowest, wall_times_us
from benchmarks.workload import AUTO, SCALED, Case, Grid, Workload, build_op

DTYPES = {"bf16": torch.bfloat16, "fp8": SCALED}
TOKENS = (1, 16, 64, 128, 256, 512, 1024, 4096)
COMBINES = {"zero_copy": False, "external": True}
SWEEP_BLOCKS = (8, 16, 32, 64, 96, 128, 132, 264)
SWEEP_WARPS = (4, 8, 16)
SWEEP_REPLAYS = 5
HOST_TOKENS = 16


@dataclasses.dataclass(frozen=True)
class Options:
    gpus: int
    tokens: tuple[int, ...] = TOKENS
    dtypes: tuple[str, ...] = tuple(DTYPES)
    hidden: int = 7168
    topk: int = 8
    experts: int = 256
    calls: int = 50
    replays: int = 20
    grid: Grid = AUTO
    sweep: bool = False
    host: bool = True
    link: bool = True

    def __post_init__(self) -> None:
        if unknown := set(self.dtypes) - set(DTYPES):
            raise ValueError(f"dtypes {sorted(unknown)} are unknown: expected {', '.join(DTYPES)}")
        if self.experts % self.gpus:
            raise ValueError(f"{self.experts} experts cannot be spread over {self.gpus} GPUs evenly")
        if self.topk > self.experts:
            raise ValueError(f"top-{self.topk} of {self.experts} experts: raise --experts or lower --topk")
        if min(self.tokens) < 1:
            raise ValueError(f"tokens {min(self.tokens)}: at least 1")
        if self.replays < 20:
            raise ValueError(f"{self.replays} replays: at least 20 are needed for percentiles")

    def case(self, tokens: int, dtype: str) -> Case:
        return Case(self.gpus, tokens, DTYPES[dtype], self.hidden, self.topk, self.experts)

    @property
    def geometry_source(self) -> str:
        return "swept" if self.sweep else "auto" if self.grid == AUTO else "given"


class Bench:
    """All measurements on one rank. Its collective parts run in the same order on all ranks."""

    def __init__(self, rank: int, options: Options, device: torch.device) -> None:
        self.rank, self.options, self.device = rank, options, device
        self.records: list[records.Record] = []
        self.sweep: list[dict[str, Any]] = []
        self.limits: dict[str, float] = {}
        self.shared = shared_fields(options.gpus)

    def run(self) -> dict[str, Any]:
        if self.options.link:
            self.limits = link_limit.measure(self.rank, self.options.gpus)
            self.say(f"link limits, GB/s per direction: {self.limits}")
        for dtype in self.options.dtypes:
            largest = max(self.options.tokens)
            op = build_op(self.rank, self.options.case(largest, dtype), largest)
            for tokens in self.options.tokens:
                self.measure(Workload(self.rank, self.options.case(tokens, dtype), op, self.device, self.options.calls))
            if self.options.host:
                few = min(HOST_TOKENS, largest)
                self.measure_host(Workload(self.rank, self.options.case(few, dtype), op, self.device, 100))
        content = records.document(self.records, link_limits_gbps=self.limits)
        return content | ({"sweep": self.sweep} if self.options.sweep else {})

    def measure(self, workload: Workload) -> None:
        """Dispatch, and both kinds of combine, in graphs."""
        grids = (
            self.swept(workload) if self.options.sweep else dict.fromkeys(("dispatch", *COMBINES), self.options.grid)
        )
        graphs = {"dispatch": self.dispatches(workload, grids["dispatch"])}
        for combine, external in COMBINES.items():
            graphs[combine] = self.pairs(workload, external, grids["dispatch"], grids[combine])
        times = self.times(workload, graphs, self.options.replays)
        self.verify(workload, graphs)
        self.add(workload, "dispatch", None, grids["dispatch"], times["dispatch"])
        for combine in COMBINES:
            differences = [pair - alone for pair, alone in zip(times[combine], times["dispatch"], strict=True)]
            self.add(workload, "combine", combine, grids[combine], differences)

    def dispatches(self, workload: Workload, grid: Grid) -> torch.cuda.CUDAGraph:
        return capture([lambda call=call: workload.dispatch(call, grid) for call in range(workload.calls)])

    def pairs(self, workload: Workload, external: bool, first: Grid, second: Grid) -> torch.cuda.CUDAGraph:
        calls: list[Callable[[], None]] = []
        for call in range(workload.calls):
            calls.append(lambda call=call: workload.dispatch(call, first))
            calls.append(lambda call=call: workload.combine(call, external, second))
        return capture(calls)

    def times(self, workload: Workload, graphs: dict[str, Any], repetitions: int) -> dict[str, list[float]]:
        """Microseconds per call (of a pair: per pair) by graph."""
        work = {name: graph.replay for name, graph in graphs.items()}
        whole = wall_times_us(work, lambda: workload.dispatch(0), repetitions)
        return {name: [each / workload.calls for each in times] for name, times in whole.items()}

    def verify(self, workload: Workload, graphs: dict[str, Any]) -> None:
        """The last call of each graph, bit for bit; RuntimeError otherwise, and then there is no record."""
        last = workload.calls - 1
        graphs["dispatch"].replay()
        workload.verify_dispatch(last)
        for combine in COMBINES:
            workload.results[0].fill_(float("nan"))
            graphs[combine].replay()
            workload.verify_dispatch(last)
            workload.verify_combine(last)
        workload.op.check()

    def swept(self, workload: Workload) -> dict[str, Grid]:
        """The grid with the smallest median for each phase; that of dispatch is kept while combine is swept."""
        best: dict[str, Grid] = {}
        for phase in ("dispatch", *COMBINES):
            found: list[tuple[float, Grid]] = []
            for grid in ((blocks, warps) for blocks in SWEEP_BLOCKS for warps in SWEEP_WARPS):
                if phase == "dispatch":
                    graph = self.dispatches(workload, grid)
                else:
                    graph = self.pairs(workload, COMBINES[phase], best["dispatch"], grid)
                median, _ = records.percentiles(self.times(workload, {phase: graph}, SWEEP_REPLAYS)[phase])
                found.append((median, grid))
                case = {"tokens": workload.case.tokens, "dtype": name_of(workload.case.dtype), "graph": phase}
                self.sweep.append(case | {"block_num": grid[0], "warp_per_block": grid[1], "p50_us": median})
            best[phase] = min(found)[1]
        return best

    def measure_host(self, workload: Workload) -> None:
        """Host time of eager calls."""
        calls = {
            "dispatch": lambda call: workload.dispatch(call, self.options.grid),
            "combine": lambda call: workload.combine(call, False, self.options.grid),
        }
        times = host_times_us(calls)
        workload.verify_dispatch(workload.calls - 1)
        workload.verify_combine(workload.calls - 1)
        for phase, own in times.items():
            p50, p95 = slowest(records.percentiles(own))
            combine = "zero_copy" if phase == "combine" else None
            self.append(workload, phase, combine, self.options.grid, p50, p95, len(own), host=True)

    def add(self, workload: Workload, phase: str, combine: str | None, grid: Grid, times_us: list[float]) -> None:
        p50, p95 = records.percentiles(times_us)
        self.append(workload, phase, combine, grid, p50, p95, len(times_us), host=False)

    def append(
        self,
        workload: Workload,
        phase: str,
        combine: str | None,
        grid: Grid,
        p50: float,
        p95: float,
        repetitions: int,
        *,
        host: bool,
    ) -> None:
        case = workload.case
        logical, wire = workload.data.busiest(phase, workload.calls, case.small_bytes(phase))
        launch = workload.op._cached_dispatch_launch if phase == "dispatch" else workload.op._cached_combine_launch
        used = (launch.block_num, launch.warp_per_block) if grid == AUTO else grid
        # Dispatch stores into the memory of peers, combine loads from it.
        kind = {"dispatch": "store", "combine": "load"}[phase] if self.limits and not host else None
        self.records.append(
            records.Record(
                **self.shared,
                tokens=case.tokens,
                hidden=case.hidden,
                topk=case.topk,
                experts=case.experts,
                phase=phase,
                dtype=name_of(case.dtype if phase == "dispatch" else torch.bfloat16),
                scale_bytes=case.scales * 4 if phase == "dispatch" else 0,
                combine_input=combine,
                block_num=used[0],
                warp_per_block=used[1],
                geometry_source=self.options.geometry_source,
                mode="eager" if host else "graph",
                clock="host_enqueue" if host else "wall",
                calls_per_repetition=1 if host else workload.calls,
                repetitions=repetitions,
                p50_us=p50,
                p95_us=p95,
                logical_bytes=logical,
                wire_bytes=wire,
                logical_gbps=None if host else records.gbps(logical, p50),
                wire_gbps=None if host else records.gbps(wire, p50),
                link_limit_gbps=self.limits.get(kind) if kind else None,
                link_limit_kind=kind,
                verified=True,
                note=f"pairs with dispatch of {name_of(case.dtype)}" if phase == "combine" else "",
            )
        )
        self.say(line(self.records[-1]))

    def say(self, text: str) -> None:
        if self.rank == 0:
            print(text, flush=True)


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def shared_fields(ep_size: int) -> dict[str, Any]:
    """What is equal in all records of a run."""
    found = records.conditions()
    return {
        "library": "mori",
        "library_version": found["mori"],
        "mori_version": found["mori"],
        "flydsl_version": found["flydsl"],
        "target": "cuda",
        "device": found["device"] or "unknown",
        "driver": found["driver"] or "unknown",
        "ep_size": ep_size,
        "quant": "none",
        "path": "direct",
        "device_p50_us": None,
    }


def line(record: records.Record) -> str:
    """One row of the table for people."""
    percent = ""
    if record.wire_gbps and record.link_limit_gbps:
        percent = f"{100 * record.wire_gbps / record.link_limit_gbps:5.0f} % of {record.link_limit_kind} limit"
    what = record.combine_input or ""
    return (
        f"{record.library} {record.tokens:5} tokens {record.dtype:14} {record.phase:8} {what:10} {record.mode} "
        f"{record.clock:12} {record.block_num}x{record.warp_per_block}: {record.p50_us:9.2f} us"
        f" (p95 {record.p95_us:.2f}) {record.logical_gbps or 0:7.1f} logical"
        f" {record.wire_gbps or 0:7.1f} wire GB/s{percent}"
    )


def run_rank(rank: int, options: Options, rendezvous: str, written: str) -> None:
    import mori

    torch.cuda.set_device(rank)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{rendezvous}",
        rank=rank,
        world_size=options.gpus,
        timeout=timedelta(seconds=120),
    )
    torch._C._distributed_c10d._register_process_group("default", dist.group.WORLD)
    mori.shmem.shmem_torch_process_group_init("default")
    content = Bench(rank, options, torch.device("cuda", rank)).run()
    if rank == 0:
        Path(written).write_text(json.dumps(content))
    barrier()
    mori.shmem.shmem_finalize()
    dist.destroy_process_group()


def spawn(function: Callable[..., None], options: Any, gpus: int) -> dict[str, Any]:
    """What rank 0 of `function(rank, options, rendezvous, written)` wrote."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with tempfile.TemporaryDirectory() as folder:
        written = Path(folder) / "content.json"
        torch.multiprocessing.spawn(function, (options, f"{folder}/rendezvous", str(written)), nprocs=gpus)
        return json.loads(written.read_text())


def numbers(text: str) -> tuple[int, ...]:
    """ "1,16,128" as numbers; ValueError for anything else."""
    return tuple(int(part) for part in text.split(","))


def main(
    output: Annotated[Path, typer.Option(help="JSON file of the records")],
    gpus: Annotated[int, typer.Option(help="ranks, one per GPU; 0: all GPUs")] = 0,
    tokens: Annotated[str, typer.Option(help="tokens per rank, with commas")] = ",".join(map(str, TOKENS)),
    dtypes: Annotated[str, typer.Option(help="bf16, fp8 or both with a comma: rows of dispatch")] = ",".join(DTYPES),
    hidden: int = 7168,
    topk: int = 8,
    experts: int = 256,
    calls: Annotated[int, typer.Option(help="calls in a graph")] = 50,
    replays: Annotated[int, typer.Option(help="timed replays of each graph")] = 20,
    blocks: Annotated[int, typer.Option(help="blocks of every launch; 0: the library decides")] = 0,
    warps: Annotated[int, typer.Option(help="warps per block; 0: the library decides")] = 0,
    sweep: Annotated[bool, typer.Option(help="try many grids and measure with the best of each phase")] = False,
    host: Annotated[bool, typer.Option(help="also host time of eager calls")] = True,
    link: Annotated[bool, typer.Option(help="also the limits of the link")] = True,
) -> None:
    """Time dispatch and combine, verify them, and write records."""
    if (blocks > 0) != (warps > 0):
        raise typer.BadParameter(f"--blocks {blocks} and --warps {warps} come together")
    if sweep and blocks:
        raise typer.BadParameter("--sweep tries grids of its own: leave out --blocks and --warps")
    try:
        options = Options(
            gpus=gpus or torch.cuda.device_count() or 1,
            tokens=numbers(tokens),
            dtypes=tuple(dtypes.split(",")),
            hidden=hidden,
            topk=topk,
            experts=experts,
            calls=calls,
            replays=replays,
            grid=(blocks, warps) if blocks else AUTO,
            sweep=sweep,
            host=host,
            link=link,
        )
    except ValueError as problem:
        raise typer.BadParameter(str(problem)) from None
    os.environ["MORI_EP_LAUNCH_CONFIG_MODE"] = "AUTO" if options.geometry_source == "auto" else "MANUAL"
    os.environ.setdefault("MORI_TARGET", "cuda")
    os.environ.setdefault("MORI_SHMEM_HEAP_SIZE", "8G")
    os.environ.setdefault("MORI_TIMEOUT_S", "60")
    content = spawn(run_rank, options, options.gpus)
    found = records.problems(content)
    records.write(output, content)
    if found:
        print("\n".join(found[:20]))
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
