"""Launch sizes of the flydsl backend: rules that were measured, and what a GPU without rules gets.

A schedule is a tuple of buckets (most tokens or None, dispatch blocks, dispatch warps, combine blocks, combine warps),
ascending, the last one without a bound. No rule is there yet: only measured ones will be.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any, NamedTuple

from mori import target

from ..tuning_config import GPU_MODELS

Bucket = tuple[int | None, int, int, int, int]
Schedule = tuple[Bucket, ...]

# What `lookup` gives, in this order.
KEYS = (
    "dispatch_block_num",
    "combine_block_num",
    "warp_num_per_block",
    "combine_warp_num_per_block",
    "schedule",
)

# Launch sizes of a device by its key, for shapes that nobody measured on it.
_DEVICE_DEFAULTS: dict[str, dict[str, Any]] = {}
# device key -> (world_size, hidden_dim, topk) -> dtype key -> schedule
_TABLE: dict[str, dict[tuple[int, int, int], dict[str, Schedule]]] = {}

_NODES = Path("/sys/class/kfd/kfd/topology/nodes")
_UNKNOWN_CUS = 80
_MOST_BLOCKS = 256  # of any grid: there are words for so many
_GFX950, _GFX1250 = 90500, 120500
_ALIASES = {"mi350x": "mi355x"}


class Topology(NamedTuple):
    """Of the first AMD GPU; all 0 where there is none."""

    cu_count: int
    gfx_target_version: int
    device_id: int


@functools.cache
def _topology() -> Topology:
    """As the kernel driver tells it: no torch, no GPU runtime, so launch sizes can be chosen before either is up."""
    try:
        nodes = sorted(_NODES.iterdir(), key=lambda node: int(node.name))
    except (OSError, ValueError):
        return Topology(0, 0, 0)
    for node in nodes:
        try:
            lines = (node / "properties").read_text().splitlines()
            facts = {name: int(value) for name, _, value in (line.partition(" ") for line in lines)}
        except (OSError, ValueError):
            continue
        if facts.get("simd_count"):  # CPUs are nodes too, without SIMDs
            cus = facts["simd_count"] // (facts.get("simd_per_cu") or 1)
            return Topology(cus, facts.get("gfx_target_version", 0), facts.get("device_id", 0))
    return Topology(0, 0, 0)


def _cu_count() -> int:
    """0 if unknown."""
    return _topology()[0]


def _device_key() -> str | None:
    """What tables call the device: "mi300x", "gfx1250", "sm_90"; None for an AMD GPU that has no name in them."""
    current = target.current()
    if current.name != "hip":
        return current.arch
    _, version, device_id = _topology()
    model = GPU_MODELS.get(device_id) or {_GFX950: "mi355x", _GFX1250: "gfx1250"}.get(version)
    if model is None and current.arch == "gfx1250":
        return "gfx1250"
    return _ALIASES.get(model, model) if model else None


def _scaled_default() -> dict[str, Any]:
    blocks = min(_cu_count() or _UNKNOWN_CUS, _MOST_BLOCKS)
    return dict(zip(KEYS, (blocks, blocks, 16, 4, None), strict=True))


def lookup(world_size: int, hidden_dim: int, topk: int, dtype: str = "fp8") -> dict[str, Any]:
    """The five launch fields of a config for this shape, by name; `dtype` is a `dtype_str` of the config.

    The device's own default, else one scaled by its compute units; with the schedule measured for the shape and dtype,
    else for the shape and "fp8", else the default's.
    """
    device = _device_key()
    found = dict(_DEVICE_DEFAULTS.get(device or "") or _scaled_default())
    measured = _TABLE.get(device or "", {}).get((world_size, hidden_dim, topk), {})
    schedule = measured.get(dtype) or measured.get("fp8")
    return found | {"schedule": schedule} if schedule else found
