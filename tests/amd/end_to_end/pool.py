"""The pools of tests/gpu/ranks.py, of processes whose GPUs are simulated: what tests on GPUs call works here too."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from tests import ranks
from tests.gpu.ranks import ENVIRONMENT, GpuPool
from tests.rank_worker import RankContext
from tests.ranks import Outcome

WORLD = 2
PATIENCE = 2.5  # as much time as on GPUs: launches are as small, but slow


class SimulatedPool(GpuPool):
    def outcomes(self, function: Callable[..., Any], *args: Any, timeout_s: float = 60.0) -> list[Outcome]:
        self.ranks.run(_simulate)  # processes may be new
        return super().outcomes(function, *args, timeout_s=PATIENCE * timeout_s)


def _simulate(_: RankContext) -> None:
    from tests.amd.end_to_end.rank import simulate

    simulate()


@contextlib.contextmanager
def simulated_pool(**environment: str) -> Iterator[SimulatedPool]:
    with ranks.private_pool(WORLD, bare=True, **(ENVIRONMENT | environment)) as own:
        yield SimulatedPool(own)
