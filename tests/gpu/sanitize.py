"""Small shapes under compute-sanitizer, one tool after the other, one process per GPU; what is found goes to JSON.

    python -m tests.gpu.sanitize --results FILE [--tools memcheck,racecheck,synccheck]

racecheck looks at shared memory only: what blocks and ranks do to one another is the explorer's matter
(tests/protocol). Ends with status 1 if a tool has found something, or if a result was wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.records import conditions
from tests.gpu.ranks import world_size

SCHEMA = "gpu-sanitizer/1"
TOOLS = ("memcheck", "racecheck", "synccheck")
# memcheck and synccheck count errors, racecheck hazards: at the end of a process.
SUMMARY = re.compile(r"(?:ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazard)")
REPORT_LINES = 80


def run(tool: str, folder: Path) -> dict[str, Any]:
    """By rank: what the tool found, None if it did not come to an end, and how the program ended."""
    world = world_size()
    program = [sys.executable, "-m", "tests.gpu.small_shapes", str(world), str(folder / f"{tool}.store")]
    processes = []
    for rank in range(world):
        log = folder / f"{tool}.{rank}"
        command = ["compute-sanitizer", "--tool", tool, "--log-file", str(log), *program, str(rank)]
        processes.append((subprocess.Popen(command, stdout=subprocess.PIPE, text=True), log))
    result: dict[str, Any] = {"findings": [], "exit_codes": [], "cases": []}
    for process, log in processes:
        printed, _ = process.communicate()
        text = log.read_text(errors="replace") if log.exists() else ""
        found = [int(one or other) for one, other in SUMMARY.findall(text)]
        result["findings"].append(sum(found) if found else None)
        result["exit_codes"].append(process.returncode)
        result["cases"].append(printed.splitlines())
        if not found or sum(found):
            result.setdefault("reports", []).append(text.splitlines()[:REPORT_LINES])
    return result


def problems(record: dict[str, Any]) -> list[str]:
    """What is wrong with a record; empty if no tool has found anything on any rank, and all results were right."""
    found = []
    for tool, result in record["tools"].items():
        for rank, (findings, code) in enumerate(zip(result["findings"], result["exit_codes"], strict=True)):
            if findings != 0 or code != 0:
                found.append(f"{tool}, rank {rank}: {findings} findings, exit code {code}")
        if not all(result["cases"]):
            found.append(f"{tool}: a rank ran nothing")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--tools", default=",".join(TOOLS))
    options = parser.parse_args()
    os.environ.setdefault("MORI_SHMEM_HEAP_SIZE", "1G")
    record: dict[str, Any] = {"schema": SCHEMA, "conditions": conditions(), "tools": {}}
    with tempfile.TemporaryDirectory() as folder:
        for tool in options.tools.split(","):
            record["tools"][tool] = found = run(tool, Path(folder))
            options.results.write_text(json.dumps(record, indent=1) + "\n")
            print(f"{tool}: findings {found['findings']}, exit codes {found['exit_codes']}", flush=True)
    wrong = problems(record)
    print("\n".join(wrong) or "clean")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
