"""What ops refuse, as one table: each row says when, with which error, and what to do instead.

Configs, the gates that ops pass before they take memory, `mori support` and docs/support-matrix.md read it. Rows are
asked about a `Case`: a config, the arch it would run on and, for v2, the kernel backend.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from mori import archs

from . import restrictions_v1, restrictions_v2
from .restriction import Case, Restriction
from .restrictions_v2 import FEATURES

__all__ = [
    "FEATURES",
    "LIFTED",
    "NOT_BUILT",
    "TABLE",
    "Case",
    "Restriction",
    "broken",
    "refusing",
    "require",
    "unsupported",
]

TABLE: tuple[Restriction, ...] = (*restrictions_v1.ROWS, *restrictions_v2.ROWS)

_BY_PLACE: dict[tuple[str, str], tuple[Restriction, ...]] = {
    (api, stage): tuple(row for row in TABLE if row.api in (api, "both") and row.stage == stage)
    for api in ("v1", "v2")
    for stage in ("config", "construction", "call")
}


class Lifted(NamedTuple):
    """A rule of the releases that does not hold here."""

    rule: str
    here: str


LIFTED: tuple[Lifted, ...] = (
    Lifted("fp8_blockwise of flydsl needs waves of 64", "every feature works at every wave width"),
    Lifted("the path between nodes needs waves of 64", "no such rule; sizes are rounded to the wave of the target"),
    Lifted("`num_experts_per_token` is below the wave width", "up to 64 everywhere, and more than the wave width"),
    Lifted("some kernels take certain K only", "any K; a row may name an expert twice"),
    Lifted("`world_size` is at most 64", "on one node as many ranks as a combine block has threads (v2), 512 (v1)"),
    Lifted("negative ids are undefined on flydsl", "every id outside the range means no expert, on every backend"),
    Lifted("`weights=None` is undefined on flydsl", "legal everywhere; received weights are zeros"),
    Lifted("a gather combine of flydsl with more than 256 blocks fails", "every grid is cut to 256 blocks"),
    Lifted("v1 rows have a multiple of 16 bytes", "any size; odd ones take a slower path. v2 keeps the rule"),
    Lifted("multi-node kernel types need several nodes", "all six kernel types run on one node"),
)


class NotBuilt(NamedTuple):
    what: str
    answer: str


NOT_BUILT: tuple[NotBuilt, ...] = (
    NotBuilt("FlyDSL backend of EPv2", 'ImportError from `kernel_backend="flydsl"`'),
    NotBuilt("quantised combines of the hip backend on gfx1250", "ValueError from its gate, as on every arch"),
    NotBuilt("kernels between nodes", "v1: NotImplementedError, v2: ValueError, when an op is built"),
    NotBuilt("SDMA engines", "`MORI_ENABLE_SDMA` warns when an op is built"),
    NotBuilt("MORI-IO", "`import mori.io` raises ImportError"),
    NotBuilt("MORI-UMBP", "`mori.umbp` raises AttributeError"),
    NotBuilt("JAX binding", "`mori.jax` raises AttributeError"),
    NotBuilt("Triton binding", "`mori.ir` raises AttributeError"),
    NotBuilt("C host API of CCO", "there is no such header"),
    NotBuilt("taking a lost rank back", "the communicator is over; build a new one with a new unique id"),
)


def broken(api: str, stage: str, case: Case) -> Iterator[Restriction]:
    """The rows of that API and stage that refuse the case, in the order of the table."""
    return (row for row in _BY_PLACE[api, stage] if row.refuses(case))


def require(api: str, stage: str, case: Case, subject: str = "") -> None:
    """Raises the error of the first row that refuses the case. Its text begins with `subject`, its attribute `rule` is
    the id of the row."""
    for row in broken(api, stage, case):
        error = row.error(subject + row.explain(case))
        vars(error)["rule"] = row.id
        raise error


def refusing(config: Any, backend: str, arch: str, communicator: Any = None) -> list[Restriction]:
    """The rows because of which an op of v2 cannot be built."""
    case = Case(config, archs.find(arch), backend, communicator=communicator)
    # The config may have been changed since it was made. Later rows only make sense for what is legal and in range, and
    # those of configs for what the ones before let pass.
    if (first := next(broken("v2", "config", case), None)) is not None:
        return [first]
    for rows in (restrictions_v2.RANGE_ROWS, _BY_PLACE["v2", "construction"]):
        if found := [row for row in rows if row.refuses(case)]:
            return found
    return []


def unsupported(config: Any, backend: str, arch: str, communicator: Any = None) -> tuple[str, ...]:
    """Why an op of v2 with this backend cannot serve a config on an arch; empty if it can. With `communicator`
    (`rank`, `nranks`) also whether the op may be built on that one."""
    case = Case(config, archs.find(arch), backend, communicator=communicator)
    return tuple(row.explain(case) for row in refusing(config, backend, arch, communicator))
