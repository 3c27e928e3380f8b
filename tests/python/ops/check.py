"""One round of dispatch and combine with experts that return what they get, checked twice on every rank.

Dispatch: against tests/reference.py, and row by row as releases do, from the source positions that the op reports.
Combine: against exact values, and within the tolerances that releases are held to.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks import tolerances
from benchmarks.expected import FP4, float_values
from mori import target
from tests import quantised_reference, reference
from tests.python.ops.data import Data, columns, converted, new_op
from tests.python.ops.harness import device_of
from tests.python.ops.points import DTYPES, Point
from tests.rank_worker import RankContext
from tests.reference import as_bytes
from tests.v1.exercise import require, require_same_bits

BLOCK_SCALES = 56
"""Scales per row of blockwise wires: the default of MORI_FP8_COMBINE_SCALE_DIM."""
HALF_STEP_FP4 = 1.0


def half(op: Any, name: str) -> None:
    """Runs the receive half where there is one."""
    from mori.ops import EpDispatchCombineKernelType

    if op.config.kernel_type is EpDispatchCombineKernelType.AsyncLL:
        getattr(op, name)()


def own_tensors(data: Data, context: RankContext) -> tuple[torch.Tensor | None, ...]:
    """What a rank gives to dispatch, on its device."""
    device, rank = device_of(context), context.rank
    tensors = (data.rows[rank], data.weights[rank], data.scales[rank], data.ids[rank])
    return tuple(None if each is None else each.to(device) for each in tensors)


def dispatch(op: Any, data: Data, context: RankContext, **options: Any) -> tuple:
    """The views, checked."""
    views = op.dispatch(*own_tensors(data, context), **options)
    half(op, "dispatch_recv")
    check_dispatch(op, data, context.rank, views)
    return views


def check_dispatch(op: Any, data: Data, rank: int, views: tuple, positions: bool = True) -> None:
    rows, weights, scales, ids, count = views[:5]
    expected = data.received(rank)
    total = len(expected.rows)
    require(int(count[0]) == total, f"rank {rank} received {int(count[0])} rows, expected {total}")
    got = [None if each is None else each[:total].cpu() for each in (rows, weights, scales, ids)]
    wanted = (expected.rows, expected.weights, expected.scales, expected.indices)
    for name, actual, right in zip(("rows", "weights", "scales", "ids"), got, wanted, strict=True):
        require((actual is None) == (right is None), f"{name} are {type(actual)}")
        if right is not None:
            require_same_bits(actual, right, name)
    if positions:
        reported = op.get_dispatch_src_token_pos().cpu()
        require_same_bits(reported, expected.source_position, "source positions")
        check_by_position(op, data, reported, got)


def check_by_position(op: Any, data: Data, positions: torch.Tensor, got: list) -> None:
    """Every row is that of the token which its position names; no token comes twice."""
    require(len(positions.unique()) == len(positions), "a token was received twice")
    decoded = [op.decode_send_flat_idx(position) for position in positions]
    for rank in range(data.world_size):
        here = [row for row, (source, _) in enumerate(decoded) if source == rank]
        tokens = [decoded[row][1] for row in here]
        for actual, sent in zip(got, (data.rows, data.weights, data.scales, data.ids), strict=True):
            if actual is not None:
                same = torch.equal(as_bytes(actual)[here], as_bytes(sent[rank])[tokens])  # type: ignore[index]
                require(same, f"rows from rank {rank} are not those of the tokens that their positions name")


def combine(op: Any, data: Data, context: RankContext, views: tuple, *, weights: bool = True, **options: Any) -> None:
    """Returns every received row as it came and checks what arrives."""
    point, rank = data.point, context.rank
    dtype = DTYPES[point.combines]
    total = data.routing.received(rank)
    answers = converted(views[0], dtype)
    if not point.external:
        buffer = op.get_registered_combine_input_buffer(dtype, hidden_dim=columns(point.hidden, dtype))
        as_bytes_view(buffer)[:total].copy_(as_bytes_view(answers)[:total])
        answers = buffer
    ids = data.ids[rank].to(device_of(context))
    out, out_weights = op.combine(answers, views[1] if weights else None, ids, call_reset=False, **options)
    half(op, "combine_recv")
    check_combine(data, rank, out.cpu())
    own, copies = data.weights[rank], copies_of(data, rank)
    require((out_weights is None) == (not weights), f"combined weights are {type(out_weights)}")
    if out_weights is not None:
        error = (out_weights[: len(own)].cpu() - own * copies).abs()
        require(bool((error <= tolerances.WEIGHTS * (1 + own * copies)).all()), "combined weights")


def as_bytes_view(rows: torch.Tensor) -> torch.Tensor:
    return rows.view(torch.uint8)


def copies_of(data: Data, rank: int) -> torch.Tensor:
    """float32 [n, 1]: to how many ranks each token went, and so how many rows come back for it."""
    return torch.from_numpy(data.routing.copies(rank)).float()[:, None]


def check_combine(data: Data, rank: int, out: torch.Tensor) -> None:
    point, dtype = data.point, DTYPES[data.point.combines]
    sent, copies = float_values(data.rows[rank]), copies_of(data, rank)
    out = out[: len(sent)]
    require_same_bits(out, expected_combine(data)[rank], f"combined rows of rank {rank}")
    largest = 6.0 if dtype == FP4 else torch.finfo(dtype).max
    sums = (sent * copies).clamp(-largest, largest)
    if dtype == FP4:
        require(bool(((float_values(out) - sums).abs() <= HALF_STEP_FP4).all()), "fp4 sums are not the nearest values")
        return
    maxima = tolerances.block_maxima(sent, BLOCK_SCALES) * copies
    tolerances.require_close(f"combined rows of rank {rank}", out, sums.to(dtype), point.quant_type, maxima)


def expected_combine(data: Data) -> list[torch.Tensor]:
    """The bits that must come back, by rank. Narrow sums and quantised wires are of the OCP flavour everywhere here."""
    quant_type, dtype = data.point.quant_type, DTYPES[data.point.combines]
    returned = [converted(data.received(peer).rows, dtype) for peer in range(data.world_size)]
    if quant_type == "fp8_direct_cast":
        return quantised_reference.fp8_direct_cast_combine(data.routing, returned)
    if quant_type == "fp8_blockwise":
        return quantised_reference.fp8_blockwise_combine(data.routing, returned, BLOCK_SCALES)
    if quant_type == "fp4_blockwise":
        return quantised_reference.fp4_blockwise_combine(data.routing, returned, BLOCK_SCALES)
    return reference.combine(data.routing, returned)


def play(context: RankContext, op: Any, data: Data, **options: Any) -> tuple:
    """A whole round; the views of its dispatch."""
    views = dispatch(op, data, context)
    combine(op, data, context, views, **options)
    return views


def no_arithmetic_here(point: Point) -> bool:
    """GPUs add up one fp8 flavour only; the other one they merely move."""
    dtype = DTYPES[point.combines]
    return target.current().is_device and dtype == torch.float8_e4m3fnuz


def rounds_of(context: RankContext, point: Point, counts: list[list[int]]) -> None:
    op = new_op(context, point)
    for number, tokens in enumerate(counts):
        data = Data(point, context.world_size, number, tokens)
        if no_arithmetic_here(point):
            views = dispatch(op, data, context)
            with pytest.raises(TypeError):
                combine(op, data, context, views)
        else:
            play(context, op, data)
        if point.sentinel:
            require(any(bool((ids == -1).any()) for ids in data.ids), "the pattern is not in the ids")
            require(data.routing.dropped != (0,) * context.world_size, "the pattern drops nothing")
            require(op.stats()["dropped_ids"] > 0 or not tokens[context.rank], "no id was dropped")
