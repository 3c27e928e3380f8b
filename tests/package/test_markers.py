"""The commands of the Makefile run the tests that they say they run."""

from __future__ import annotations

import re

import pytest

from tests.conftest import OPTIONAL_MARKERS, asks_for
from tests.package.commands import ROOT

ASKED_FOR = {"test": [], "test-full": ["full"]}


@pytest.mark.parametrize("target", ASKED_FOR)
def test_optional_tests_run_when_a_command_asks_for_them(target: str):
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    [expression] = re.findall(rf'^{target}:.*\n\t.* -m pytest -m "(.*)"$', text, flags=re.MULTILINE)
    assert [marker for marker in OPTIONAL_MARKERS if asks_for(expression, marker)] == ASKED_FOR[target]


def test_markers_are_told_apart():
    assert asks_for("gpu and slow", "gpu") and not asks_for("not gpu", "gpu")
    assert not asks_for("", "full") and not asks_for("gpus", "gpu")
