"""Which AMD arch code is for, as programs written for other releases ask."""

from __future__ import annotations

import re

from mori import env

SUPPORTED_GPU_ARCHS = ("gfx942", "gfx950", "gfx1250")


def detect_gpu_arch() -> str:
    """The first of MORI_GPU_ARCHS, else the arch of the current AMD GPU, without features: "gfx942".

    RuntimeError where there is neither, and for an arch that is not supported. `mori.target.current().arch` tells the
    arch on every target. May import torch.
    """
    named = env.get("MORI_GPU_ARCHS")
    arch = re.split(r"[:;,\s]", named or _current_arch())[0]
    if arch not in SUPPORTED_GPU_ARCHS:
        source = f"MORI_GPU_ARCHS={named}" if named else "the current GPU"
        raise RuntimeError(f"{source} is {arch!r}; supported AMD archs: {', '.join(SUPPORTED_GPU_ARCHS)}")
    return arch


def is_gfx125x() -> bool:
    """Whether `detect_gpu_arch` reports an arch of the gfx125x family; False where it reports none."""
    try:
        return detect_gpu_arch().startswith("gfx125")
    except RuntimeError:
        return False


def _current_arch() -> str:
    import torch

    if torch.version.hip is None or not torch.cuda.is_available():
        why = "is built without ROCm" if torch.version.hip is None else "sees no GPU"
        raise RuntimeError(f"no AMD GPU: torch {torch.__version__} {why}. MORI_GPU_ARCHS names an arch without a GPU")
    return str(torch.cuda.get_device_properties(torch.cuda.current_device()).gcnArchName)
