"""A pytest plugin that writes what a run found, and where it ran, as JSON; a skipped test fails the run.

    python -m pytest -p tests.gpu.results --results tests/gpu/results/NAME.json -m gpu tests/gpu

The file is written anew after every test, so that a run that is cut short leaves what it had ("complete": false).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.records import conditions

SCHEMA = "gpu-tests/1"
FAILURE_LINES = 40
OUTCOMES = ("passed", "failed", "error", "skipped", "unfinished")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--results", type=Path, required=True, help="JSON file for the results of this run")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Results(config.getoption("--results")), "gpu-results")


class Results:
    """One entry per test: its id, outcome, seconds, and what it recorded of itself (its seed above all)."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.tests: dict[str, dict[str, Any]] = {}
        self.conditions = conditions()
        self.selected = 0

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.selected = len(session.items)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        entry = self.tests.setdefault(report.nodeid, {"outcome": "unfinished", "seconds": 0.0})
        entry["seconds"] = round(entry["seconds"] + report.duration, 3)
        entry.update(dict(report.user_properties))
        if report.failed:
            entry["outcome"] = "failed" if report.when == "call" else "error"
            entry["failure"] = report.longreprtext.splitlines()[-FAILURE_LINES:]
        elif report.when == "call" and report.passed:
            entry["outcome"] = "passed"
        elif report.skipped:
            entry["outcome"] = "skipped"
            entry["failure"] = report.longreprtext.splitlines()[-FAILURE_LINES:]
        if report.when == "teardown":
            self.write(complete=False)

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        if self.counts()["skipped"] and exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        self.write(complete=exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED))

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if skipped := self.counts()["skipped"]:
            terminalreporter.write_line(f"{skipped} skipped: on GPUs a skipped test is a failed one", red=True)

    def counts(self) -> dict[str, int]:
        outcomes = [entry["outcome"] for entry in self.tests.values()]
        return {kind: outcomes.count(kind) for kind in OUTCOMES}

    def write(self, *, complete: bool) -> None:
        document = {
            "schema": SCHEMA,
            "complete": complete,
            "selected": self.selected,
            "counts": self.counts(),
            "conditions": self.conditions,
            "tests": self.tests,
        }
        self.file.parent.mkdir(parents=True, exist_ok=True)
        temporary = self.file.with_suffix(".partial")
        temporary.write_text(json.dumps(document, indent=1) + "\n")
        temporary.replace(self.file)


GPU_CONDITIONS = ("date", "device", "driver", "mori", "torch", "python", "cuda")
HOST_CONDITIONS = ("date", "mori", "torch", "python", "cores")


def problems(document: dict[str, Any], known: tuple[str, ...] = GPU_CONDITIONS) -> list[str]:
    """What is wrong with a committed results file; empty for a complete run without a failed or skipped test, of whose
    conditions `known` are stated."""
    found = []
    if document.get("schema") != SCHEMA:
        found.append(f"schema is {document.get('schema')!r}, expected {SCHEMA!r}")
    if document.get("complete") is not True:
        found.append("the run was cut short")
    tests = document.get("tests") or {}
    counts = dict.fromkeys(OUTCOMES, 0)
    for name, entry in tests.items():
        counts[entry["outcome"]] += 1
        if entry["outcome"] != "passed":
            found.append(f"{name} {entry['outcome']}")
    if document.get("counts") != counts:
        found.append(f"counts are {document.get('counts')}, the entries say {counts}")
    if not tests or document.get("selected") != len(tests):
        found.append(f"{document.get('selected')} tests were selected, {len(tests)} have a result")
    for field in known:
        if not document.get("conditions", {}).get(field):
            found.append(f"conditions lack {field}")
    return found
