"""The options of bench_dispatch_combine.py as one table, and what they mean for tensors."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from benchmarks.intra_node.inputs import DISTRIBUTIONS, ROUTINGS
from mori.ops.tuning_config import CONFIG_STR_TO_DTYPE as DTYPES

COMMANDS = ("bench", "stress", "tuning", "profile")
QUANT_TYPES = ("none", "fp8_direct_cast", "fp8_blockwise")
GRID_FLAGS = ("block_num", "warp_per_block")
SCALE_BYTES = 4
AUTO = -1


class Flag(NamedTuple):
    name: str
    default: Any
    meaning: str
    choices: tuple[str, ...] = ()
    on_cpus: Any = None
    """Default there, if it is another one."""


FLAGS = (
    Flag("cmd", "bench", "what to do", COMMANDS),
    Flag("world-size", 8, "ranks; on GPUs one for each, at most as many as there are", on_cpus=2),
    Flag("max-tokens", 4096, "tokens per rank", on_cpus=64),
    Flag("num-experts-per-rank", 0, "0: 256 spread over the ranks"),
    Flag("num-experts-per-token", 8, "top-k"),
    Flag("dtype", "bf16", "rows of dispatch", tuple(DTYPES)),
    Flag("combine-dtype", "", "rows of combine; default: those of dispatch, bf16 for fp4", ("", *DTYPES)),
    Flag("max-recv-total-tokens", 0, "receive cap; 0: none"),
    Flag("zero-copy", 1, "1: combine reads the registered buffer; 0: a tensor"),
    Flag("hidden-dim", 7168, "logical hidden size; fp4 rows have half as many elements", on_cpus=1024),
    Flag("quant-type", "none", "how combine packs rows for the wire", QUANT_TYPES),
    Flag("scale-dim", 32, "float32 scales per row of dispatch; 0: none"),
    Flag("kernel-type", "IntraNode", "kernel type", ("IntraNode", "IntraNodeLL")),
    Flag("local-expert-count", False, "count local experts in every dispatch"),
    *(Flag(f"{phase}-{part}".replace("_", "-"), AUTO, f"{part} of {phase}; -1: the library decides")
      for phase in ("dispatch", "combine") for part in GRID_FLAGS),
    Flag("save-tuning-config", "", "tuning: X.json becomes X_dispatch.json, X_combine.json; auto: where AUTO looks"),
    Flag("warmup", 1, "rounds before the clock starts"),
    Flag("iters", 10, "calls in a graph; on CPUs calls per repetition", on_cpus=3),
    Flag("graph-replay-iters", 10, "timed repetitions"),
    Flag("routing", "random", "which experts tokens go to", tuple(ROUTINGS)),
    Flag("input-dist", "normal", "distribution of the rows' values", tuple(DISTRIBUTIONS)),
    Flag("input-scale", 1.0, "rows are multiplied by it"),
    Flag("input-shift", 0.0, "and then this is added"),
    Flag("force-scale-active", 0, "1: a value beyond fp8 in every block of a row, so that blocks are scaled"),
    Flag("report-scale-stats", 0, "1: print how many blocks of the rows are beyond fp8"),
    Flag("verify", 1, "1: check the results before timing"),
)  # fmt: skip


@dataclass(frozen=True)
class Options:
    """The flags, with dashes as underscores."""

    cmd: str
    world_size: int
    max_tokens: int
    num_experts_per_rank: int
    num_experts_per_token: int
    dtype: str
    combine_dtype: str
    max_recv_total_tokens: int
    zero_copy: int
    hidden_dim: int
    quant_type: str
    scale_dim: int
    kernel_type: str
    local_expert_count: bool
    dispatch_block_num: int
    dispatch_warp_per_block: int
    combine_block_num: int
    combine_warp_per_block: int
    save_tuning_config: str
    warmup: int
    iters: int
    graph_replay_iters: int
    routing: str
    input_dist: str
    input_scale: float
    input_shift: float
    force_scale_active: int
    report_scale_stats: int
    verify: int

    @property
    def dispatched(self) -> torch.dtype:
        return DTYPES[self.dtype]

    @property
    def combined(self) -> torch.dtype:
        return DTYPES[self.combine_dtype or ("bf16" if self.dtype == "fp4" else self.dtype)]

    def columns(self, dtype: torch.dtype) -> int:
        """Elements of a row."""
        return self.hidden_dim // 2 if dtype == DTYPES["fp4"] else self.hidden_dim

    def row_bytes(self, dtype: torch.dtype) -> int:
        return self.columns(dtype) * dtype.itemsize

    def grid(self, phase: str) -> dict[str, int]:
        """block_num and warp_per_block of the calls of `phase`."""
        return {part: getattr(self, f"{phase}_{part}") for part in GRID_FLAGS}

    def problem(self) -> str | None:
        """What is wrong with the combination, in words for the user."""
        if self.cmd == "profile":
            return "--cmd profile needs mori.kernel_profiler, which this version of mori does not have"
        if self.routing == "spread" and self.num_experts_per_token != self.world_size:
            return (
                f"--routing spread sends each token to one expert of every rank: --num-experts-per-token "
                f"{self.num_experts_per_token} must be --world-size {self.world_size}"
            )
        if self.routing == "remote_round_robin" and self.world_size < 2:
            return "--routing remote_round_robin needs a --world-size of 2 or more"
        if self.quant_type != "none" and self.zero_copy:
            return f"--quant-type {self.quant_type} quantises what combine is given: it needs --zero-copy 0"
        if self.quant_type != "none" and self.combined != torch.bfloat16:
            return f"--quant-type {self.quant_type} needs rows of combine in bf16: add --combine-dtype bf16"
        if self.dtype == "fp4" and self.hidden_dim % 2:
            return f"--hidden-dim {self.hidden_dim} is odd: fp4 values come in pairs"
        experts = self.world_size * self.num_experts_per_rank
        if self.num_experts_per_token > experts and self.routing == "random":
            return f"--num-experts-per-token {self.num_experts_per_token} is more than the {experts} experts there are"
        if self.save_tuning_config and self.cmd != "tuning":
            return f"--save-tuning-config belongs to --cmd tuning, not {self.cmd}"
        return None


def parser(on_cpus: bool, gpus: int, description: str | None = None) -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(description=description)
    for flag in FLAGS:
        default = flag.on_cpus if on_cpus and flag.on_cpus is not None else flag.default
        if flag.name == "world-size" and not on_cpus:
            default = max(1, min(flag.default, gpus))
        if isinstance(default, bool):
            found.add_argument(f"--{flag.name}", action="store_true", help=flag.meaning)
            continue
        shown = f"{flag.meaning} (default: {default!r})"
        found.add_argument(
            f"--{flag.name}", type=type(default), default=default, choices=flag.choices or None, help=shown
        )
    return found


def parse(arguments: Sequence[str] | None, on_cpus: bool, gpus: int = 0, description: str | None = None) -> Options:
    """Ends the program with a message if the arguments do not fit together."""
    reader = parser(on_cpus, gpus, description)
    values = vars(reader.parse_args(arguments))
    values["num_experts_per_rank"] = values["num_experts_per_rank"] or max(1, 256 // values["world_size"])
    options = Options(**values)
    if problem := options.problem():
        reader.error(problem)
    return options
