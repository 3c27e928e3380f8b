"""The calls that are measured: fresh routing for each, inputs in turn from several buffers, and their verification.

All data follow from numbers, so every rank can make what its peers sent and check results without exchanging any.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.expected import Routing, require_equal

BUFFERS = 4
"""Inputs of a large batch do not fit into the L2 cache together."""

SCALED = torch.float8_e4m3fn
Grid = tuple[int, int]
AUTO: Grid = (-1, -1)


@dataclass(frozen=True)
class Case:
    ep_size: int
    tokens: int
    dtype: torch.dtype = torch.bfloat16
    hidden: int = 7168
    topk: int = 8
    experts: int = 256

    @property
    def experts_per_rank(self) -> int:
        return self.experts // self.ep_size

    @property
    def scales(self) -> int:
        """float32 scales per row: one for each 128 values of fp8."""
        return self.hidden // 128 if self.dtype == SCALED else 0

    @property
    def row_bytes(self) -> int:
        return self.hidden * self.dtype.itemsize

    def small_bytes(self, phase: str) -> int:
        """What a row carries along: weights, ids, scales and its position; nothing on its way back."""
        return self.topk * 8 + self.scales * 4 + 4 if phase == "dispatch" else 0


def build_op(rank: int, case: Case, max_tokens: int) -> Any:
    import mori

    return mori.ops.EpDispatchCombineOp(
        mori.ops.EpDispatchCombineConfig(
            data_type=case.dtype,
            rank=rank,
            world_size=case.ep_size,
            hidden_dim=case.hidden,
            scale_dim=case.scales,
            scale_type_size=4,
            max_token_type_size=2,
            max_num_inp_token_per_rank=max_tokens,
            num_experts_per_rank=case.experts_per_rank,
            num_experts_per_token=case.topk,
            use_external_inp_buf=False,
        )
    )


class Data:
    """Tensors of any rank and call, on one device."""

    def __init__(self, case: Case, device: torch.device) -> None:
        self.case, self.device = case, device

    def _generator(self, *numbers: int) -> torch.Generator:
        seed = 0
        for number in numbers:
            seed = seed * 1009 + number + 1
        return torch.Generator(self.device).manual_seed(seed)

    def rows(self, rank: int, buffer: int) -> torch.Tensor:
        case, generator = self.case, self._generator(1, rank, buffer)
        shape = (case.tokens, case.hidden)
        if case.dtype == SCALED:
            bits = torch.randint(0, 256, shape, dtype=torch.uint8, device=self.device, generator=generator)
            return bits.view(SCALED)
        return torch.randn(shape, device=self.device, generator=generator).to(case.dtype)

    def weights(self, rank: int, buffer: int) -> torch.Tensor:
        generator = self._generator(2, rank, buffer)
        return torch.rand(self.case.tokens, self.case.topk, device=self.device, generator=generator)

    def scales(self, rank: int, buffer: int) -> torch.Tensor | None:
        if not self.case.scales:
            return None
        generator = self._generator(3, rank, buffer)
        return torch.rand(self.case.tokens, self.case.scales, device=self.device, generator=generator)

    def ids(self, rank: int, call: int) -> torch.Tensor:
        """K different experts for each token."""
        generator = self._generator(4, rank, call)
        shape = (self.case.tokens, self.case.experts)
        # 53 random bits: no two scores of a token are equal, so their order is the same on every device.
        scores = torch.rand(shape, dtype=torch.float64, device=self.device, generator=generator)
        return scores.topk(self.case.topk, dim=1).indices.int()

    def routing(self, call: int) -> Routing:
        return Routing([self.ids(peer, call) for peer in range(self.case.ep_size)], self.case.experts_per_rank)

    def busiest(self, phase: str, calls: int, small_bytes: int) -> tuple[int, int]:
        """(logical, wire) bytes of the rank that has most, averaged over the calls. See `records.Record`.

        `small_bytes` is what crosses the link along with each row.
        """
        logical = wire = 0
        row_bytes = self.case.row_bytes if phase == "dispatch" else self.case.hidden * 2
        axis = 0 if phase == "dispatch" else 1
        for call in range(calls):
            counts = self.routing(call).counts
            remote = counts - counts.diag().diag()
            logical += int(counts.sum(dim=axis).max()) * row_bytes
            wire += int(remote.sum(dim=axis).max()) * (row_bytes + small_bytes)
        return logical // calls, wire // calls

    def answers(self, rank: int) -> torch.Tensor:
        """bf16 rows that a rank returns, whatever it received."""
        shape = (self.case.ep_size * self.case.tokens, self.case.hidden)
        return torch.randn(shape, device=self.device, generator=self._generator(5, rank)).bfloat16()


class Workload:
    """`calls` different dispatches and combines of one case on one rank."""

    def __init__(self, rank: int, case: Case, op: Any, device: torch.device, calls: int) -> None:
        self.rank, self.case, self.op, self.calls = rank, case, op, calls
        self.data = Data(case, device)
        buffers = range(min(BUFFERS, calls))
        self.rows = [self.data.rows(rank, buffer) for buffer in buffers]
        self.weights = [self.data.weights(rank, buffer) for buffer in buffers]
        self.scales = [self.data.scales(rank, buffer) for buffer in buffers]
        self.ids = [self.data.ids(rank, call) for call in range(calls)]
        self.answers = self.data.answers(rank)
        self.registered = op.get_registered_combine_input_buffer(torch.bfloat16)
        self.registered[: len(self.answers)].copy_(self.answers)
        self.views: tuple = ()
        self.results: tuple = ()

    def dispatch(self, call: int, grid: Grid = AUTO) -> None:
        buffer = call % len(self.rows)
        self.views = self.op.dispatch(
            self.rows[buffer],
            self.weights[buffer],
            self.scales[buffer],
            self.ids[call],
            block_num=grid[0],
            warp_per_block=grid[1],
        )

    def combine(self, call: int, external: bool, grid: Grid = AUTO) -> None:
        """Returns the rows of the last dispatch, which must have been `call`."""
        self.results = self.op.combine(
            self.answers if external else self.registered,
            None,
            self.ids[call],
            block_num=grid[0],
            warp_per_block=grid[1],
            use_external_inp_buf=int(external),
        )

    def routing(self, call: int) -> Routing:
        return self.data.routing(call)

    def verify_dispatch(self, call: int) -> None:
        """RuntimeError unless the views hold exactly what `call` brings to this rank, in order."""
        routing, buffer = self.routing(call), call % len(self.rows)
        ranks = range(self.case.ep_size)
        rows, weights, scales, ids, count = self.views
        total = int(routing.counts[:, self.rank].sum())
        if int(count) != total:
            raise RuntimeError(f"rank {self.rank} received {int(count)} rows, expected {total}")

        def compare(what: str, actual: torch.Tensor, sent: list[Any]) -> None:
            require_equal(f"rank {self.rank}: {what}", actual[:total], routing.gather(self.rank, sent))

        compare("rows", rows, [self.data.rows(peer, buffer) for peer in ranks])
        compare("weights", weights, [self.data.weights(peer, buffer) for peer in ranks])
        compare("ids", ids, [self.data.ids(peer, call) for peer in ranks])
        if scales is not None:
            compare("scales", scales, [self.data.scales(peer, buffer) for peer in ranks])

    def verify_combine(self, call: int) -> None:
        """RuntimeError unless the results are the sums of what all ranks return for the tokens of `call`."""
        ranks = range(self.case.ep_size)
        rows, _ = self.results
        expected = self.routing(call).combine(self.rank, [self.data.answers(peer) for peer in ranks])
        require_equal(f"rank {self.rank}: combined rows", rows[: self.case.tokens], expected)
