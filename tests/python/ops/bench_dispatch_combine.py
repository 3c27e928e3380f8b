"""Times, stresses or tunes dispatch and combine inside one node; starts its own ranks.

    python3 tests/python/ops/bench_dispatch_combine.py
    python3 tests/python/ops/bench_dispatch_combine.py --cmd tuning --dtype fp4 --zero-copy 0

On GPUs every rank has one, and graphs are timed; without GPUs two processes run small shapes on CPUs.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import torch

from benchmarks.bench_ep import spawn
from benchmarks.intra_node.commands import run_rank
from benchmarks.intra_node.options import parse
from mori import target


def main(arguments: Sequence[str] | None = None) -> int:
    on_cpus = not target.current().is_device
    options = parse(arguments, on_cpus, torch.cuda.device_count(), __doc__)
    os.environ.setdefault("MORI_SHMEM_HEAP_SIZE", "8G")
    spawn(run_rank, options, options.world_size)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
