"""Launch sizes tried one after the other for each phase; the best become a rule of a tuning file.

The numbers are those of the rank that gets least: on it the layer waits. Among candidates within a noise margin of the
best the one with the fewest warps wins.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from benchmarks.intra_node.session import Inputs, Session
from mori import env, target
from mori.ops.tuning_config import (
    TuningConfigManager,
    config_path_for,
    detect_gpu_model,
    dtype_to_config_str,
    kernel_type_to_config_str,
    quant_type_to_config_str,
)

if TYPE_CHECKING:
    from benchmarks.intra_node.clock import Clock

NOISE_GBPS = 1.0
WARPS = {"quick": (4, 8, 16), "full": (4, 6, 8, 12, 16)}
SMALLEST_BLOCKS = {"quick": 32, "full": 8}
BLOCKS_ON_CPUS = (1, 2)
PHASES = ("dispatch", "combine")


class Candidate(NamedTuple):
    block_num: int
    warp_per_block: int
    gbps: float
    """Of the slowest rank."""
    latency_us: float
    """Mean over the repetitions of the slowest rank."""


def block_candidates(scope: str) -> tuple[int, ...]:
    """Powers of two up to the number of multiprocessors, and that number."""
    if not target.current().is_device:
        return BLOCKS_ON_CPUS
    most = torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count
    powers = [SMALLEST_BLOCKS[scope] << shift for shift in range(10)]
    return (*(blocks for blocks in powers if blocks < most), most)


def choose(candidates: list[Candidate]) -> Candidate:
    best = max(candidate.gbps for candidate in candidates)
    near = [candidate for candidate in candidates if candidate.gbps >= best - NOISE_GBPS]
    return min(near, key=lambda each: (each.block_num * each.warp_per_block, -each.gbps))


def slowest(value: float, *, smallest: bool) -> float:
    found = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(found, op=dist.ReduceOp.MIN if smallest else dist.ReduceOp.MAX)
    return float(found)


def tune(session: Session, clock: Clock, say: Callable[[str], None]) -> list[dict[str, Any]]:
    """Dispatch first; combine is tuned beside the best dispatch. Saves with --save-tuning-config."""
    options = session.options
    scope = env.get("MORI_TUNING_SCOPE")
    inputs = session.inputs(0)
    session.round(inputs)
    grids: dict[str, dict[str, int]] = {}
    entries = []
    for phase in PHASES:
        tried = []
        for block_num in block_candidates(scope):
            for warps in WARPS[scope]:
                grid = {"block_num": block_num, "warp_per_block": warps}
                tried.append(measure(session, inputs, clock, phase, grids | {phase: grid}))
                say(f"{phase}: {tried[-1]}")
        best = choose(tried)
        grids[phase] = {"block_num": best.block_num, "warp_per_block": best.warp_per_block}
        say(f"{phase}: best of {len(tried)} is {best}")
        entries.append(entry(session, phase, best))
    session.round(inputs)
    if options.save_tuning_config and session.rank == 0:
        save(session, entries)
    return [{"phase": phase} | each for phase, each in zip(PHASES, entries, strict=True)]


def measure(session: Session, inputs: Inputs, clock: Clock, phase: str, grids: dict[str, dict[str, int]]) -> Candidate:
    times = clock.times_us(session, inputs, session.options, grids)[phase]
    mean_us = sum(times) / len(times)
    dtype = session.options.dispatched if phase == "dispatch" else session.options.combined
    own_gbps = inputs.received(session.rank) * session.options.row_bytes(dtype) / mean_us / 1e3
    gbps, latency_us = slowest(own_gbps, smallest=True), slowest(mean_us, smallest=False)
    return Candidate(**grids[phase], gbps=round(gbps, 2), latency_us=round(latency_us, 2))


def entry(session: Session, phase: str, best: Candidate) -> dict[str, Any]:
    """The rule, as tuning files hold it."""
    options = session.options
    dtype = options.dispatched if phase == "dispatch" else options.combined
    rule = {
        "dtype": dtype_to_config_str(dtype),
        "num_tokens": options.max_tokens,
        "hidden_dim": options.columns(dtype),
        "topk": options.num_experts_per_token,
        "block_num": best.block_num,
        "rdma_block_num": 0,
        "warp_per_block": best.warp_per_block,
        "bandwidth_gbps": best.gbps,
        "latency_us": best.latency_us,
    }
    if phase == "combine":
        rule |= {
            "zero_copy": bool(options.zero_copy),
            "quant_type": quant_type_to_config_str(options.quant_type),
        }
    return rule


def save(session: Session, entries: list[dict[str, Any]]) -> None:
    options = session.options
    kernel_type = kernel_type_to_config_str(options.kernel_type)
    arch, model = target.current().arch, detect_gpu_model()
    for phase, rule in zip(PHASES, entries, strict=True):
        path = config_path_for(arch, kernel_type, options.world_size, model, phase)
        if options.save_tuning_config != "auto":
            given = Path(options.save_tuning_config)
            path = given.with_name(f"{given.stem}_{phase}{given.suffix or '.json'}")
        metadata = {"gpu_arch": arch, "gpu_model": model, "kernel_type": kernel_type, "ep_size": options.world_size}
        TuningConfigManager.save_tuning_result(path, metadata | {"phase": phase}, rule, phase=phase)
