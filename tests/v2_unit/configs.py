"""A legal config of v2, to be changed by tests."""

from __future__ import annotations

from typing import Any

from mori.ops.dispatch_combine_v2 import EpDispatchCombineConfig

FIELDS: dict[str, Any] = {
    "rank": 0,
    "world_size": 8,
    "hidden_dim": 7168,
    "max_num_inp_token_per_rank": 100,
    "num_experts_per_rank": 32,
    "num_experts_per_token": 8,
}


def make_config(**changes: Any) -> EpDispatchCombineConfig:
    return EpDispatchCombineConfig(**(FIELDS | changes))
