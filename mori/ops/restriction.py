"""What a row of the table of restrictions is, and what it is asked about."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from mori.archs import Arch


class Case(NamedTuple):
    """A config and where it would run. What is None is not known yet, and rows about it are silent.

    config: of the API that is asked, None for rows about a kernel. backend: of v2. kernel: name of a kernel that a call
    needs. dtype, external: rows of a v1 combine, and whether they are passed. feature: name of a capability of v2 ops.
    communicator: with `rank` and `nranks`, that an op of v2 is built on.
    """

    config: Any
    arch: Arch
    backend: str | None = None
    kernel: str | None = None
    dtype: Any = None
    external: bool | None = None
    feature: str | None = None
    communicator: Any = None


def _nothing(case: Case) -> object:
    return None


class Restriction(NamedTuple):
    """One thing that is refused.

    stage: "config" (when a config of v2 is made), "construction" of an op, or "call".
    statement: what holds instead, for readers of the docs. source: where the rule comes from.
    fields: names that the message says together with their values.
    broken: None for rules that need more than a case; `where` then says which code holds calls against it.
    message, remedy: formatted with c (the config), the fields of the case, and value (`value` of the case).
    backends: those of v2 that it is about; empty for all.
    """

    id: str
    api: str
    stage: str
    statement: str
    fields: tuple[str, ...]
    broken: Callable[[Case], bool] | None
    message: str
    remedy: str
    source: str
    error: type[Exception] = ValueError
    backends: tuple[str, ...] = ()
    value: Callable[[Case], object] = _nothing
    where: str = ""

    def refuses(self, case: Case) -> bool:
        if self.broken is None or (self.backends and case.backend not in self.backends):
            return False
        return self.broken(case)

    def explain(self, case: Case) -> str:
        """Message and remedy with the numbers of the case."""
        facts = case._asdict() | {"c": case.config, "value": self.value(case)}
        return f"{self.message}: {self.remedy}".format(**facts)


INT32_MAX = 2**31 - 1
MAX_WORLD_SIZE = 512
# Count words carry token counts, and headers carry row bytes, in 24 bits.
MAX_24_BITS = 2**24 - 1

# field: (smallest, largest) legal value. v1 has all of them, v2 some.
RANGES: dict[str, tuple[int, int]] = {
    "world_size": (1, MAX_WORLD_SIZE),
    "rank": (0, MAX_WORLD_SIZE - 1),
    "hidden_dim": (1, MAX_24_BITS),
    "scale_dim": (0, MAX_24_BITS),
    "scale_type_size": (0, 16),
    "max_token_type_size": (1, 16),
    "max_num_inp_token_per_rank": (1, MAX_24_BITS),
    "num_experts_per_rank": (1, INT32_MAX),
    "num_experts_per_token": (1, INT32_MAX),
    "warp_num_per_block": (0, INT32_MAX),
    "block_num": (0, INT32_MAX),
    "max_total_recv_tokens": (-INT32_MAX, INT32_MAX),
    "gpu_per_node": (1, INT32_MAX),
    "rdma_block_num": (0, INT32_MAX),
    "num_qp_per_pe": (1, INT32_MAX),
}


def is_int(value: object) -> bool:
    return hasattr(value, "__index__") and not isinstance(value, bool)


def int_row(api: str, stage: str, field: str, error: type[Exception], or_none: bool = False) -> Restriction:
    """That a field is an int, or None where that leaves it open."""

    def wrong_type(case: Case) -> bool:
        value = getattr(case.config, field)
        return not (is_int(value) or (or_none and value is None))

    return Restriction(
        f"{api}-int-{field}",
        api,
        stage,
        f"`{field}` is an int{' or None' * or_none}",
        (field,),
        wrong_type,
        f"{field} is {{c.{field}!r}}",
        f"it must be an int{' or None' * or_none}",
        "a number that is rounded in silence is none that was meant",
        error=error,
    )


def range_row(api: str, stage: str, field: str) -> Restriction:
    """That a field is in its range; silent about what is no int."""
    smallest, largest = RANGES[field]

    def outside(case: Case) -> bool:
        value = getattr(case.config, field)
        return is_int(value) and not smallest <= value <= largest

    return Restriction(
        f"{api}-range-{field}",
        api,
        stage,
        f"`{field}` is in {smallest}..{largest}",
        (field,),
        outside,
        f"{field} is {{c.{field}!r}}",
        f"it must be in {smallest}..{largest}",
        "words of kernels that carry it" if largest < INT32_MAX else "it has to fit int32",
    )
