"""Times dispatch and combine of EPv2, after checking the very calls that are timed.

    torchrun --nproc_per_node=2 tests/python/ops/dispatch_combine_v2/bench_ep.py
    HIDDEN=512 SWEEP=16 ITERS=5 python3 tests/python/ops/dispatch_combine_v2/bench_ep.py

HIDDEN, TOPK, EPR (experts per rank), WARMUP, ITERS, SWEEP (tokens), BACKENDS, MODES (eager, graph), COMBINE_IN
(inplace, staged), CHECK (0: none), DISP (bf16, fp8, fp4), ROUTE (rand, ring, noself), LATE_US (the last rank starts
later), and DBN, DWPB, CBN, CWPB (blocks and warps of dispatch and of combine). Combine is bf16. On CPUs a recorded list
of launches is the graph. Times are means over ranks, bandwidths are of the rows that rank 0 receives.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[4]))

import torch

from mori.ops.dispatch_combine_v2 import EpDispatchCombineConfig, EpDispatchCombineOp
from tests.gpu.bridge import moved
from tests.python.ops.dispatch_combine_v2.ranks import Rank, number, numbers, run
from tests.v2.graphs import captured
from tests.v2.replays import copies_of

DTYPES = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn, "fp4": torch.float4_e2m1fn_x2}
TOLERANCES = {"bf16": (2e-2, 2e-2), "fp8": (1.0, 0.15)}  # absolute, relative; fp4 is not compared
GEOMETRY = {
    "dispatch_block_num": "DBN",
    "warp_num_per_block": "DWPB",
    "combine_block_num": "CBN",
    "combine_warp_num_per_block": "CWPB",
}


def words(name: str, default: str) -> list[str]:
    return os.environ.get(name, default).split(",")


def routed(this: Rank, tokens: int, topk: int, experts_per_rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(99 + this.rank)
    shape, route = (tokens, topk), os.environ.get("ROUTE", "rand")
    local = torch.randint(0, experts_per_rank, shape, generator=generator)
    if route == "ring":
        ranks = torch.full(shape, (this.rank + 1) % this.world_size)
    elif route == "noself":
        others = torch.randint(1, max(2, this.world_size), shape, generator=generator)
        ranks = (this.rank + others) % this.world_size
    elif route == "rand":
        ranks = torch.randint(0, this.world_size, shape, generator=generator)
    else:
        raise ValueError(f"ROUTE={route}: use rand, ring or noself")
    return (ranks * experts_per_rank + local).to(torch.int32)


class Point:
    """One token count on one backend: its calls, their check and their times."""

    def __init__(self, this: Rank, backend: str, tokens: int) -> None:
        self.this, self.tokens = this, tokens
        self.name = os.environ.get("DISP", "bf16")
        hidden, topk, experts = number("HIDDEN", 7168), number("TOPK", 8), number("EPR", 32)
        geometry = {name: number(variable, 0) for name, variable in GEOMETRY.items() if variable in os.environ}
        config = EpDispatchCombineConfig(
            this.rank,
            this.world_size,
            hidden,
            tokens,
            experts,
            topk,
            dispatch_data_type=DTYPES[self.name],
            combine_data_type=torch.bfloat16,
            kernel_backend=backend,
            **geometry,
        )
        self.op: Any = EpDispatchCombineOp(config, this.communicator)
        generator = torch.Generator().manual_seed(1234 + this.rank)
        if self.name == "fp4":
            values = torch.randint(0, 256, (tokens, hidden // 2), generator=generator).to(torch.uint8)
            self.rows = moved(values.view(DTYPES["fp4"]), this.device)
        else:
            self.rows = moved(torch.randn(tokens, hidden, generator=generator).to(DTYPES[self.name]), this.device)
        ids = routed(this, tokens, topk, experts)
        self.copies = copies_of(ids, experts, this.world_size).to(this.device)
        self.ids, self.weights = ids.to(this.device), torch.rand(tokens, topk, generator=generator).to(this.device)
        staged = os.environ.get("COMBINE_IN", "inplace") == "staged"
        self.answers = torch.empty_like(self.op.combine_in_view()) if staged else self.op.combine_in_view()
        self.handle: Any = None
        self.result: Any = None

    def dispatch(self) -> None:
        self.handle = self.op.dispatch(self.rows, self.weights, None, self.ids, return_routing=True)[5]

    def combine(self) -> None:
        self.result = self.op.combine(self.answers, routing=self.handle)[0]

    def received(self) -> int:
        self.this.finish_kernels()
        return int(self.op.total_recv)

    def is_right(self, legs: list[Callable[[], Any]]) -> bool:
        """Whether an expert that does nothing gets back every token once for each rank that it went to."""
        legs[0]()
        total = self.received()
        if self.name != "fp4":
            self.answers[:total].copy_(self.op.recv_tokens()[:total].to(torch.bfloat16))
        legs[1]()
        self.this.finish_kernels()
        if self.name == "fp4":
            return self.this.agree(total >= 0)
        absolute, relative = TOLERANCES[self.name]
        expected = self.copies * self.rows.float()
        error = (self.result.float() - expected).abs()
        return self.this.agree(bool((error <= absolute + relative * expected.abs()).all()))

    def legs(self, mode: str) -> list[Callable[[], Any]]:
        if mode == "eager":
            return [self.dispatch, self.combine]
        return [captured(self.op, self.dispatch), captured(self.op, self.combine)]

    def times_us(self, legs: list[Callable[[], Any]], iterations: int) -> list[float]:
        """Of dispatch, of combine and of both, by the clock of the device and without waiting in between."""
        clock = DeviceClock if self.this.device.type == "cuda" else HostClock
        stamps = [clock()]
        for _ in range(iterations):
            for leg in legs:
                leg()
                stamps.append(clock())
        self.this.finish_kernels()
        spans = [1e6 * stamps[at].until(stamps[at + 1]) for at in range(2 * iterations)]
        dispatch, combine = sum(spans[::2]) / iterations, sum(spans[1::2]) / iterations
        return [self.this.mean(each) for each in (dispatch, combine, dispatch + combine)]


class HostClock:
    def __init__(self) -> None:
        self.at = time.perf_counter()

    def until(self, later: Any) -> float:
        return later.at - self.at


class DeviceClock:
    def __init__(self) -> None:
        self.event = torch.cuda.Event(enable_timing=True)
        self.event.record()

    def until(self, later: Any) -> float:
        return self.event.elapsed_time(later.event) / 1e3


def program(this: Rank) -> bool:
    backends = words("BACKENDS", os.environ.get("MORI_V2_KERNEL_BACKEND", "hip"))
    modes, checks = words("MODES", "eager,graph"), os.environ.get("CHECK", "1") != "0"
    hidden, iterations, warm_up = number("HIDDEN", 7168), number("ITERS", 50), number("WARMUP", 10)
    this.say(f"# EP{this.world_size} hidden={hidden} backends={','.join(backends)} modes={','.join(modes)}")
    failed = verified = points = 0
    for tokens in numbers("SWEEP", "128,512,4096"):
        for backend in backends:
            point = Point(this, backend, tokens)
            for mode in modes:
                points += 1
                legs = point.legs(mode)
                label = f"ct={tokens} [{backend}/{mode}]"
                if checks:
                    if not point.is_right(legs):
                        failed += 1
                        this.say(f"{label} CHECK FAIL")
                        continue
                    verified += point.name != "fp4"
                for _ in range(warm_up):
                    legs[0]()
                    legs[1]()
                received = point.received()
                this.communicator.barrier()
                if this.rank == this.world_size - 1:
                    time.sleep(number("LATE_US", 0) / 1e6)
                dispatch, combine, pair = point.times_us(legs, iterations)
                sent, returned = received * point.op.cfg.token_nbytes, received * point.op.cfg.combine_token_nbytes
                this.say(
                    f"{label} dispatch {dispatch:.1f} us ({sent / dispatch / 1e3:.1f} GB/s) combine {combine:.1f} us "
                    f"({returned / combine / 1e3:.1f} GB/s) pair {pair:.1f} us recv~{received}"
                )
            point.op.close()
    left_out = points - verified - failed
    reason = "" if not left_out else f" ({'fp4 is not compared' if checks else 'CHECK=0'})"
    this.say(f"# {'FAIL' if failed else 'PASS'}: {failed} failed, {verified}/{points} points verified{reason}")
    return failed == 0


if __name__ == "__main__":
    most, hidden = max(numbers("SWEEP", "128,512,4096")), number("HIDDEN", 7168)
    world_size = int(os.environ.get("WORLD_SIZE", 8))
    raise SystemExit(run(program, vmm_bytes=2 * (world_size * most * hidden * 4 * 2) + (1 << 30)))
