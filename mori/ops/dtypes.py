"""Which element types rows may have. fp8, fp4 and e8m0 types are listed only as far as the installed torch has them."""

from __future__ import annotations

import torch

# Also the list of payload dtypes; the suffixes name kernels and tuning rules.
_SUFFIX_BY_NAME = {
    "float32": "f32",
    "bfloat16": "bf16",
    "float8_e4m3fn": "fp8_ocp",
    "float8_e4m3fnuz": "fp8_fnuz",
    "float4_e2m1fn_x2": "fp4",
}
DTYPE_SUFFIX: dict[torch.dtype, str] = {
    getattr(torch, name): suffix for name, suffix in _SUFFIX_BY_NAME.items() if hasattr(torch, name)
}

TOPK_IDX_DTYPE = torch.int32
# uint32 ids are taken as they are: same size, and ids of 2^31 and more are no expert either way.
INDEX_DTYPES = frozenset({torch.int32, torch.uint32})


def dtype_names(dtypes: object) -> str:
    """ "bfloat16, float32": for messages."""
    return ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))  # type: ignore[attr-defined]
