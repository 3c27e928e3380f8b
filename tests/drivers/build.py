"""The stand-ins for drivers as libraries, in a folder for the loader's path."""

from __future__ import annotations

import subprocess
from collections.abc import Iterable
from pathlib import Path

from tests.package.commands import ROOT, compiler

HERE = Path(__file__).parent
CSRC = ROOT / "csrc"
LIBRARIES = {"cuda": "libcuda.so.1", "hip": "libamdhip64.so.7"}
# Of the executor that runs the host's kernels.
HOST_EXECUTOR = (HERE / "host_executor.cpp", CSRC / "runtime" / "host_support.cpp")


def build(folder: Path, apis: Iterable[str] = LIBRARIES, executor: Iterable[Path] = HOST_EXECUTOR) -> None:
    """Without an executor a library waits to be given one."""
    executor = tuple(executor)
    sources = [(HERE / "fake_driver.cpp", api) for api in apis] + [(source, "any") for source in executor]
    objects = {pair: folder / f"{pair[0].stem}_{pair[1]}.o" for pair in sources}
    running = []
    for (source, api), output in objects.items():
        macro = ["-DFAKE_CUDA"] if api == "cuda" else []
        options = ["-std=c++20", "-Wall", "-Wextra", "-O1", "-fPIC", f"-I{CSRC}", f"-I{HERE}", *macro]
        running.append(subprocess.Popen([compiler(), *options, "-c", str(source), "-o", str(output)]))
    failed = [process.args for process in running if process.wait(timeout=300) != 0]
    if failed:
        raise RuntimeError(f"these fail: {failed}")
    for api in apis:
        parts = [str(output) for (_, which), output in objects.items() if which in (api, "any")]
        named = [f"-Wl,-soname,{LIBRARIES[api]}", "-o", str(folder / LIBRARIES[api])]
        subprocess.run([compiler(), "-shared", "-pthread", *parts, *named], check=True)
