"""Whether an op of some config can run on some arch, and if not, why: `python -m mori.support`, `mori support`.

Needs no GPU: the rules of `mori.ops.restrictions` are asked, nothing is built.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from mori import archs, target
from mori.ops import restrictions
from mori.ops.config import EpDispatchCombineConfig as ConfigV1
from mori.ops.config import check_config
from mori.ops.dispatch_combine_v2 import EpDispatchCombineConfig as ConfigV2
from mori.ops.dispatch_combine_v2 import backends
from mori.ops.dispatch_combine_v2.config import backend_of
from mori.ops.dtypes import DTYPE_SUFFIX
from mori.ops.kernel_types import EpDispatchCombineKernelType, normalize_quant_type
from mori.ops.kernels import combine_kernel
from mori.ops.restrictions import Case, Restriction

APIS = ("v1", "v2")
# "fp8" is the flavour that the arch adds up.
DTYPES = {suffix: dtype for dtype, suffix in DTYPE_SUFFIX.items()}
DTYPE_NAMES = ("fp8", *DTYPES)


@dataclass(frozen=True)
class Question:
    """What an op would be like. Names and defaults as in the configs; dtypes by their names in DTYPE_NAMES.

    arch: None for that of this process. backend: of v2, None for the one that an op would get. kernel_type, zero_copy:
    of v1. combine_mode, features: of v2; features are names in `restrictions_v2.FEATURES`.
    """

    api: str = "v1"
    arch: str | None = None
    backend: str | None = None
    dispatch_dtype: str = "bf16"
    combine_dtype: str = "bf16"
    quant_type: str = "none"
    kernel_type: str = "IntraNode"
    zero_copy: bool = False
    combine_mode: str = "gather"
    world_size: int = 8
    gpu_per_node: int | None = None
    hidden_dim: int = 7168
    max_tokens: int = 4096
    experts_per_rank: int = 32
    topk: int = 8
    scale_dim: int = 0
    scale_type_size: int = 4
    max_total_recv_tokens: int = 0
    enable_std_moe: bool = False
    features: tuple[str, ...] = ()

    def element_type(self, name: str, arch: archs.Arch) -> torch.dtype:
        """ValueError for a name that is not in DTYPE_NAMES."""
        if name == "fp8":
            name = "fp8_ocp" if "ocp" in arch.fp8 else "fp8_fnuz"
        if name not in DTYPES:
            raise ValueError(f"dtype {name!r} is unknown: there are {', '.join(DTYPE_NAMES)}")
        return DTYPES[name]

    def shape(self) -> dict[str, Any]:
        """The fields that the configs of both APIs call the same."""
        return {
            "rank": 0,
            "world_size": self.world_size,
            "hidden_dim": self.hidden_dim,
            "max_num_inp_token_per_rank": self.max_tokens,
            "num_experts_per_rank": self.experts_per_rank,
            "num_experts_per_token": self.topk,
            "scale_dim": self.scale_dim,
            "scale_type_size": self.scale_type_size,
            "max_total_recv_tokens": self.max_total_recv_tokens,
            "gpu_per_node": self.world_size if self.gpu_per_node is None else self.gpu_per_node,
            "quant_type": self.quant_type,
        }


class Reason(NamedTuple):
    """`rule`: id in docs/support-matrix.md, empty for a value that is none at all. `error`: the exception's name."""

    rule: str
    error: str
    text: str


class Answer(NamedTuple):
    """`backend`: None for v1."""

    supported: bool
    api: str
    backend: str | None
    arch: str
    reasons: tuple[Reason, ...]

    def describe(self) -> str:
        where = f"{self.api}{f' with backend {self.backend}' if self.backend else ''} on {self.arch}"
        refusals = (f"\n  {reason.text}{f' [{reason.rule}]' if reason.rule else ''}" for reason in self.reasons)
        return f"{where}: yes" if self.supported else f"{where}: no{''.join(refusals)}"


def answer(question: Question) -> Answer:
    """ValueError for names of apis, archs, backends, dtypes or features that there are not."""
    arch = archs.find(question.arch or target.current().arch)
    if question.api not in APIS:
        raise ValueError(f"api {question.api!r} is unknown: there are {', '.join(APIS)}")
    ask: Callable[[Question, archs.Arch], tuple[str | None, list[Reason]]] = _v1 if question.api == "v1" else _v2
    backend, reasons = ask(question, arch)
    return Answer(not reasons, question.api, backend, arch.name, tuple(reasons))


def _v1(question: Question, arch: archs.Arch) -> tuple[None, list[Reason]]:
    dispatch, combine = (question.element_type(n, arch) for n in (question.dispatch_dtype, question.combine_dtype))
    if question.kernel_type not in EpDispatchCombineKernelType.__members__:
        names = ", ".join(EpDispatchCombineKernelType.__members__)
        raise ValueError(f"kernel_type {question.kernel_type!r} is unknown: there are {names}")
    config = ConfigV1(
        data_type=dispatch,
        max_token_type_size=max(dispatch.itemsize, combine.itemsize),
        kernel_type=EpDispatchCombineKernelType[question.kernel_type],
        use_external_inp_buf=not question.zero_copy,
        **question.shape(),
    )
    try:
        check_config(config, arch.name)
    except (TypeError, ValueError, NotImplementedError) as error:
        return None, [_reason_of(error)]
    kernel = combine_kernel(combine, normalize_quant_type(question.quant_type), question.zero_copy)
    case = Case(config, arch, kernel=kernel, dtype=combine, external=not question.zero_copy)
    return None, _reasons(restrictions.broken("v1", "call", case), case)


def _v2(question: Question, arch: archs.Arch) -> tuple[str | None, list[Reason]]:
    dispatch, combine = (question.element_type(n, arch) for n in (question.dispatch_dtype, question.combine_dtype))
    if unknown := set(question.features).difference(restrictions.FEATURES):
        raise ValueError(f"no feature {', '.join(sorted(unknown))}: there are {', '.join(restrictions.FEATURES)}")
    if question.backend not in (None, *backends.known()):
        raise ValueError(f"backend {question.backend!r} is unknown: there are {', '.join(backends.known())}")
    with target.assume(arch.name):
        try:
            config = ConfigV2(
                dispatch_data_type=dispatch,
                combine_data_type=combine,
                combine_mode=question.combine_mode,
                enable_std_moe=question.enable_std_moe,
                kernel_backend=question.backend,
                **question.shape(),
            )
        except (TypeError, ValueError) as error:
            return question.backend, [_reason_of(error)]
        backend = backend_of(config)
    case = Case(config, arch, backend)
    reasons = _reasons(restrictions.refusing(config, backend, arch.name), case)
    for feature in question.features:
        asked = case._replace(feature=feature)
        reasons += _reasons(restrictions.broken("v2", "call", asked), asked)
    return backend, reasons


def _reasons(rows: Iterator[Restriction] | Sequence[Restriction], case: Case) -> list[Reason]:
    return [Reason(row.id, row.error.__name__, row.explain(case)) for row in rows]


def _reason_of(error: Exception) -> Reason:
    return Reason(getattr(error, "rule", ""), type(error).__name__, str(error))


if __name__ == "__main__":
    import sys

    from mori.cli import app

    app(["support", *sys.argv[1:]], prog_name="mori")
