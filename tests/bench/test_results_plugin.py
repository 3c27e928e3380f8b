"""The plugin that records GPU test runs, on a run of made-up tests."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.gpu import results

pytest_plugins = ["pytester"]

TESTS = """
import pytest

def test_good(record_property):
    record_property("seed", 17)

@pytest.mark.parametrize("number", [1, 2])
def test_good_too(number):
    assert number
"""

SKIPPED = """
def test_skipped():
    pytest.skip("no such GPU")
"""

BAD = """
def test_bad():
    assert 1 + 1 == 3

@pytest.fixture
def broken():
    raise OSError("no device")

def test_without_fixture(broken):
    pass
"""


def run(pytester: pytest.Pytester, text: str) -> tuple[int, str, dict[str, Any]]:
    pytester.makepyfile(test_made_up=text)
    file = pytester.path / "results" / "run.json"
    finished = pytester.runpytest_inprocess("-p", "tests.gpu.results", "--results", str(file), "-q")
    return int(finished.ret), finished.stdout.str(), json.loads(file.read_text())


def known(document: dict[str, Any]) -> dict[str, Any]:
    """As on a machine with a GPU."""
    return document | {"conditions": document["conditions"] | {"device": "H200", "driver": "580", "cuda": "13.0"}}


def test_a_good_run(pytester: pytest.Pytester):
    code, output, document = run(pytester, TESTS)
    assert code == 0, output
    assert document["counts"] == {"passed": 3, "failed": 0, "error": 0, "skipped": 0, "unfinished": 0}
    assert document["complete"] is True and document["selected"] == 3
    assert document["tests"]["test_made_up.py::test_good"]["seed"] == 17
    assert set(document["tests"]) >= {"test_made_up.py::test_good_too[1]", "test_made_up.py::test_good_too[2]"}
    assert results.problems(known(document)) == []


def test_a_skip_fails_the_run(pytester: pytest.Pytester):
    code, output, document = run(pytester, TESTS + SKIPPED)
    assert code == pytest.ExitCode.TESTS_FAILED, output
    assert "1 skipped: on GPUs" in output
    assert document["counts"]["skipped"] == 1
    assert results.problems(known(document)) == ["test_made_up.py::test_skipped skipped"]


def test_failures_and_errors_are_told_with_their_text(pytester: pytest.Pytester):
    code, output, document = run(pytester, TESTS + BAD)
    assert code == pytest.ExitCode.TESTS_FAILED, output
    assert document["counts"] == {"passed": 3, "failed": 1, "error": 1, "skipped": 0, "unfinished": 0}
    assert "1 + 1" in "\n".join(document["tests"]["test_made_up.py::test_bad"]["failure"])
    assert "no device" in "\n".join(document["tests"]["test_made_up.py::test_without_fixture"]["failure"])


CUT_SHORT = """
import json

def test_end():
    written = json.loads(open("results/run.json").read())
    assert written["complete"] is False and written["counts"]["passed"] == 3
    pytest.exit("no time is left")
"""


def test_a_run_that_is_cut_short_leaves_what_it_had(pytester: pytest.Pytester):
    code, output, document = run(pytester, TESTS + CUT_SHORT)
    assert code == pytest.ExitCode.INTERRUPTED and "no time is left" in output
    assert document["complete"] is False and document["counts"]["passed"] == 3
    found = results.problems(known(document))
    assert found == ["the run was cut short", "test_made_up.py::test_end unfinished"]


def test_counts_must_match_the_entries(pytester: pytest.Pytester):
    _, _, document = run(pytester, TESTS)
    assert any("counts" in problem for problem in results.problems(known(document) | {"counts": {"passed": 9}}))
    assert "conditions lack driver" in results.problems(document)
