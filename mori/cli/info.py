"""What `mori info` prints."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
from collections.abc import Iterator
from pathlib import Path

import mori
from mori import env, target


def collect() -> Iterator[tuple[str, str]]:
    """Name and value of each line. Never raises for something that is merely missing: the value says so."""
    yield "mori", mori.__version__
    try:
        current = target.current()
        yield "target", current.name
        yield "arch", current.arch
        yield "contract wave", str(current.contract_wave)
        yield "EPv2 backend", default_backend()
    except (RuntimeError, ValueError) as problem:
        yield "target", str(problem)
    yield "cores", f"{len(os.sched_getaffinity(0))} of {os.cpu_count()} ({platform.machine()}, {cpu_model()})"
    yield "host kernels", simd_variant()
    yield "python", platform.python_version()
    yield "torch", distribution_version("torch")
    yield "numpy", distribution_version("numpy")
    yield "build options", ", ".join(f"{k}={v}" for k, v in build_options().items()) or "none given"
    variables = [f"{name}={os.environ[name]}" for name in env.VARIABLES if os.environ.get(name)]
    yield "environment", ", ".join(variables) or "no variable of mori is set"


def default_backend() -> str:
    from mori.ops.dispatch_combine_v2.config import default_backend

    return default_backend()


def simd_variant() -> str:
    try:
        from mori import _core
    except ImportError as problem:
        return f"the extension does not load: {problem}"
    try:
        return str(_core.host_variant(env.get("MORI_HOST_ISA")))
    except ValueError as problem:
        return str(problem)


def distribution_version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def build_options() -> dict[str, str]:
    """Options given when the extension was built; the file lies beside it, in an editable install as well."""
    extension = importlib.util.find_spec("mori._core")
    if extension is None or extension.origin is None:
        return {}
    file = Path(extension.origin).with_name("build_options.json")
    return dict(json.loads(file.read_text())) if file.exists() else {}


def cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return "unknown processor"
