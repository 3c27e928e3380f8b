"""What the tensors of a call must be, as tables of rules.

A rule sees one argument. The first broken rule of the table raises, before anything is launched, with the numbers of
the call, the numbers of the op and the remedy. Whether a call is legal depends on the metadata of its tensors only
(the few rules that need more are methods of the op), so the op checks each combination of metadata once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from mori.errors import UnsupportedDtype

from .config import Limits
from .dtypes import DTYPE_SUFFIX, INDEX_DTYPES, dtype_names


class Argument(NamedTuple):
    """One tensor of a call, and what it is measured against. `tokens` is the row count of the call's `input`."""

    call: str
    name: str
    tensor: torch.Tensor
    limits: Any  # what the rules compare with: `Limits` in v1
    device: torch.device
    tokens: int

    @property
    def rows(self) -> int:
        return self.tensor.shape[0]

    @property
    def columns(self) -> int:
        return self.tensor.shape[1] if self.tensor.dim() > 1 else 0

    @property
    def row_bytes(self) -> int:
        return self.columns * self.tensor.dtype.itemsize


class Rule(NamedTuple):
    error: type[Exception]
    holds: Callable[[Argument], bool]
    # Formatted with a (the argument), t (its tensor) and l (the limits of the op).
    message: str


IS_MATRIX = Rule(ValueError, lambda a: a.tensor.dim() == 2, "must have 2 dimensions, got {t.ndim}: shape {shape}")
ON_DEVICE = Rule(
    ValueError,
    lambda a: a.tensor.device == a.device,
    "is on device {t.device}, the op is on {a.device}",
)
IS_CONTIGUOUS = Rule(
    ValueError,
    lambda a: a.tensor.layout is torch.strided and a.tensor.is_contiguous(),
    "with shape {shape} is not contiguous: pass {a.name}.contiguous()",
)
HAS_MEMORY = Rule(
    ValueError,
    lambda a: a.tensor.numel() == 0 or a.tensor.data_ptr() != 0,
    "with shape {shape} has no memory, as tensors of FakeTensorMode have none: pass a tensor with data",
)
PLACEMENT = (ON_DEVICE, IS_MATRIX, IS_CONTIGUOUS)

_HAS_COLUMNS = Rule(ValueError, lambda a: a.columns > 0, "has rows of 0 elements: a row needs at least 1")
_FITS_HIDDEN = Rule(
    ValueError,
    lambda a: a.columns <= a.limits.hidden_dim,
    "has {a.columns} columns, the op was built for at most hidden_dim {l.hidden_dim}",
)
_FITS_ROW_BYTES = Rule(
    ValueError,
    lambda a: a.row_bytes <= a.limits.max_row_bytes,
    "has rows of {a.row_bytes} bytes, the op was built for at most {l.max_row_bytes} "
    "(hidden_dim x max_token_type_size): raise max_token_type_size to {t.itemsize}",
)
_ROW_SIZE = (_HAS_COLUMNS, _FITS_HIDDEN, _FITS_ROW_BYTES)

IS_FLOAT32 = Rule(
    TypeError, lambda a: a.tensor.dtype == torch.float32, "must be float32, got {t.dtype}: pass {a.name}.float()"
)
TOPK_COLUMNS = Rule(
    ValueError,
    lambda a: a.columns == a.limits.topk,
    "has {a.columns} columns, the op was built with num_experts_per_token {l.topk}",
)
ROW_PER_TOKEN = Rule(
    ValueError, lambda a: a.rows == a.tokens, "has {a.rows} rows, input has {a.tokens}: pass one row per token"
)
IDS_ARE_INT32 = Rule(
    TypeError,
    lambda a: a.tensor.dtype in INDEX_DTYPES,
    "must be int32 (or uint32), got {t.dtype}: pass {a.name}.to(torch.int32)",
)

# A tensor without elements in its rows means "no scales", whatever its dtype.
SCALES_OF_TOKENS = (
    ON_DEVICE,
    Rule(ValueError, lambda a: a.tensor.dim() == 2 or a.tensor.numel() == 0, IS_MATRIX.message),
    IS_CONTIGUOUS,
    Rule(ValueError, lambda a: a.columns == 0 or a.rows == a.tokens, ROW_PER_TOKEN.message),
)

DISPATCH_RULES: dict[str, tuple[Rule, ...]] = {
    "input": (
        Rule(
            UnsupportedDtype,
            lambda a: a.tensor.dtype in DTYPE_SUFFIX,
            "has dtype {t.dtype}, which no kernel moves; supported: " + dtype_names(DTYPE_SUFFIX),
        ),
        *PLACEMENT,
        Rule(
            ValueError,
            lambda a: a.rows <= a.limits.max_tokens,
            "has {a.rows} rows, the op was built for at most max_num_inp_token_per_rank {l.max_tokens}",
        ),
        *_ROW_SIZE,
    ),
    "weights": (IS_FLOAT32, *PLACEMENT, ROW_PER_TOKEN, TOPK_COLUMNS),
    "scales": (
        *SCALES_OF_TOKENS,
        Rule(
            ValueError,
            lambda a: a.columns in (0, a.limits.scale_dim),
            "has {a.columns} columns, the op was built for scale_dim {l.scale_dim} "
            "(0 when scale_dim or scale_type_size is 0): pass that many, or None",
        ),
        Rule(
            TypeError,
            lambda a: a.columns == 0 or a.tensor.dtype.itemsize == a.limits.scale_type_size,
            "has elements of {t.itemsize} bytes ({t.dtype}), the op was built with scale_type_size {l.scale_type_size}",
        ),
    ),
    "indices": (IDS_ARE_INT32, *PLACEMENT, ROW_PER_TOKEN, TOPK_COLUMNS),
}

