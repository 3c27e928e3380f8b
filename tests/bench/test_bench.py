"""The benchmark and its baseline on CPUs, with calls in place of graphs and made-up clocks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pytest
import torch

from benchmarks import bench_ep, records
from benchmarks.bench_ep import Bench, Options
from benchmarks.nccl_baseline import CALLS, Baseline
from benchmarks.workload import SCALED, Case
from tests.rank_worker import RankContext
from tests.ranks import pool

OPTIONS = {"tokens": (3, 8), "hidden": 256, "topk": 4, "experts": 6, "calls": 5, "link": False}
KNOWN = dict.fromkeys(("device", "driver", "cuda"), "made up") | {"clocks_mhz": {"sm": "1980"}}


class Replayed:
    """Stands in for a captured graph."""

    def __init__(self, calls: Iterable[Callable[[], None]]) -> None:
        self.calls = list(calls)

    def replay(self) -> None:
        for call in self.calls:
            call()


def made_up_wall(work: Mapping[str, Callable[[], None]], align: Callable[[], None], repetitions: int) -> dict:
    """Runs everything once; a dispatch takes 10 us, a pair 17."""
    align()
    for enqueue in work.values():
        enqueue()
    each = {name: 10.0 if name == "dispatch" else 17.0 for name in work}
    return {name: [time * OPTIONS["calls"]] * repetitions for name, time in each.items()}


def made_up_host(calls: Mapping[str, Callable[[int], None]]) -> dict[str, list[float]]:
    for number in range(100):
        for call in calls.values():
            call(number)
    return {name: [8.0] * 10_000 for name in calls}


def bench(context: RankContext, dtypes: tuple[str, ...], sweep: bool, broken: bool) -> dict[str, Any]:
    options = Options(gpus=context.world_size, dtypes=dtypes, sweep=sweep, **OPTIONS)  # type: ignore[arg-type]
    found = Bench(context.rank, options, torch.device("cpu"))
    stand_ins = {"capture": Replayed, "wall_times_us": made_up_wall, "host_times_us": made_up_host}
    with pytest.MonkeyPatch.context() as patch:
        for name, stand_in in (stand_ins | {"SWEEP_BLOCKS": (8, 16), "SWEEP_WARPS": (4,)}).items():
            patch.setattr(bench_ep, name, stand_in)
        if broken:
            patch.setattr(found, "dispatches", lambda workload, grid: Replayed([lambda: workload.dispatch(0)]))
        return found.run()


def test_records_of_all_phases_obey_the_schema():
    first, second = pool(2).run(bench, ("bf16", "fp8"), False, False)
    assert len(first["records"]) == len(second["records"]) == 2 * (2 * 3 + 2)
    assert records.problems(first | {"conditions": first["conditions"] | KNOWN}) == []
    graph = [record for record in first["records"] if record["mode"] == "graph"]
    assert {(r["phase"], r["combine_input"], r["p50_us"]) for r in graph} == {
        ("dispatch", None, 10.0),
        ("combine", "zero_copy", 7.0),
        ("combine", "external", 7.0),
    }
    assert {(r["dtype"], r["scale_bytes"]) for r in graph if r["phase"] == "dispatch"} == {
        ("bfloat16", 0),
        ("float8_e4m3fn", 8),
    }
    host = [record for record in first["records"] if record["clock"] == "host_enqueue"]
    assert {(r["phase"], r["repetitions"], r["p50_us"], r["logical_gbps"]) for r in host} == {
        ("dispatch", 10_000, 8.0, None),
        ("combine", 10_000, 8.0, None),
    }
    for record in first["records"]:
        assert 0 < record["wire_bytes"] and 0 < record["logical_bytes"] and record["verified"]


def test_a_sweep_keeps_every_grid_it_tried():
    content, _ = pool(2).run(bench, ("bf16",), True, False)
    assert len(content["sweep"]) == 2 * 3 * 2
    assert {(point["block_num"], point["warp_per_block"]) for point in content["sweep"]} == {(8, 4), (16, 4)}
    swept = [record for record in content["records"] if record["mode"] == "graph"]
    assert all((r["block_num"], r["warp_per_block"], r["geometry_source"]) == (8, 4, "swept") for r in swept)


def test_wrong_results_end_the_benchmark():
    for outcome in pool(2).outcomes(bench, ("bf16",), False, True):
        assert "received" in (outcome.error or "") or "rows differ" in (outcome.error or "")


def baseline(context: RankContext, dtype: torch.dtype) -> bool:
    case = Case(context.world_size, 9, dtype, hidden=256, topk=4, experts=6)
    found = Baseline(context.rank, case, torch.device("cpu"))
    found.verify(CALLS - 1)
    found.answers += 1
    with pytest.raises(RuntimeError, match="sums by NCCL"):
        found.verify(CALLS - 1)
    return True


@pytest.mark.parametrize("dtype", [torch.bfloat16, SCALED], ids=["bf16", "fp8"])
def test_the_baseline_computes_the_same(dtype: torch.dtype):
    assert all(pool(2).run(baseline, dtype))
