"""What ops refuse, as one table: each row says when, with which error, and what to do instead.

Configs, the gates that ops pass before they take memory, the command line and docs/support-matrix.md read it. Rows are
asked about a `Case`: a config, the arch it would run on and, for v2, the kernel backend.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from mori import archs
from mori.errors import UnsupportedDtype

from .dtypes import DTYPE_SUFFIX, dtype_names


class Case(NamedTuple):
    """What a row is asked about. `backend`: None while none is chosen, as in a config."""

    config: Any
    arch: archs.Arch
    backend: str | None = None


class Restriction(NamedTuple):
    """One thing that is refused.

    stage: "config" (v2: when it is made; v1: when an op is built from it), "construction" of an op, or "call".
    backends: those it holds for; empty for all. statement: what holds, for readers of the docs.
    message, remedy: formatted with c (the config), arch, backend and value (`value` of the case); `message` names
    `fields` with what they are.
    source: where the rule comes from.
    """

    id: str
    api: str
    stage: str
    statement: str
    fields: tuple[str, ...]
    broken: Callable[[Case], bool]
    message: str
    remedy: str
    source: str
    error: type[Exception] = ValueError
    backends: tuple[str, ...] = ()
    value: Callable[[Case], object] = lambda case: None

    def applies(self, case: Case) -> bool:
        return (not self.backends or case.backend in self.backends) and self.broken(case)

    def explain(self, case: Case) -> str:
        """The message and the remedy with the numbers of the case."""
        facts = {"c": case.config, "arch": case.arch, "backend": case.backend, "value": self.value(case)}
        return f"{self.message}: {self.remedy}".format(**facts)


QUANT_TYPES = ("none", "fp8_direct_cast", "fp8_blockwise", "fp4_blockwise", "fp4_blockwise_fp32")
FP4_QUANT_TYPES = ("fp4_blockwise", "fp4_blockwise_fp32")
# Those that leave the dtype of a dispatch free: rows are quantised before they travel back, whatever came.
PUSH_QUANT_TYPES = (*FP4_QUANT_TYPES, "fp8_blockwise")
INTERNODE_KERNELS = ("auto", "v2", "v2_ll")
COMBINE_MODES = ("gather", "scatter")

_FP8_FLAVOURS = {torch.float8_e4m3fn: "ocp", torch.float8_e4m3fnuz: "fnuz"}


def _is_fp4(dtype: torch.dtype) -> bool:
    return DTYPE_SUFFIX.get(dtype) == "fp4"


def _has_other_combine(case: Case) -> bool:
    return bool(case.config.dispatch_dtype != case.config.combine_dtype)


def _exceeds(number: int, most: int | None) -> bool:
    return most is not None and number > most


def _widest_element(case: Case) -> int:
    return int(max(case.config.elem_size, case.config.combine_elem_size))


_CONFIG = "config"
V2_CONFIG: tuple[Restriction, ...] = (
    Restriction(
        "v2-gpu-per-node",
        "v2",
        _CONFIG,
        "`gpu_per_node` divides `world_size`",
        ("gpu_per_node", "world_size"),
        lambda x: x.config.gpu_per_node <= 0 or x.config.world_size % x.config.gpu_per_node != 0,
        "gpu_per_node {c.gpu_per_node} does not divide world_size {c.world_size}",
        "set it to the number of ranks on one node, None for all",
        "contract of the config",
    ),
    Restriction(
        "v2-num-qp-per-pe",
        "v2",
        _CONFIG,
        "`num_qp_per_pe` is at least 1",
        ("num_qp_per_pe",),
        lambda x: x.config.num_qp_per_pe < 1,
        "num_qp_per_pe is {c.num_qp_per_pe}",
        "set it to 1 or more",
        "contract of the config",
    ),
    Restriction(
        "v2-leg-dtypes",
        "v2",
        _CONFIG,
        "`dispatch_data_type` and `combine_data_type` are given together or not at all",
        ("dispatch_data_type", "combine_data_type"),
        lambda x: (x.config.dispatch_data_type is None) != (x.config.combine_data_type is None),
        "dispatch_data_type is {c.dispatch_data_type} and combine_data_type is {c.combine_data_type}",
        "give both, or neither and data_type for the two of them",
        "contract of the config",
    ),
    Restriction(
        "v2-quant-type",
        "v2",
        _CONFIG,
        "`quant_type` is one of " + ", ".join(QUANT_TYPES),
        ("quant_type",),
        lambda x: x.config.quant_type not in QUANT_TYPES,
        "quant_type is {c.quant_type!r}",
        "use one of " + ", ".join(QUANT_TYPES),
        "contract of the config",
    ),
    Restriction(
        "v2-internode-kernel",
        "v2",
        _CONFIG,
        "`internode_kernel` is one of " + ", ".join(INTERNODE_KERNELS),
        ("internode_kernel",),
        lambda x: x.config.internode_kernel not in INTERNODE_KERNELS,
        "internode_kernel is {c.internode_kernel!r}",
        "use one of " + ", ".join(INTERNODE_KERNELS),
        "guide: choice by the tokens of the call",
    ),
    Restriction(
        "v2-auto-ll-tokens",
        "v2",
        _CONFIG,
        "`internode_auto_ll_max_tokens` is not negative",
        ("internode_auto_ll_max_tokens",),
        lambda x: x.config.internode_auto_ll_max_tokens < 0,
        "internode_auto_ll_max_tokens is {c.internode_auto_ll_max_tokens}",
        "set it to 0 or more",
        "contract of the config",
    ),
    Restriction(
        "v2-combine-mode",
        "v2",
        _CONFIG,
        "`combine_mode` is gather or scatter",
        ("combine_mode",),
        lambda x: x.config.combine_mode not in COMBINE_MODES,
        "combine_mode is {c.combine_mode!r}",
        "use gather or scatter",
        "contract of the config",
    ),
    Restriction(
        "v2-quant-between-nodes",
        "v2",
        _CONFIG,
        "no quantised combine between nodes, whatever the backend",
        ("quant_type", "world_size", "gpu_per_node"),
        lambda x: x.config.is_internode and x.config.quant_type != "none",
        "quant_type {c.quant_type!r} with world_size {c.world_size} over gpu_per_node {c.gpu_per_node}",
        'between nodes it must be "none"',
        "guide: restriction of the path between nodes",
    ),
    Restriction(
        "v2-payload-dtype",
        "v2",
        _CONFIG,
        "rows are " + dtype_names(DTYPE_SUFFIX),
        ("dispatch_dtype", "combine_dtype"),
        lambda x: not {x.config.dispatch_dtype, x.config.combine_dtype} <= DTYPE_SUFFIX.keys(),
        "rows of {c.dispatch_dtype} in dispatch and {c.combine_dtype} in combine",
        "use two of " + dtype_names(DTYPE_SUFFIX),
        "contract of the config",
        error=UnsupportedDtype,
    ),
    Restriction(
        "v2-row-bytes",
        "v2",
        _CONFIG,
        "rows of dispatch are a multiple of 16 bytes",
        ("hidden_dim", "token_nbytes"),
        lambda x: x.config.token_nbytes % 16 != 0 or (x.config.is_fp4 and x.config.hidden_dim % 2 != 0),
        "hidden_dim {c.hidden_dim}: dispatch rows have token_nbytes {c.token_nbytes}, no multiple of 16",
        "pad hidden_dim, or use the v1 API, which takes rows of any size",
        "contract of the config; v1 has no such rule",
    ),
    Restriction(
        "v2-two-dtypes",
        "v2",
        _CONFIG,
        "dispatch and combine of different dtypes: without standard-MoE, and with a gather or a block-wise combine",
        ("dispatch_dtype", "combine_dtype", "combine_mode", "quant_type", "enable_std_moe"),
        lambda x: (
            _has_other_combine(x)
            and (
                x.config.enable_std_moe
                or not (
                    (x.config.combine_mode == "gather" and x.config.quant_type == "none")
                    or x.config.quant_type in PUSH_QUANT_TYPES
                )
            )
        ),
        "dispatch of {c.dispatch_dtype} and combine of {c.combine_dtype} with combine_mode {c.combine_mode!r}, "
        "quant_type {c.quant_type!r} and enable_std_moe {c.enable_std_moe}",
        'use combine_mode="gather", quant_type="none" and enable_std_moe=False, or one dtype',
        "contract of the config",
    ),
    Restriction(
        "v2-combine-fp4-of-others",
        "v2",
        _CONFIG,
        "combine is not fp4 where dispatch is something else",
        ("dispatch_dtype", "combine_dtype"),
        lambda x: _has_other_combine(x) and _is_fp4(x.config.combine_dtype),
        "dispatch of {c.dispatch_dtype} and combine of {c.combine_dtype}",
        "combine in bfloat16 or float32, or dispatch fp4 too",
        "contract of the config",
    ),
    Restriction(
        "v2-combine-row-bytes",
        "v2",
        _CONFIG,
        "rows of combine are a multiple of 16 bytes",
        ("hidden_dim", "combine_token_nbytes"),
        lambda x: x.config.combine_token_nbytes % 16 != 0,
        "hidden_dim {c.hidden_dim}: combine rows have combine_token_nbytes {c.combine_token_nbytes}, no multiple of 16",
        "pad hidden_dim, or use the v1 API, which takes rows of any size",
        "contract of the config; v1 has no such rule",
    ),
    Restriction(
        "v2-max-token-type-size",
        "v2",
        _CONFIG,
        "`max_token_type_size` covers the wider leg",
        ("max_token_type_size",),
        lambda x: x.config.max_token_type_size is not None and x.config.max_token_type_size < _widest_element(x),
        "max_token_type_size is {c.max_token_type_size}, elements have up to {value} bytes",
        "set it to {value} or more, or to None",
        "contract of the config",
        value=_widest_element,
    ),
    Restriction(
        "v2-fp8-flavour",
        "v2",
        _CONFIG,
        "fp8 rows that are added up have the arch's flavour; moving either is possible everywhere",
        ("combine_dtype",),
        lambda x: x.config.combine_dtype in _FP8_FLAVOURS and _FP8_FLAVOURS[x.config.combine_dtype] not in x.arch.fp8,
        "combine_dtype {c.combine_dtype} cannot be added up on {arch.name}, which has fp8 of flavour {value}",
        "combine in the other flavour, or in bfloat16 with dispatch_data_type fp8 and combine_data_type bfloat16",
        "guide: the representation of fp8 differs by target",
        value=lambda x: " and ".join(sorted(x.arch.fp8)),
    ),
    Restriction(
        "v2-world-size-of-a-block",
        "v2",
        _CONFIG,
        "on one node a block of combine has a thread for every rank",
        ("world_size",),
        lambda x: not x.config.is_internode and _exceeds(x.config.world_size, x.config.combine_threads),
        "world_size {c.world_size} exceeds the {c.combine_threads} threads of the smallest combine block",
        "raise combine_warp_num_per_block, and the warps of combine in every bucket of schedule",
        "contract of the config",
    ),
)


TABLE: tuple[Restriction, ...] = V2_CONFIG


def broken(api: str, stage: str, case: Case) -> Iterator[Restriction]:
    """The rows of that API and stage that refuse the case, in the order of the table."""
    return (row for row in TABLE if row.api == api and row.stage == stage and row.applies(case))


def require(api: str, stage: str, case: Case) -> None:
    """Raises the error of the first row that refuses the case."""
    for row in broken(api, stage, case):
        raise row.error(f"{type(case.config).__name__}: {row.explain(case)}")


def unsupported(config: Any, backend: str, arch: str) -> tuple[str, ...]:
    """Why an op of v2 with this backend cannot serve a config on an arch; empty if it can."""
    case = Case(config, archs.find(arch), backend)
    refusing = [*broken("v2", "config", case)] or broken("v2", "construction", case)
    return tuple(row.explain(case) for row in refusing)