COMBINE_RULES: dict[str, tuple[Rule, ...]] = {
    "input": (
        Rule(
            UnsupportedDtype,
            lambda a: a.tensor.dtype in DTYPE_SUFFIX,
            "has dtype {t.dtype}, which no kernel adds up; supported: " + dtype_names(DTYPE_SUFFIX),
        ),
        *PLACEMENT,
        *_ROW_SIZE,
    ),
    # Any number of rows: missing ones count as absent, surplus ones are not read.
    "weights": (IS_FLOAT32, *PLACEMENT, TOPK_COLUMNS),
    # The row count is compared with the last dispatch, which is no property of the tensor.
    "indices": (IDS_ARE_INT32, *PLACEMENT, TOPK_COLUMNS),
}

PACKED_RULES: dict[str, tuple[Rule, ...]] = {
    "input": (
        COMBINE_RULES["input"][0],
        ON_DEVICE,
        Rule(ValueError, lambda a: a.tensor.dim() == 3, "must have 3 dimensions, got {t.ndim}: shape {shape}"),
        IS_CONTIGUOUS,
        Rule(
            ValueError,
            lambda a: (
                a.tensor.shape[0] == a.limits.experts_per_rank
                and a.tensor.shape[1] == a.limits.world_size * a.limits.max_tokens
            ),
            "has shape {shape}, must be [num_experts_per_rank {l.experts_per_rank}, world_size x "
            "max_num_inp_token_per_rank, h]: pass rows in the places that the forward conversion gave them",
        ),
    ),
    "indices": COMBINE_RULES["indices"],
}

# What may be None, and what to say when something else is.
OPTIONAL = frozenset({"weights", "scales"})


def check_arguments(
    call: str,
    rules: dict[str, tuple[Rule, ...]],
    tensors: Mapping[str, torch.Tensor | None],
    limits: Any,
    device: torch.device,
) -> None:
    """Hold every tensor against its rules; raise the error of the first one that is broken."""
    tokens = 0
    for name, tensor in tensors.items():
        if tensor is None and name in OPTIONAL:
            continue
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{call}: {name} must be a torch.Tensor, got {type(tensor).__name__}")
        argument = Argument(call, name, tensor, limits, device, tokens)
        for rule in (*rules[name], HAS_MEMORY):
            if not rule.holds(argument):
                text = rule.message.format(a=argument, t=tensor, l=limits, shape=tuple(tensor.shape))
                raise rule.error(f"{call}: {name} {text}")
        if name == "input":
            tokens = tensor.shape[0]


def check_expert_ids(indices: torch.Tensor, limits: Any) -> None:
    """ValueError naming token and column of the first id that is neither -1 nor in [0, W*E). Synchronises."""
    experts = limits.world_size * limits.experts_per_rank
    legal = (indices >= -1) & (indices < experts)
    if bool(legal.all()):
        return
    token, column = (int(place) for place in (~legal).nonzero()[0])
    raise ValueError(
        f"dispatch: indices[{token}, {column}] is {int(indices[token, column])}; legal are -1 (no expert) and "
        f"0..{experts - 1} ({limits.world_size} ranks x {limits.experts_per_rank} experts). "
        "Without MORI_EP_VALIDATE such an id is dropped and counted in op.stats()"
    )


def check_combine_indices(indices: torch.Tensor, dispatched_tokens: int) -> None:
    """ValueError unless `indices` has one row per token that this rank gave to its last dispatch."""
    rows = indices.shape[0]
    if rows != dispatched_tokens:
        raise ValueError(
            f"combine: indices has {rows} rows but this rank dispatched {dispatched_tokens} tokens: pass the ids given "
            "to dispatch, not the received ones it returned (out_idx); MORI_EP_LENIENT_INDICES=1 ignores this argument"
        )


def check_registered_rows(dtype: torch.dtype, columns: int, limits: Limits) -> None:
    """TypeError or ValueError unless rows of `columns` elements of `dtype` fit the registered combine buffer."""
    if dtype not in DTYPE_SUFFIX:
        raise UnsupportedDtype(f"rows cannot be {dtype}; supported: " + dtype_names(DTYPE_SUFFIX))
    if not 0 < columns <= limits.hidden_dim:
        raise ValueError(f"hidden_dim {columns} is outside 1..{limits.hidden_dim}, the hidden_dim of the op")
    if columns * dtype.itemsize > limits.max_row_bytes:
        raise ValueError(
            f"rows of {columns} x {dtype} have {columns * dtype.itemsize} bytes, the op was built for at most "
            f"{limits.max_row_bytes} (hidden_dim x max_token_type_size): raise max_token_type_size to {dtype.itemsize}"
        )
