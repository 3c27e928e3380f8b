"""GPU tests of small shapes under compute-sanitizer, one tool after the other; findings and tests as JSON.

    python -m tests.gpu.sanitize --results FILE [--tools memcheck,racecheck,synccheck] [-k EXPRESSION]

racecheck looks at shared memory only: what blocks and ranks do to one another is the explorer's matter
(tests/protocol). Ends with status 1 if a tool has found something or a test has failed.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.records import conditions

SCHEMA = "gpu-sanitizer/1"
TOOLS = ("memcheck", "racecheck", "synccheck")
# Every kernel, both paths, calls cut in two, handles, and ranks without tokens; rows that vectors do not fit.
SMALL_SHAPES = (
    "test_every_kernel_type or test_replays_along_handles or test_rows_by_expert or (test_every_quantisation and "
    "special-96) or test_ranks_without_tokens or (test_every_hidden_size_and_dtype and (-7] or -96])) or "
    "test_more_tokens_than_a_block_counts"
)
# memcheck and synccheck count errors, racecheck hazards: by process, at its end.
SUMMARY = re.compile(r"(?:ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazard)")


def run(tool: str, selection: str, folder: Path) -> dict[str, Any]:
    """What one tool found: processes that ran kernels or might have, findings in all, and how the tests ended."""
    tests = folder / f"{tool}.json"
    command = [
        "compute-sanitizer",
        "--tool",
        tool,
        "--target-processes",
        "all",
        "--log-file",
        str(folder / f"{tool}.%p"),
    ]
    command += [sys.executable, "-m", "pytest", "-p", "tests.gpu.results", "--results", str(tests)]
    command += ["-m", "gpu", "tests/gpu", "-k", selection, "-q", "-p", "no:cacheprovider"]
    subprocess.run(command, check=False)
    texts = [path.read_text(errors="replace") for path in sorted(folder.glob(f"{tool}.[0-9]*"))]
    found = [int(one or other) for text in texts for one, other in SUMMARY.findall(text)]
    result = {"processes": len(found), "findings": sum(found), "tests": json.loads(tests.read_text())["counts"]}
    if result["findings"]:
        result["reports"] = [text.splitlines()[:60] for text in texts if any(map(any, SUMMARY.findall(text)))][:4]
    return result


def problems(record: dict[str, Any]) -> list[str]:
    """What is wrong with a record; empty if no tool has found anything in any process, and all tests passed."""
    found = []
    for tool, result in record["tools"].items():
        outcomes = {outcome: count for outcome, count in result["tests"].items() if count}
        if result["findings"] or not result["processes"]:
            found.append(f"{tool}: {result['findings']} findings in {result['processes']} processes")
        if set(outcomes) != {"passed"}:
            found.append(f"{tool}: tests {outcomes}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--tools", default=",".join(TOOLS))
    parser.add_argument("-k", dest="selection", default=SMALL_SHAPES)
    options = parser.parse_args()
    record: dict[str, Any] = {"schema": SCHEMA, "conditions": conditions(), "selection": options.selection, "tools": {}}
    with tempfile.TemporaryDirectory() as folder:
        for tool in options.tools.split(","):
            record["tools"][tool] = found = run(tool, options.selection, Path(folder))
            options.results.write_text(json.dumps(record, indent=1) + "\n")
            print(f"{tool}: {found['findings']} findings in {found['processes']} processes, tests {found['tests']}")
    found = problems(record)
    print("\n".join(found) or "clean")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
