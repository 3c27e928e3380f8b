"""Every line of docs/user-pains.md names tests, and they exist."""

from __future__ import annotations

import re

import pytest

from tests.identify import ROOT, missing

LINES = [
    line.strip("|").split(" | ")
    for line in (ROOT / "docs" / "user-pains.md").read_text(encoding="utf-8").splitlines()
    if line.startswith("|") and not line.startswith(("|---", "| elsewhere"))
]


def test_the_table_is_whole():
    assert len(LINES) == 29 and all(len(line) == 3 for line in LINES)


@pytest.mark.parametrize("line", LINES, ids=lambda line: line[0].strip()[:50])
def test_its_tests_exist(line: list[str]):
    named = re.findall(r"`(tests/[^`]+)`", line[2])
    assert named and missing(named) == []


def test_a_test_that_is_gone_is_noticed():
    gone = "tests/package/test_user_pains.py::test_that_never_was"
    assert missing([gone, "tests/nowhere.py::test_x", "tests/package/test_user_pains.py::test_the_table_is_whole"]) == [
        gone,
        "tests/nowhere.py::test_x",
    ]
