"""Launch sizes of the hip backend between nodes: rules that were measured. None is there yet."""

from __future__ import annotations

from . import tuning_configs as gpu_utils  # what is asked for the size of the GPU
from .tuning_configs import _device_key

# Most tokens or None, then blocks, those of them for traffic between nodes, and warps: of dispatch, of combine.
Row = tuple[int | None, int, int, int, int, int, int]
Launch = tuple[int, int, int]

# device key -> (world_size, hidden_dim, topk) -> dtype key -> rows, ascending, the last one without a bound
_TABLE: dict[str, dict[tuple[int, int, int], dict[str, tuple[Row, ...]]]] = {}

_UNKNOWN_CUS = 80


def lookup(
    world_size: int, hidden_dim: int, topk: int, num_tokens: int, dtype: str = "fp8"
) -> dict[str, Launch] | None:
    """{"dispatch": (blocks, blocks between nodes, warps), "combine": ...} of a call of `num_tokens` tokens.

    None for a shape that nobody measured on this device: the caller keeps what it has. A dtype without rows takes those
    of "fp8". No more blocks than the GPU has compute units, and at least one block for traffic within the node.
    """
    rules = _TABLE.get(_device_key() or "", {}).get((world_size, hidden_dim, topk), {})
    rows = rules.get(dtype) or rules.get("fp8")
    if not rows:
        return None
    row = next((row for row in rows if row[0] is None or num_tokens <= row[0]), rows[-1])
    return {"dispatch": _clamped(*row[1:4]), "combine": _clamped(*row[4:7])}


def _clamped(blocks: int, rdma_blocks: int, warps: int) -> Launch:
    blocks = min(blocks, gpu_utils._cu_count() or _UNKNOWN_CUS)
    return blocks, min(rdma_blocks, max(1, blocks - 1)), warps
