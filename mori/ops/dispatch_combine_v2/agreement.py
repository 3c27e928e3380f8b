"""What every rank must pass alike when an op is built: all that shapes memory or the wire."""

from __future__ import annotations

from typing import Any

from .config import EpDispatchCombineConfig

# By the config's own field names. Dtypes are compared as what they come to; rank and launch sizes may differ.
_FIELDS = (
    "world_size",
    "hidden_dim",
    "max_num_inp_token_per_rank",
    "num_experts_per_rank",
    "num_experts_per_token",
    "scale_dim",
    "scale_type_size",
    "combine_mode",
    "quant_type",
    "enable_std_moe",
    "max_total_recv_tokens",
    "gpu_per_node",
    "num_qp_per_pe",
    "max_token_type_size",
    "internode_kernel",
    "internode_auto_ll_max_tokens",
)


def agreed_fields(cfg: EpDispatchCombineConfig, backend: str) -> dict[str, Any]:
    """To be compared over the ranks: names and values."""
    dtypes = {"dispatch_dtype": str(cfg.dispatch_dtype), "combine_dtype": str(cfg.combine_dtype)}
    return {"kernel_backend": backend, **dtypes, **{field: getattr(cfg, field) for field in _FIELDS}}
