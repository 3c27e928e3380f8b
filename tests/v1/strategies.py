"""Hypothesis strategies for Case: drawn in the parent, so that all ranks see the same example."""

from __future__ import annotations

import contextlib
import functools
from dataclasses import replace

import numpy as np
from hypothesis import strategies as st

from tests import reference
from tests.v1 import cases
from tests.v1.cases import BF16, BLOCKWISE, KERNEL_TYPES, Case, Step

HIDDEN = (1, 7, 96, 672, 2880, 4097, 7168)
TOPK = tuple(range(1, 17))

# D = dispatch, C = combine, c = combine from the registered buffer.
ORDERS = ("DC", "Dc", "D", "C", "c", "DD", "CD", "DDC", "DCC", "DcC", "DCDc", "CCDC", "DDCCDC", "DcCDDCC", "CDcDc")


@functools.cache
def instruction_sets() -> tuple[str, ...]:
    """Those that this machine can run."""
    from mori import _core

    usable = []
    for name in ("baseline", "avx2", "avx512"):
        with contextlib.suppress(ValueError):
            _core.Launcher.host(name, 1, 0)
            usable.append(name)
    return tuple(usable)


@st.composite
def index_rows(draw: st.DrawFn, tokens: int, topk: int, world_size: int, experts_per_rank: int) -> np.ndarray:
    """Ids of one rank: small ones entry by entry, larger ones by style and seed."""
    experts = world_size * experts_per_rank
    if tokens * topk <= 12 and draw(st.booleans()):
        entry = st.one_of(st.integers(-2, experts + 1), st.just(2**30))
        flat = draw(st.lists(entry, min_size=tokens * topk, max_size=tokens * topk))
        return np.array(flat, dtype=np.int32).reshape(tokens, topk)
    style = draw(st.sampled_from(cases.ROUTING_STYLES))
    return cases.styled_indices(style, tokens, topk, world_size, experts_per_rank, draw(st.integers(0, 2**16)))


@st.composite
def case_for(draw: st.DrawFn, world_size: int, orders: tuple[str, ...] = ORDERS) -> Case:
    topk = draw(st.sampled_from(TOPK))
    experts_per_rank = draw(st.integers(1, 9))
    if draw(st.integers(0, 7)) == 0:  # every expert there is
        experts_per_rank = draw(st.integers(1, 3))
        topk = world_size * experts_per_rank
    hidden = draw(st.sampled_from(HIDDEN))
    largest = 40 if hidden <= 672 else 9
    max_tokens = draw(st.integers(1, largest))
    letters = draw(st.sampled_from(orders))
    with_weights = draw(st.booleans())
    steps = []
    for letter in letters:
        if letter == "D":
            count = st.one_of(st.just(0), st.just(max_tokens), st.integers(0, max_tokens))
            indices = tuple(
                draw(index_rows(draw(count), topk, world_size, experts_per_rank)) for _ in range(world_size)
            )
            steps.append(Step("dispatch", indices, weights=draw(st.booleans()), scales=draw(st.booleans())))
        else:
            whole = draw(st.booleans())
            steps.append(Step("combine", weights=with_weights, external=letter == "C", whole_view=whole))
    case = Case(
        world_size=world_size,
        hidden=hidden,
        topk=topk,
        experts_per_rank=experts_per_rank,
        max_tokens=max_tokens,
        steps=tuple(steps),
        dtype=draw(st.sampled_from(cases.PAYLOAD_DTYPES)),
        combine_dtype=draw(st.sampled_from(cases.PAYLOAD_DTYPES)),
        combine_hidden=draw(st.sampled_from([None, None, 1, 7, 96])),
        spare_hidden=draw(st.sampled_from([0, 0, 1, 16])),
        scale_dim=draw(st.sampled_from([0, 1, 7, 32])),
        scale_bytes=draw(st.sampled_from([1, 2, 4])),
        values=draw(st.sampled_from(["numbers", "wide", "bits", "special"])),
        seed=draw(st.integers(0, 2**16)),
        grid=draw(st.sampled_from([(-1, -1), (1, 1), (17, 3), (256, 16)])),
        kernel_type=draw(st.sampled_from(KERNEL_TYPES)),
        environment=draw(environments),
    )
    if draw(st.booleans()):
        case = draw(quantised(case))
    return replace(case, receive_cap=needed_rows(case)) if draw(st.booleans()) else case


# What an op is built under. Scales per row matter to block-wise quantisation only.
environments = st.fixed_dictionaries(
    {"MORI_EP_PATH": st.sampled_from(["direct", "staged", "auto"])},
    optional={
        "MORI_HOST_THREADS": st.sampled_from(["1", "2", "3"]),
        "MORI_HOST_ISA": st.deferred(lambda: st.sampled_from(instruction_sets())),
        "MORI_FP8_COMBINE_SCALE_DIM": st.sampled_from(["1", "3", "7", "100", "5000"]),
    },
).map(lambda variables: tuple(variables.items()))


@st.composite
def quantised(draw: st.DrawFn, case: Case) -> Case:
    """The case with a quantisation that its kernel type offers; block-wise ones take no rows in place."""
    offered = [name for name, kernel_types in BLOCKWISE.items() if case.kernel_type in kernel_types]
    quant_type = draw(st.sampled_from(["fp8_direct_cast", *offered]))
    if quant_type in BLOCKWISE:
        case = case.with_steps(*(replace(step, external=True) for step in case.steps))
    return replace(case, quant_type=quant_type, combine_dtype=BF16)


def needed_rows(case: Case) -> int:
    """The smallest receive cap that every dispatch of the case fits, at least 1."""
    routings = [reference.route(step.indices, case.experts_per_rank) for step in case.steps if step.indices]
    return max((routing.received(rank) for routing in routings for rank in range(case.world_size)), default=1) or 1
