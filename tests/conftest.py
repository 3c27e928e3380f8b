"""Rules for all tests: which run by default, in which order, and how many examples Hypothesis draws."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from tests import ranks

OPTIONAL_MARKERS = {
    "full": "too long for every change; run by `make test-full`",
    "gpu": "needs a GPU; run with `-m gpu`",
}

settings.register_profile(
    "default",
    deadline=None,
    database=None,
    derandomize=True,
    max_examples=25,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.register_profile("full", settings.get_profile("default"), derandomize=False, max_examples=300)


def asks_for(expression: str, marker: str) -> bool:
    """Whether a `-m` expression names the marker other than to leave it out."""
    return re.search(rf"(?<!not )\b{marker}\b", expression) is not None


def pytest_configure(config: pytest.Config) -> None:
    for name, meaning in OPTIONAL_MARKERS.items():
        config.addinivalue_line("markers", f"{name}: {meaning}")
    settings.load_profile("full" if asks_for(config.getoption("-m"), "full") else "default")


def world_size_of(item: pytest.Item) -> int:
    """The world a test asks for by its parameters; 0 if it does not say."""
    callspec = getattr(item, "callspec", None)
    return int(callspec.params.get("world_size", 0)) if callspec else 0


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    # Tests of one world follow each other, because a change of world initialises shmem anew.
    items.sort(key=world_size_of)
    chosen = config.getoption("-m")
    optional = [name for name in OPTIONAL_MARKERS if not asks_for(chosen, name)]
    deselected = [item for item in items if any(item.get_closest_marker(name) for name in optional)]
    if deselected:
        config.hook.pytest_deselected(items=deselected)
        items[:] = [item for item in items if item not in deselected]


@pytest.fixture(scope="session", autouse=True)
def _stop_ranks_at_the_end() -> Iterator[None]:
    yield
    ranks.stop_shared()
