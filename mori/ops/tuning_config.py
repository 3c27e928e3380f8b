"""Tuning files by name: which file holds the rules of an arch, kernel type and world size, and how rules get into it.

`tuning_rules` says what a rule is and which one a call gets, `tuning_file` how files are read and written.
docs/tuning.md is the user's view.
"""

from __future__ import annotations

import functools
import logging
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch

from mori import env

from .kernel_types import (
    QUANT_NAMES,
    EpDispatchCombineKernelType,
    EpDispatchCombineQuantType,
    normalize_kernel_type,
    normalize_quant_type,
)
from .tuning_file import read_rules, save_rule
from .tuning_rules import (
    CONFIG_STR_TO_DTYPE,
    CONFIG_STR_TO_SHORT_NAME,
    DTYPE_TO_CONFIG_STR,
    LaunchParams,
    Rule,
    check_phase,
    lookup,
)

__all__ = [
    "CONFIG_STR_TO_DTYPE",
    "CONFIG_STR_TO_SHORT_NAME",
    "DTYPE_TO_CONFIG_STR",
    "LaunchParams",
    "TuningConfigManager",
    "build_config_filename",
    "config_path_for",
    "detect_gpu_model",
    "dtype_to_config_str",
    "kernel_type_to_config_str",
    "lookup",
    "quant_type_to_config_str",
]

CONFIG_DIR = Path(__file__).parent / "tuning_configs"

_PCI_DEVICES = Path("/sys/bus/pci/devices")
GPU_MODELS = {0x74A1: "mi300x", 0x74A5: "mi325x", 0x74A2: "mi308x", 0x75A0: "mi350x", 0x75A3: "mi355x"}

_log = logging.getLogger(__name__)


def kernel_type_to_config_str(kernel_type: EpDispatchCombineKernelType | str) -> str:
    """The name of a kernel type given as a member or by that name. ValueError lists the names."""
    if not isinstance(kernel_type, str):
        return normalize_kernel_type(kernel_type).name
    if kernel_type not in EpDispatchCombineKernelType.__members__:
        names = ", ".join(EpDispatchCombineKernelType.__members__)
        raise ValueError(f"unknown kernel_type {kernel_type!r}, expected one of {names}")
    return kernel_type


def quant_type_to_config_str(quant_type: EpDispatchCombineQuantType | str) -> str:
    """The config string of a quant type: of a member, or of a string in any case. ValueError lists the strings."""
    if isinstance(quant_type, str) and quant_type.strip().lower() == "none_":
        return "none"
    return QUANT_NAMES[normalize_quant_type(quant_type)]


def dtype_to_config_str(dtype: torch.dtype) -> str:
    """How rules spell an element type; KeyError for one that they cannot name, such as float32."""
    if dtype not in DTYPE_TO_CONFIG_STR:
        raise KeyError(f"tuning rules cannot name {dtype}; they know {', '.join(DTYPE_TO_CONFIG_STR.values())}")
    return DTYPE_TO_CONFIG_STR[dtype]


@functools.cache
def detect_gpu_model() -> str | None:
    """The product name of the current AMD GPU, like "mi300x"; None for one that is not known and on other targets.

    By the PCI device id, which the driver cannot rename, else by the name that the driver gives. Looked up once.
    """
    if torch.version.hip is None or not torch.cuda.is_available():
        return None
    properties: Any = torch.cuda.get_device_properties(torch.cuda.current_device())
    try:
        address = f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
        return GPU_MODELS[int((_PCI_DEVICES / address / "device").read_text(), 16)]
    except (AttributeError, OSError, ValueError, KeyError) as reason:
        _log.debug("no GPU model by PCI device id (%r)", reason)
    named = re.search(r"mi\d+[a-z]+", properties.name, re.IGNORECASE)
    return named[0].lower() if named else None


def build_config_filename(
    gpu_arch: str,
    kernel_type: EpDispatchCombineKernelType | str,
    ep_size: int,
    gpu_model: str | None = None,
    phase: str = "dispatch",
) -> str:
    """`{arch}[_{model}]_{kernel}_ep{W}_{phase}.json`. ValueError for an unknown kernel type or phase."""
    prefix = f"{gpu_arch}_{gpu_model}" if gpu_model else gpu_arch
    return f"{prefix}_{_what(kernel_type, ep_size, phase)}"


