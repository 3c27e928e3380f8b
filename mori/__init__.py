"""Expert-parallel dispatch and combine for Mixture-of-Experts models.

Importing mori is cheap: neither torch nor numpy nor the native extension is loaded before something needs them, and no
GPU is looked for. Sub-packages and exceptions load when they are first named:

    import mori
    mori.shmem.shmem_torch_process_group_init("default")
    op = mori.ops.EpDispatchCombineOp(mori.ops.EpDispatchCombineConfig(...))
"""

from __future__ import annotations

import importlib as _importlib
from typing import TYPE_CHECKING, Any

from mori import env as _env
from mori._version import __version__

if TYPE_CHECKING:
    from mori import cco, cpp, ops, shmem, target
    from mori.errors import (
        BootstrapError,
        BootstrapTimeout,
        CallFault,
        CallFaultWarning,
        ConfigMismatch,
        HeapExhausted,
        MoriError,
        NotInitialized,
        OutOfStep,
        PeerLost,
        PeerTimeout,
        ReceiveOverflow,
        RowMismatch,
        UnsupportedDtype,
    )

__all__ = [
    "BootstrapError",
    "BootstrapTimeout",
    "CallFault",
    "CallFaultWarning",
    "ConfigMismatch",
    "HeapExhausted",
    "MoriError",
    "NotInitialized",
    "OutOfStep",
    "PeerLost",
    "PeerTimeout",
    "ReceiveOverflow",
    "RowMismatch",
    "UnsupportedDtype",
    "__version__",
    "cco",
    "cpp",
    "ops",
    "shmem",
    "target",
]

_SUBPACKAGES = ("cco", "cpp", "env", "errors", "io", "jit", "ops", "shmem", "target", "tensor_utils")
_EXCEPTIONS = [name for name in __all__ if name[0].isupper()]
# Names that programs written for other releases may look for, with what is true of them here.
_ABSENT = {
    "allocator": "memory comes from mori.shmem or mori.cco",
    "ccl": "collectives other than dispatch and combine are out of scope",
    "ir": "there is no Triton binding",
    "jax": "there is no JAX binding",
    "umbp": "MORI-UMBP is out of scope",
    "kernel_profiler": "not there yet: it comes with the GPU targets",
}


def __getattr__(name: str) -> Any:
    if name in _SUBPACKAGES:
        return _importlib.import_module(f"mori.{name}")
    if name in _EXCEPTIONS:
        return getattr(_importlib.import_module("mori.errors"), name)
    because = f": {_ABSENT[name]}" if name in _ABSENT else ""
    raise AttributeError(f"module 'mori' has no attribute {name!r}{because}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_SUBPACKAGES, *_EXCEPTIONS} - {"io"})


_env.warn_unknown()
