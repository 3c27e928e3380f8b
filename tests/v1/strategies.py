"""Hypothesis strategies for Case: drawn in the parent, so that all ranks see the same example."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from tests.v1 import cases
from tests.v1.cases import Case, Step

HIDDEN = (1, 7, 96, 672, 2880, 7168)
TOPK = tuple(range(1, 17))

# D = dispatch, C = combine, c = combine from the registered buffer.
ORDERS = ("DC", "Dc", "D", "C", "c", "DD", "CD", "DDC", "DCC", "DcC", "DCDc", "CCDC", "DDCCDC", "DcCDDCC", "CDcDc")


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
    return Case(
        world_size=world_size,
        hidden=hidden,
        topk=topk,
        experts_per_rank=experts_per_rank,
        max_tokens=max_tokens,
        steps=tuple(steps),
        dtype=draw(st.sampled_from(cases.PAYLOAD_DTYPES)),
        combine_dtype=draw(st.sampled_from(cases.COMBINE_DTYPES)),
        combine_hidden=draw(st.sampled_from([None, None, 1, 7, 96])),
        spare_hidden=draw(st.sampled_from([0, 0, 1, 16])),
        scale_dim=draw(st.sampled_from([0, 1, 7, 32])),
        scale_bytes=draw(st.sampled_from([1, 2, 4])),
        values=draw(st.sampled_from(["numbers", "bits", "special"])),
        seed=draw(st.integers(0, 2**16)),
        grid=draw(st.sampled_from([(-1, -1), (1, 1), (17, 3), (256, 16)])),
    )
