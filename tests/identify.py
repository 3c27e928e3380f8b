"""Ids of tests, as tables and documents name them: `tests/area/test_file.py::test_name`."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[1]


@functools.cache
def _tests_of(path: str) -> frozenset[str]:
    file = ROOT / path
    if not file.is_file():
        return frozenset()
    tree = ast.parse(file.read_text(encoding="utf-8"))
    return frozenset(
        node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    )


def missing(test_ids: Iterable[str]) -> list[str]:
    """Those of the ids that name no test function. Parameters in brackets are not looked at."""
    found = []
    for test_id in test_ids:
        path, _, name = test_id.partition("::")
        if name.partition("[")[0] not in _tests_of(path):
            found.append(test_id)
    return found