def _what(kernel_type: EpDispatchCombineKernelType | str, ep_size: int, phase: str) -> str:
    return f"{kernel_type_to_config_str(kernel_type)}_ep{ep_size}_{check_phase(phase)}.json"


def config_path_for(
    gpu_arch: str,
    kernel_type: EpDispatchCombineKernelType | str,
    ep_size: int,
    gpu_model: str | None = None,
    phase: str = "dispatch",
) -> Path:
    """The file that rules are read from: MORI_EP_TUNING_CONFIG; the file of exactly this name; else that of another
    model of the arch, the first by name. If none of them exists, the path that a file of this name would have."""
    name = build_config_filename(gpu_arch, kernel_type, ep_size, gpu_model, phase)
    if named := env.get("MORI_EP_TUNING_CONFIG"):
        return Path(named)
    exact = CONFIG_DIR / name
    if exact.exists():
        return exact
    begin, end = f"{gpu_arch}_", f"_{_what(kernel_type, ep_size, phase)}"
    names = sorted(os.listdir(CONFIG_DIR)) if CONFIG_DIR.is_dir() else []
    for other in names:
        if other.startswith(begin) and other.endswith(end):
            _log.info("there is no tuning file %s; that of another model is used, %s", name, other)
            return CONFIG_DIR / other
    return exact


class TuningConfigManager:
    """The tuned rules of one arch, kernel type and world size: `dispatch_rules` and `combine_rules`, sorted for
    `lookup`, empty where there are none. What is wrong with a file is logged as a warning and never raised."""

    _cache: ClassVar[dict[tuple[Any, ...], TuningConfigManager]] = {}

    def __init__(
        self,
        gpu_arch: str,
        kernel_type: EpDispatchCombineKernelType | str,
        ep_size: int,
        gpu_model: str | None = None,
    ) -> None:
        # A file that somebody named and that is not there is a mistake; that nobody has tuned for a GPU is none.
        missing = logging.WARNING if env.get("MORI_EP_TUNING_CONFIG") else logging.DEBUG

        def rules(phase: str) -> list[Rule]:
            path = config_path_for(gpu_arch, kernel_type, ep_size, gpu_model, phase)
            return read_rules(path, phase, gpu_arch, missing=missing)

        self.dispatch_rules = rules("dispatch")
        self.combine_rules = rules("combine")

    @classmethod
    def get_instance(
        cls,
        gpu_arch: str,
        kernel_type: EpDispatchCombineKernelType | str,
        ep_size: int,
        gpu_model: str | None = None,
    ) -> TuningConfigManager:
        """The one instance of this process for these arguments (and MORI_EP_TUNING_CONFIG), until a rule is saved."""
        kernel_type = kernel_type_to_config_str(kernel_type)
        key = (gpu_arch, kernel_type, ep_size, gpu_model, env.get("MORI_EP_TUNING_CONFIG"))
        if key not in cls._cache:
            cls._cache[key] = cls(gpu_arch, kernel_type, ep_size, gpu_model)
        return cls._cache[key]

    lookup = staticmethod(lookup)

    @staticmethod
    def save_tuning_result(
        path: str | os.PathLike[str], metadata: Mapping[str, Any], entry: Rule, phase: str = "dispatch"
    ) -> None:
        """Put the rule `entry` into the tuning file at `path`, and print how it compares with the one it replaces.

        metadata: gpu_arch, gpu_model, kernel_type, ep_size and whatever else readers should know; it replaces that of
        the file. A rule about the same call (dtype, num_tokens, hidden_dim, topk, for combine also zero_copy and
        quant_type) is replaced, whatever was measured then. Folders are created; the file is exchanged in one step,
        so readers see the old or the new one. Not made for several writers: of two at once, one's rule may be lost.

        ValueError: an entry that could not be read back, or a file of another version. OSError: it cannot be written.
        """
        save_rule(path, metadata, entry, phase)
        TuningConfigManager._cache.clear()
