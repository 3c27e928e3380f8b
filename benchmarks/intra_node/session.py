"""Rounds of dispatch and combine on one rank, and their verification. Experts return what they get."""

from __future__ import annotations

import torch

from benchmarks import tolerances
from benchmarks.expected import FP4, Routing, as_bytes, float_values, require_equal
from benchmarks.intra_node.inputs import DISTRIBUTIONS, ROUTINGS
from benchmarks.intra_node.options import SCALE_BYTES, Options

LARGEST_FP8 = 448.0
BEYOND_FP8 = 2 * LARGEST_FP8
BLOCK_SCALES = 56


class Inputs:
    """What every rank sends in round `number`, on one device; each rank makes all of it alike."""

    def __init__(self, options: Options, number: int, counts: list[int], device: torch.device) -> None:
        self.options, self.counts, self.device = options, counts, device
        generators = [torch.Generator().manual_seed(1009 * number + rank) for rank in range(options.world_size)]
        pairs = list(zip(generators, counts, strict=True))
        sizes = (options.num_experts_per_token, options.world_size, options.num_experts_per_rank)
        route = ROUTINGS[options.routing]
        chosen = [route(generator, rank, count, *sizes) for rank, (generator, count) in enumerate(pairs)]
        self.ids = [each.int().to(device) for each in chosen]
        self.rows = [self._rows(generator, count).to(device) for generator, count in pairs]
        self.weights = [
            torch.rand(count, options.num_experts_per_token, generator=each).to(device) for each, count in pairs
        ]
        self.scales = [torch.rand(count, options.scale_dim, generator=each).to(device) for each, count in pairs]
        self.routing = Routing(self.ids, options.num_experts_per_rank)

    def _rows(self, generator: torch.Generator, count: int) -> torch.Tensor:
        options = self.options
        if options.dispatched == FP4:
            shape = (count, options.columns(FP4))
            return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator).view(FP4)
        values = DISTRIBUTIONS[options.input_dist](generator, count, options.hidden_dim)
        values = values * options.input_scale + options.input_shift
        if options.force_scale_active:
            values[:, :: -(-options.hidden_dim // BLOCK_SCALES)] = BEYOND_FP8
        return values.to(options.dispatched)

    def received(self, rank: int) -> int:
        return int(self.routing.counts[:, rank].sum())

    def blocks_beyond_fp8(self, rank: int) -> str:
        """For --report-scale-stats."""
        length = -(-self.options.hidden_dim // BLOCK_SCALES)
        maxima = tolerances.block_maxima(float_values(self.rows[rank]), BLOCK_SCALES)[:, ::length]
        active = int((maxima > LARGEST_FP8).sum())
        largest = float(maxima.max()) if maxima.numel() else 0.0
        return (
            f"{active} of {maxima.numel()} blocks of rank {rank} are beyond {LARGEST_FP8:g}, the largest is {largest:g}"
        )


class Session:
    """One op and its rounds. Collective: all ranks do the same."""

    def __init__(self, rank: int, options: Options, device: torch.device) -> None:
        import mori

        self.rank, self.options, self.device = rank, options, device
        widest = max(options.columns(options.dispatched), options.columns(options.combined))
        self.op = mori.ops.EpDispatchCombineOp(
            mori.ops.EpDispatchCombineConfig(
                data_type=options.dispatched,
                rank=rank,
                world_size=options.world_size,
                hidden_dim=widest,
                scale_dim=options.scale_dim,
                scale_type_size=SCALE_BYTES,
                max_token_type_size=max(options.dispatched.itemsize, options.combined.itemsize),
                max_num_inp_token_per_rank=options.max_tokens,
                num_experts_per_rank=options.num_experts_per_rank,
                num_experts_per_token=options.num_experts_per_token,
                max_total_recv_tokens=options.max_recv_total_tokens,
                use_external_inp_buf=not options.zero_copy,
                kernel_type=mori.ops.EpDispatchCombineKernelType[options.kernel_type],
                quant_type=options.quant_type,
            )
        )
        self.views: tuple = ()
        self.result: tuple = ()
        self.answers: torch.Tensor | None = None

    def inputs(self, number: int, counts: list[int] | None = None) -> Inputs:
        """All ranks full, unless counts are given."""
        options = self.options
        return Inputs(options, number, counts or [options.max_tokens] * options.world_size, self.device)

    def dispatch(self, inputs: Inputs, grid: dict[str, int] | None = None) -> None:
        rank = self.rank
        scales = inputs.scales[rank] if self.options.scale_dim else None
        self.views = self.op.dispatch(
            inputs.rows[rank],
            inputs.weights[rank],
            scales,
            inputs.ids[rank],
            call_local_expert_count=self.options.local_expert_count,
            **(grid or self.options.grid("dispatch")),
        )

    def answer(self) -> None:
        """What experts return for the rows that were received; in the registered buffer for zero copy.

        Of all rows, valid or not, as experts in a graph do, where the host does not know how many there are.
        """
        rows, dtype = self.views[0], self.options.combined
        answers = rows if rows.dtype == dtype else float_values(rows).to(dtype)
        if not self.options.zero_copy:
            self.answers = answers.clone()
            return
        buffer = self.op.get_registered_combine_input_buffer(dtype, hidden_dim=self.options.columns(dtype))
        as_bytes(buffer).copy_(as_bytes(answers))
        self.answers = buffer

    def combine(self, inputs: Inputs, grid: dict[str, int] | None = None) -> None:
        self.result = self.op.combine(
            self.answers, self.views[1], inputs.ids[self.rank], **(grid or self.options.grid("combine"))
        )

    def round(self, inputs: Inputs) -> None:
        """A whole round with both results checked; RuntimeError if they are wrong."""
        self.dispatch(inputs)
        self.verify_dispatch(inputs)
        self.answer()
        self.combine(inputs)
        self.verify_combine(inputs)

    def verify_dispatch(self, inputs: Inputs) -> None:
        rows, weights, scales, ids, count = self.views
        total = inputs.received(self.rank)
        if int(count) != total:
            raise RuntimeError(f"rank {self.rank} received {int(count)} rows, expected {total}")
        sent = {"rows": inputs.rows, "weights": inputs.weights, "scales": inputs.scales, "ids": inputs.ids}
        for (what, tables), view in zip(sent.items(), (rows, weights, scales, ids), strict=True):
            if view is not None:
                expected = inputs.routing.gather(self.rank, tables)
                require_equal(f"rank {self.rank}: {what}", as_bytes(view[:total]), expected)
        if self.options.local_expert_count:
            first = self.rank * self.options.num_experts_per_rank
            local = ids[:total] - first
            wanted = [int((local == expert).sum()) for expert in range(self.options.num_experts_per_rank)]
            if self.op.local_expert_count.tolist() != wanted:
                raise RuntimeError(f"rank {self.rank}: wrong local expert counts")

    def verify_combine(self, inputs: Inputs) -> None:
        out, out_weights = self.result
        dtype, rank = self.options.combined, self.rank
        copies = inputs.routing.hits[rank].sum(dim=1, keepdim=True).float()
        values = float_values(inputs.rows[rank])
        sums, got = values * copies, float_values(out[: len(values)])
        largest = 6.0 if dtype == FP4 else torch.finfo(dtype).max
        sums = sums.clamp(-largest, largest)
        if dtype == FP4:
            wrong = (got - sums).abs() > 1
            if bool(wrong.any()):
                raise RuntimeError(f"rank {rank}: {int(wrong.sum())} combined fp4 values are not the nearest ones")
        else:
            maxima = tolerances.block_maxima(values, BLOCK_SCALES) * copies
            what = f"rank {rank}: combined rows"
            tolerances.require_close(what, got, sums.to(dtype), self.options.quant_type, maxima)
        own = inputs.weights[rank]
        if not torch.allclose(out_weights[: len(own)], own * copies, rtol=tolerances.WEIGHTS, atol=tolerances.WEIGHTS):
            raise RuntimeError(f"rank {rank}: combined weights")
