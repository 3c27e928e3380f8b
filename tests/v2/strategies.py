"""Cases of tests/v1 as far as v2's native backend serves them."""

from __future__ import annotations

from hypothesis import strategies as st

from tests.v1 import cases
from tests.v1.cases import BF16, F32, Case, Step
from tests.v1.strategies import environments, index_rows
from tests.v2.exercise import case_of

# D = dispatch, C = combine, c = combine of the view. A combine needs a dispatch before it, and the view is not
# refilled while peers may still read it.
ORDERS = ("DC", "Dc", "D", "DD", "DDC", "DCC", "DcC", "DCDc", "DDDC", "DDCCDC", "DcCDDCC", "DcDcDC")


@st.composite
def case_for(draw: st.DrawFn, world_size: int) -> Case:
    topk = draw(st.integers(1, 12))
    experts_per_rank = draw(st.integers(1, 9))
    hidden = draw(st.sampled_from((32, 96, 160, 672, 2880)))
    max_tokens = draw(st.integers(1, 40 if hidden <= 672 else 9))
    with_scales, with_weights = draw(st.booleans()), draw(st.booleans())
    steps = []
    for letter in draw(st.sampled_from(ORDERS)):
        if letter == "D":
            count = st.one_of(st.just(0), st.just(max_tokens), st.integers(0, max_tokens))
            ids = tuple(draw(index_rows(draw(count), topk, world_size, experts_per_rank)) for _ in range(world_size))
            steps.append(Step("dispatch", ids, weights=draw(st.booleans()), scales=with_scales))
        else:
            steps.append(Step("combine", weights=with_weights, external=letter == "C", whole_view=draw(st.booleans())))
    return case_of(
        world_size,
        hidden,
        topk,
        experts_per_rank,
        max_tokens,
        steps=tuple(steps),
        dtype=draw(st.sampled_from(cases.PAYLOAD_DTYPES)),
        combine_dtype=draw(st.sampled_from((BF16, F32))),
        scale_dim=draw(st.sampled_from((0, 1, 7, 32))),
        values=draw(st.sampled_from(("numbers", "bits", "special"))),
        seed=draw(st.integers(0, 2**16)),
        grid=draw(st.sampled_from(((-1, -1), (1, 1), (17, 3), (256, 16)))),
        environment=draw(environments),
    )
