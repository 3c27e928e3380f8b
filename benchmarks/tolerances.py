"""How far a combine that rounds on the way may be from the sum in float32: the bounds that users hold releases to.

Wide on purpose. They are a second, independent check beside exact expected values, and the only one where there are
none.
"""

from __future__ import annotations

import torch

RELATIVE_AND_ABSOLUTE = {"none": 1e-2, "fp8_direct_cast": 1e-1, "fp8_blockwise": 7e-2}
"""By quant_type: |actual - expected| <= this x (1 + |expected|)."""
WEIGHTS = 1e-5
"""Likewise for combined weights."""
LARGEST_FP4 = 6.0


def block_maxima(rows: torch.Tensor, scales: int) -> torch.Tensor:
    """float32 [n, h]: for every element of [n, h] rows the largest magnitude of its block, `scales` blocks per row."""
    columns = rows.shape[1]
    length = -(-columns // scales)
    values = torch.nn.functional.pad(rows.float().abs(), (0, length * scales - columns))
    return values.view(len(rows), scales, length).amax(dim=2).repeat_interleave(length, dim=1)[:, :columns]


def bound(quant_type: str, expected: torch.Tensor, maxima: torch.Tensor | None = None) -> torch.Tensor:
    """float32 [n, h]: the largest legal distance from `expected`.

    maxima: for fp4_blockwise only, the sum of `block_maxima` over the rows that were added up.
    """
    magnitude = expected.float().abs()
    if quant_type == "fp4_blockwise":
        if maxima is None:
            raise ValueError("the bound of fp4_blockwise needs the block maxima of the rows that were added up")
        # Half a step of the widest interval of e2m1 per row.
        return maxima / LARGEST_FP4 + 5e-2 * magnitude + 1e-2
    return RELATIVE_AND_ABSOLUTE[quant_type] * (1 + magnitude)


def require_close(
    what: str, actual: torch.Tensor, expected: torch.Tensor, quant_type: str, maxima: torch.Tensor | None = None
) -> None:
    """RuntimeError naming the element of [n, h] that is farthest outside its bound."""
    distance = (actual.float() - expected.float()).abs()
    excess = torch.nan_to_num(distance, nan=torch.inf) - bound(quant_type, expected, maxima)
    if excess.numel() == 0 or float(excess.max()) <= 0:
        return
    row, column = divmod(int(excess.argmax()), excess.shape[1])
    raise RuntimeError(
        f"{what}: {int((excess > 0).sum())} of {excess.numel()} values are too far from the exact sum with quant_type "
        f"{quant_type}; worst is row {row} column {column}: {float(actual[row, column])}, "
        f"expected {float(expected[row, column])}"
    )
