"""The programs that the guides name, on CPUs: flags, inputs, commands, and that wrong results end them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.intra_node import clock, commands, tuning
from benchmarks.intra_node.inputs import DISTRIBUTIONS, ROUTINGS
from benchmarks.intra_node.options import FLAGS, Options, parse
from benchmarks.intra_node.tuning import Candidate, choose
from tests.rank_worker import RankContext
from tests.ranks import pool

# As the guides document them: flag, default on GPUs.
DOCUMENTED = {
    "cmd": "bench",
    "world_size": 8,
    "max_tokens": 4096,
    "num_experts_per_rank": 32,
    "dtype": "bf16",
    "num_experts_per_token": 8,
    "combine_dtype": "",
    "max_recv_total_tokens": 0,
    "zero_copy": 1,
    "hidden_dim": 7168,
    "quant_type": "none",
    "scale_dim": 32,
    "kernel_type": "IntraNode",
    "local_expert_count": False,
    "dispatch_block_num": -1,
    "dispatch_warp_per_block": -1,
    "combine_block_num": -1,
    "combine_warp_per_block": -1,
    "save_tuning_config": "",
    "warmup": 1,
    "iters": 10,
    "graph_replay_iters": 10,
    "routing": "random",
    "input_dist": "normal",
    "input_scale": 1.0,
    "input_shift": 0.0,
    "force_scale_active": 0,
    "report_scale_stats": 0,
    "verify": 1,
}
SMALL = ["--max-tokens=7", "--hidden-dim=96", "--num-experts-per-rank=5", "--iters=2", "--graph-replay-iters=3"]


def test_flags_and_defaults_are_the_documented_ones():
    assert vars(parse([], on_cpus=False, gpus=8)) == DOCUMENTED
    on_cpus = parse([], on_cpus=True)
    assert (on_cpus.world_size, on_cpus.num_experts_per_rank) == (2, 128)
    assert on_cpus.max_tokens < 4096 and on_cpus.hidden_dim < 7168
    assert [flag.name.replace("-", "_") for flag in FLAGS] == [field.name for field in dataclasses.fields(Options)]


REFUSED = {
    "spread": ["--routing=spread", "--world-size=2"],
    "remote_round_robin": ["--routing=remote_round_robin", "--world-size=1"],
    "--zero-copy 0": ["--quant-type=fp8_direct_cast"],
    "--combine-dtype bf16": ["--quant-type=fp8_blockwise", "--zero-copy=0", "--dtype=fp8_e4m3"],
    "odd": ["--dtype=fp4", "--hidden-dim=7"],
    "more than the 2 experts": ["--num-experts-per-rank=1"],
    "--cmd tuning": ["--save-tuning-config=auto"],
    "kernel_profiler": ["--cmd=profile"],
    "invalid choice": ["--dtype=fp16"],
}


@pytest.mark.parametrize("says", REFUSED)
def test_what_does_not_fit_together_is_refused_in_words(says: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        parse(REFUSED[says], on_cpus=True)
    assert says in capsys.readouterr().err


@pytest.mark.parametrize("name", ROUTINGS)
def test_routings(name: str):
    world_size, per_rank, rank = 3, 4, 1
    topk = world_size if name == "spread" else 5
    ids = ROUTINGS[name](torch.Generator().manual_seed(0), rank, 50, topk, world_size, per_rank)
    assert tuple(ids.shape) == (50, topk) and 0 <= int(ids.min()) and int(ids.max()) < world_size * per_rank
    owners = ids // per_rank
    if name == "remote_round_robin":
        assert set(owners.flatten().tolist()) == {0, 2}
    elif name == "spread":
        assert all(sorted(row) == [0, 1, 2] for row in owners.tolist())
    elif name == "all_to_one":
        assert not ids.any()
    else:
        assert set(owners.flatten().tolist()) == {0, 1, 2}
        assert all(len(set(row)) == topk for row in ids.tolist())


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_distributions(name: str):
    values = DISTRIBUTIONS[name](torch.Generator().manual_seed(0), 100, 100)
    largest, smallest = float(values.max()), float(values.min())
    assert (smallest > 0) == (name == "lognormal")
    assert (largest > 50) == (name == "two_bucket") or name == "lognormal"
    assert (largest <= 1) == (name == "uniform")


def execute(context: RankContext, arguments: list[str]) -> list[dict[str, Any]]:
    return commands.execute(context.rank, parse(arguments, on_cpus=True), torch.device("cpu"))


VARIANTS: dict[str, list[str]] = {
    "bf16": [],
    "fp4, combined in bf16": ["--dtype=fp4", "--local-expert-count"],
    "fp8": ["--dtype=fp8_e4m3", "--zero-copy=0", "--scale-dim=0"],
    "direct cast": ["--quant-type=fp8_direct_cast", "--zero-copy=0", "--input-dist=uniform"],
    "scaled blocks": ["--quant-type=fp8_blockwise", "--zero-copy=0", "--force-scale-active=1"],
    "low latency": ["--kernel-type=IntraNodeLL", "--routing=round_robin"],
    "capped": ["--routing=spread", "--num-experts-per-token=2", "--max-recv-total-tokens=14"],
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_bench(variant: str, tmp_path: Path):
    """Every rank's rows, the best repetition of each, and the mean over the ranks of the best one overall."""
    file = tmp_path / "lines.json"
    first, second = pool(2, MORI_PERF_OUT=str(file)).run(execute, SMALL + VARIANTS[variant])
    assert first == second
    dispatch, combine = map(json.loads, file.read_text().splitlines())
    assert (dispatch["phase"], combine["phase"]) == ("dispatch", "combine")
    for found in first:
        assert [each["rank"] for each in found["ranks"]] == [0, 1]
        means = []
        for each in found["ranks"]:
            assert len(each["us"]) == 3 and each["best_us"] == min(each["us"]) > 0
            assert 0 < each["rows"] <= 14 and each["bytes"] >= each["rows"] * 48
            assert each["gbps"] == pytest.approx(each["bytes"] / each["best_us"] / 1e3)
            assert each["wire_bytes"] <= each["bytes"] - each["bytes"] // each["rows"] or each["rows"] <= 7
        for repetition in range(3):
            means.append(sum(each["bytes"] / each["us"][repetition] / 1e3 for each in found["ranks"]) / 2)
        assert found["algorithmic_gbps"] == pytest.approx(max(means))


