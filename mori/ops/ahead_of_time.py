"""Compiling the kernels of ops before there is a program that builds them, for GPUs that need not be there."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import torch

from mori import archs, jit

from . import device_code
from .config import EpDispatchCombineConfig, check_config
from .construction import shape_of
from .kernel_types import QUANT_NAMES, EpDispatchCombineKernelType, normalize_quant_type

_TABLE = Path("kernels/table.hpp")
_FIELDS = {field.name: field for field in dataclasses.fields(EpDispatchCombineConfig)}
# Of fields that a config must give; what is left out here has no usual value.
_USUAL: dict[str, Any] = {
    "data_type": torch.bfloat16,
    "rank": 0,
    "scale_dim": 0,
    "scale_type_size": 1,
    "max_token_type_size": 2,
}
# Kernels are the same whatever these are.
_INDIFFERENT = {"data_type", "rank", "warp_num_per_block", "block_num", "use_external_inp_buf"}


def parse_config(text: str) -> EpDispatchCombineConfig:
    """A config of "world_size=8,hidden_dim=7168,...". ValueError for a field that there is not, or that is missing."""
    values = dict(_USUAL)
    for part in filter(None, text.replace(" ", "").split(",")):
        name, _, value = part.partition("=")
        if name not in _FIELDS or name in _INDIFFERENT:
            accepted = ", ".join(field for field in _FIELDS if field not in _INDIFFERENT)
            raise ValueError(f"{part!r}: expected NAME=VALUE with one of {accepted}")
        try:
            values[name] = _parse_value(name, value)
        except (ValueError, KeyError):
            raise ValueError(f"{part!r}: {value!r} is no value of {name}") from None
    missing = [name for name, field in _FIELDS.items() if field.default is dataclasses.MISSING and name not in values]
    if missing:
        raise ValueError(f"the config {text!r} lacks {', '.join(missing)}")
    return EpDispatchCombineConfig(**values)


def _parse_value(name: str, value: str) -> object:
    if name == "kernel_type":
        return EpDispatchCombineKernelType[value]
    if name == "quant_type":
        return normalize_quant_type(value)
    return int(value)


_DEEPSEEK = "world_size=8,hidden_dim=7168,num_experts_per_rank=32,num_experts_per_token=8"
# One node of 8 GPUs, 256 experts, 8 per token: decoding and prefill, rows in bfloat16 and in fp8 with scales.
SHIPPED = (
    f"{_DEEPSEEK},max_num_inp_token_per_rank=128",
    f"{_DEEPSEEK},max_num_inp_token_per_rank=4096",
    f"{_DEEPSEEK},max_num_inp_token_per_rank=4096,scale_dim=56,scale_type_size=4",
)


def kernel_names() -> tuple[str, ...]:
    """All kernels, as csrc/kernels/table.hpp lists them."""
    text = (jit.source_root() / _TABLE).read_text(encoding="utf-8")
    return tuple(re.findall(r"^ +KERNEL\((\w+),", text, flags=re.MULTILINE))


def specs(config: EpDispatchCombineConfig, arch: str, only: Iterable[str] = ()) -> list[jit.Spec]:
    """What an op of this config may run on an arch: no other quantisation, and nothing that the arch has no kernels for
    (`archs.runs_on`). ValueError for an unknown kernel or arch, and the errors of a config that no op can have."""
    names = kernel_names()
    if unknown := set(only).difference(names):
        raise ValueError(f"no kernel {', '.join(sorted(unknown))}: there are {', '.join(names)}")
    limits = check_config(config, arch)
    others = {f"combine_{name}" for member, name in QUANT_NAMES.items() if member is not limits.quant_type}
    wanted = set(only or names) - others
    shape = shape_of(config, limits)
    row = archs.find(arch)
    return [device_code.spec(name, shape, arch) for name in names if name in wanted and archs.runs_on(name, row)]


def compile_all(
    all_specs: Iterable[jit.Spec], workers: int, compiler: str | None = None
) -> Iterator[tuple[jit.Spec, Exception | None]]:
    """Fills the cache, `workers` at a time; each spec, as it is done, with what went wrong."""
    with ThreadPoolExecutor(workers) as pool:
        pending = {pool.submit(jit.compile, spec, compiler=compiler): spec for spec in all_specs}
        for done in as_completed(pending):
            error = done.exception()
            if error is not None and not isinstance(error, Exception):
                raise error
            yield pending.pop(done), error
