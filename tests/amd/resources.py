"""The table of what kernels take, by arch and kernel: `python -m tests.amd.resources` prints it anew.

A difference is no fault by itself. It is there to be seen, and to be answered for, in the commit that makes it: fewer
waves than before, or one access for the system less.
"""

from __future__ import annotations

import json
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from tests.amd.build import BUILDS
from tests.amd.inspection import Report, inspect_kernel

FILE = Path(__file__).with_name("resources.json")
WORKERS = 2


def inspect_all() -> dict[tuple[str, str], Report]:
    """By (kernel, arch)."""
    with ProcessPoolExecutor(WORKERS, mp_context=multiprocessing.get_context("spawn")) as pool:
        return dict(zip(BUILDS, pool.map(inspect_kernel, *zip(*BUILDS, strict=True)), strict=True))


def committed() -> dict[str, dict[str, dict[str, int]]]:
    return dict(json.loads(FILE.read_text(encoding="utf-8")))


def table(reports: dict[tuple[str, str], Report]) -> str:
    """One line for each kernel, so that a difference is legible."""
    archs: dict[str, list[str]] = {}
    for (kernel, arch), report in reports.items():
        archs.setdefault(arch, []).append(f"  {json.dumps(kernel)}: {json.dumps(report.resources)}")
    parts = [f"{json.dumps(arch)}: {{\n" + ",\n".join(rows) + "\n}" for arch, rows in archs.items()]
    return "{" + ",\n".join(parts) + "}\n"


def main() -> None:
    reports = inspect_all()
    FILE.write_text(table(reports), encoding="utf-8")
    for (kernel, arch), report in reports.items():
        for finding in report.findings:
            print(f"{kernel} {arch}: {finding}")
    print(f"written: {FILE.name}")


if __name__ == "__main__":
    main()
