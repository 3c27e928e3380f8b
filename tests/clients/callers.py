"""What the small callers share: running them on two ranks, building ops from a layer, comparing bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tests.clients.layer import Layer
from tests.rank_worker import RankContext
from tests.ranks import pool
from tests.v1.exercise import require, require_same_bits

WORLD_SIZE = 2


def on_ranks(function: Callable[..., Any], *args: Any, **environment: str) -> list[Any]:
    """`function(context, *args)` on both ranks; results by rank."""
    return pool(WORLD_SIZE, **environment).run(function, *args)


def new_op(layer: Layer, context: RankContext, **of_the_client: Any) -> Any:
    """An op for the layer. Here as in the clients all fields are keywords."""
    import mori

    fields = layer.config_fields(context.rank, **of_the_client)
    return mori.ops.EpDispatchCombineOp(mori.ops.EpDispatchCombineConfig(**fields))


def kernel_type(name: str) -> Any:
    """The member of that name: names travel to the ranks, members need not."""
    import mori

    return mori.ops.EpDispatchCombineKernelType[name]


def known_fields(fields: dict[str, Any]) -> dict[str, Any]:
    """Clients that support several releases pass only what the dataclass of this one has."""
    import dataclasses

    import mori

    names = {field.name for field in dataclasses.fields(mori.ops.EpDispatchCombineConfig)}
    return {name: value for name, value in fields.items() if name in names}


def check_received(layer: Layer, rank: int, views: tuple, weights: bool = True) -> None:
    """The five views hold, untrimmed, what the reference says."""
    rows, row_weights, scales, ids, count = views
    expected = layer.received(rank, weights)
    total = len(expected.rows)
    require(count.dtype == torch.int32 and tuple(count.shape) == (1,), f"the count is {count!r}")
    require(int(count[0]) == total, f"rank {rank} received {int(count[0])} rows, expected {total}")
    capacity = layer.world_size * layer.max_tokens
    require(rows.shape[0] == row_weights.shape[0] == ids.shape[0] == capacity, "the views are trimmed")
    require_same_bits(rows[:total], expected.rows, "received rows")
    require_same_bits(row_weights[:total], expected.weights, "received weights")
    require_same_bits(ids[:total], expected.indices, "received ids")
    require((scales is None) == (expected.scales is None), f"scales are {type(scales)}")
    if expected.scales is not None:
        require_same_bits(scales[:total], expected.scales, "received scales")


def check_result(layer: Layer, rank: int, result: torch.Tensor) -> None:
    """`result` are at least the n rows of this rank."""
    expected = layer.result(rank)
    require_same_bits(result[: len(expected)], expected, "result of the layer")
