"""Compiling the kernels of ops before the processes start that will build them."""

from __future__ import annotations

import dataclasses

from mori import target

from . import device_code, kernels
from .config import EpDispatchCombineConfig, check_config
from .construction import shape_of
from .kernel_types import EpDispatchCombineKernelType, normalize_kernel_type


def warmup_jit_kernels(kernel_type: EpDispatchCombineKernelType, config: EpDispatchCombineConfig | None = None) -> None:
    """Compile what an op of this kernel type and config runs, so that building it finds it in the cache (docs/jit.md).

    Kernels are made for the shape of an op, so without a config there is nothing to compile: ops then compile when they
    are built, once per machine, the other processes waiting for the first. On CPUs nothing is ever compiled. Not
    collective; needs no shmem. `config.rank` does not matter, nor does its kernel_type.

    On GPUs this asks torch for the arch of the current one, which initialises CUDA in this process: start workers by
    spawn, not by fork. ValueError for an unknown kernel type; the errors of `EpDispatchCombineOp` for a config that no
    op can have, those of mori.jit when nothing can be compiled.
    """
    kernel_type = normalize_kernel_type(kernel_type)
    if config is None:
        return
    current = target.current()
    if current.is_device:
        config = dataclasses.replace(config, kernel_type=kernel_type)
        limits = check_config(config)
        for name in kernels.initial(config, limits):
            device_code.kernel(name, shape_of(config, limits), current.arch)