def wrong_rows(context: RankContext) -> None:
    options = parse(SMALL, on_cpus=True)
    session = commands.Session(context.rank, options, torch.device("cpu"))
    inputs = session.inputs(0)
    session.round(inputs)
    session.result[0][3, 5] += 1
    with pytest.raises(RuntimeError, match="combined rows: 1 of .* row 3 column 5"):
        session.verify_combine(inputs)
    session.views[0][2, 1] += 1
    with pytest.raises(RuntimeError, match="rows: 1 of .* rows differ, the first is row 2"):
        session.verify_dispatch(inputs)


def test_wrong_results_end_the_program():
    pool(2).run(wrong_rows)


def test_stress():
    for [found] in pool(2).run(execute, [*SMALL, "--cmd=stress", "--dtype=fp8_e4m3", "--combine-dtype=bf16"]):
        assert found == {"phase": "stress", "rounds": 20, "replays": 0}


class Replayed:
    """Stands in for a captured graph."""

    def __init__(self, calls: list[Callable[[], None]]) -> None:
        self.calls = calls

    def replay(self) -> None:
        for call in self.calls:
            call()


def made_up_times(work: dict[str, Callable[[], None]], align: Callable[[], None], *_: int) -> dict[str, list[float]]:
    """A dispatch takes 10 us, a pair 17; there are two calls in a graph."""
    align()
    for enqueue in work.values():
        enqueue()
    return {"dispatch": [20.0, 20.0], "pair": [34.0, 36.0]}


def as_on_gpus(context: RankContext, command: str) -> Any:
    session = commands.Session(context.rank, parse(SMALL, on_cpus=True), torch.device("cpu"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(clock, "capture", Replayed)
        patch.setattr(commands, "capture", Replayed)
        patch.setattr(clock, "own_wall_times_us", made_up_times)
        return commands.COMMANDS[command](session, clock.GpuClock(), lambda text: None)


def test_graphs_are_timed_apart():
    for dispatch, combine in pool(2).run(as_on_gpus, "bench"):
        assert [each["us"] for each in dispatch["ranks"]] == [[10.0, 10.0]] * 2
        assert [each["us"] for each in combine["ranks"]] == [[7.0, 8.0]] * 2


def test_graphs_of_several_sizes_are_replayed_with_new_data():
    assert pool(2).run(as_on_gpus, "stress") == [[{"phase": "stress", "rounds": 20, "replays": 20}]] * 2


def test_tuning_saves_what_auto_mode_reads(tmp_path: Path):
    arguments = [*SMALL, "--cmd=tuning", f"--save-tuning-config={tmp_path / 'rules.json'}"]
    first, second = pool(2, MORI_TUNING_SCOPE="quick").run(execute, arguments)
    assert first == second
    for phase, found in zip(tuning.PHASES, first, strict=True):
        [rule] = json.loads((tmp_path / f"rules_{phase}.json").read_text())["rules"]
        assert rule == {name: value for name, value in found.items() if name != "phase"}
        assert (rule["dtype"], rule["num_tokens"], rule["hidden_dim"]) == ("bf16", 7, 96)
        assert rule["block_num"] in tuning.BLOCKS_ON_CPUS and rule["warp_per_block"] in tuning.WARPS["quick"]


def test_the_smallest_candidate_within_the_noise_wins():
    candidates = [Candidate(64, 16, 100.0, 1.0), Candidate(32, 8, 99.2, 1.0), Candidate(8, 4, 98.9, 1.0)]
    assert choose(candidates) == candidates[1]
    assert choose(candidates[:1]) == candidates[0]
