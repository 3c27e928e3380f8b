"""Which kernel backend serves an op. A backend is a subclass of the op; its module loads when it is first chosen."""

from __future__ import annotations

import importlib
import logging
from typing import TYPE_CHECKING

from .config import EpDispatchCombineConfig, backend_of

if TYPE_CHECKING:
    from .dispatch_combine_op import EpDispatchCombineOp

_log = logging.getLogger(__name__)

# Where the backends of this package are; others register when their module is imported.
MODULES = {
    "flydsl": "mori.ops.dispatch_combine_v2.flydsl_backend",
    "hip": "mori.ops.dispatch_combine_v2.hip_backend",
}
_registered: dict[str, type[EpDispatchCombineOp]] = {}


def register(name: str, op_class: type[EpDispatchCombineOp]) -> None:
    """By the class keyword `backend`. A name that is taken goes to the newer class."""
    _registered[name] = op_class


def known() -> list[str]:
    """Names that can be asked for, whether or not their modules load."""
    return sorted({*MODULES, *_registered})


def available() -> list[str]:
    """Names of backends that load."""
    found = []
    for name in known():
        try:
            load(name)
        except (ImportError, ValueError):
            continue
        found.append(name)
    return found


def chosen(config: EpDispatchCombineConfig) -> type[EpDispatchCombineOp]:
    """The class for a config: its `kernel_backend`, else MORI_V2_KERNEL_BACKEND, else the default of the target."""
    name = backend_of(config)
    _log.info("kernel backend %s", name)
    return load(name)


def load(name: str) -> type[EpDispatchCombineOp]:
    """ValueError for an unknown name, ImportError if its module does not load or registers nothing."""
    if name not in _registered and name not in MODULES:
        raise ValueError(f"unknown kernel backend {name!r}: known are {', '.join(known())}")
    if name not in _registered:
        try:
            importlib.import_module(MODULES[name])
        except ImportError as problem:
            others = ", ".join(repr(each) for each in known() if each != name)
            raise ImportError(
                f"kernel backend {name!r} does not load: {problem}. Choose another one ({others}) by kernel_backend in "
                "the config or by MORI_V2_KERNEL_BACKEND"
            ) from problem
    if name not in _registered:
        raise ImportError(f"{MODULES[name]} loads, but registers no kernel backend {name!r}")
    return _registered[name]
