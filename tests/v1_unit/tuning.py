"""Rules and tuning files for tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def rule(num_tokens: int = 128, block_num: int = 64, **fields: Any) -> dict[str, Any]:
    """A dispatch rule; with `zero_copy` and `quant_type` among the fields also one for combine."""
    call = {"dtype": "bf16", "num_tokens": num_tokens, "hidden_dim": 7168}
    return call | {"block_num": block_num, "rdma_block_num": 0, "warp_per_block": 8} | fields


def combine_rule(num_tokens: int = 128, block_num: int = 64, **fields: Any) -> dict[str, Any]:
    return rule(num_tokens, block_num, **({"zero_copy": False, "quant_type": "none"} | fields))


def write(path: Path, rules: list[Any], **facts: Any) -> Path:
    """A tuning file for arch "host" with these rules."""
    path.write_text(json.dumps({"version": "1.0", "gpu_arch": "host"} | facts | {"rules": rules}))
    return path


def blocks(rules: list[dict[str, Any]] | None) -> list[int] | None:
    """The block numbers of rules, by which tests tell them apart."""
    return rules and [each["block_num"] for each in rules]
