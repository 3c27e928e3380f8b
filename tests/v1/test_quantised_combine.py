"""Combines whose bf16 rows travel as fp8 or fp4, against the reference, bit for bit; and what they refuse."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests import quantised_reference, reference
from tests.rank_worker import RankContext
from tests.ranks import pool
from tests.v1 import cases
from tests.v1.cases import BF16, BLOCKWISE, F32, KERNEL_TYPES, QUANT_TYPES, Case, Step, routing
from tests.v1.exercise import environment, exercise, new_op, raises, require, require_same_bits
from tests.v1.strategies import instruction_sets

QUANTISED = QUANT_TYPES[1:]
OFFERED = [(kernel_type, QUANTISED[0]) for kernel_type in KERNEL_TYPES] + [
    (kernel_type, quant_type) for quant_type, kernel_types in BLOCKWISE.items() for kernel_type in kernel_types
]


def round_trips(world_size: int, tokens: int, topk: int, external: bool = True) -> tuple[Step, ...]:
    spread = routing("spread", [tokens] * world_size, topk, 2)
    wild = routing("wild", [0 if rank else tokens for rank in range(world_size)], topk, 2)
    combine = Step("combine", external=external)
    return (Step("dispatch", spread), combine, combine, Step("dispatch", wild), replace(combine, whole_view=True))


def quantised_case(world_size: int, hidden: int, quant_type: str, scales_per_row: int = 56, **options) -> Case:
    case = Case(world_size, hidden, 4, 2, 11, round_trips(world_size, 11, 4), quant_type=quant_type)
    return replace(case, environment=(("MORI_FP8_COMBINE_SCALE_DIM", str(scales_per_row)),), **options)


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("kernel_type,quant_type", OFFERED)
def test_every_kernel_type_that_offers_it(world_size: int, kernel_type: str, quant_type: str):
    case = quantised_case(world_size, 672, quant_type, values="wide", kernel_type=kernel_type)
    pool(world_size).run(exercise, case)


@pytest.mark.parametrize("world_size", [2])
@pytest.mark.parametrize("quant_type", QUANTISED)
@pytest.mark.parametrize("hidden", [1, 7, 96, 672, 2880, 4097])
def test_block_lengths_that_do_not_divide(world_size: int, hidden: int, quant_type: str):
    for scales_per_row in (1, 3, 56, 101) if quant_type in BLOCKWISE else (56,):
        for values in ("wide", "special", "bits"):
            case = quantised_case(
                world_size, hidden, quant_type, scales_per_row, values=values, spare_hidden=hidden % 3
            )
            pool(world_size).run(exercise, case)


@pytest.mark.parametrize("world_size", [3])
@pytest.mark.parametrize("quant_type", QUANTISED)
def test_results_depend_on_neither_threads_nor_instruction_set(world_size: int, quant_type: str):
    for isa in instruction_sets():
        for threads in ("1", "3"):
            case = quantised_case(world_size, 167, quant_type, 3, values="wide")
            variables = (*case.environment, ("MORI_HOST_ISA", isa), ("MORI_HOST_THREADS", threads))
            pool(world_size).run(exercise, replace(case, environment=variables))


@pytest.mark.parametrize("world_size", [2])
@pytest.mark.parametrize("combine_dtype", [dtype for dtype in cases.PAYLOAD_DTYPES if dtype != BF16], ids=str)
def test_a_direct_cast_leaves_rows_of_other_dtypes_alone(world_size: int, combine_dtype: torch.dtype):
    case = quantised_case(world_size, 96, "fp8_direct_cast", values="wide", combine_dtype=combine_dtype)
    pool(world_size).run(exercise, case)


@pytest.mark.parametrize("world_size", [2])
@pytest.mark.parametrize("kernel_type", KERNEL_TYPES)
def test_a_direct_cast_leaves_rows_in_the_registered_buffer_alone(world_size: int, kernel_type: str):
    case = quantised_case(world_size, 96, "fp8_direct_cast", values="wide", kernel_type=kernel_type)
    dispatch, combine, *_ = round_trips(world_size, 11, 4, external=False)
    pool(world_size).run(exercise, case.with_steps(dispatch, combine, dispatch, combine))


# What a row of ones and this value comes back as; by hand.
BY_HAND = {
    ("none", 1.0625): 1.0625,
    ("fp8_direct_cast", 1.0625): 1.0,  # half way, to even
    ("fp8_direct_cast", 1000.0): 448.0,  # the largest
    ("fp8_blockwise", 1.0625): 1.0,  # no block is scaled up
    ("fp8_blockwise", 1000.0): 1000.0,  # the largest again, times its scale
    ("fp4_blockwise", 1000.0): 1000.0,
}


def by_hand(context: RankContext, quant_type: str, value: float, expected: float) -> None:
    """One rank: the only rows are its own, and they are rounded like those that travel."""
    op = new_op(context, Case(1, 8, 1, 1, 1, (), quant_type=quant_type))
    ids = torch.zeros(1, 1, dtype=torch.int32)
    row = torch.ones(1, 8, dtype=BF16)
    row[0, 5] = value
    op.dispatch(row, None, None, ids)
    for _ in range(2):
        out, _ = op.combine(row, None, ids)
        require(float(out[0, 5]) == expected, f"{value} came back as {float(out[0, 5])}, expected {expected}")


@pytest.mark.parametrize("quant_type,value", BY_HAND)
def test_a_rank_s_own_rows_are_quantised_too(quant_type: str, value: float):
    pool(1).run(by_hand, quant_type, value, BY_HAND[quant_type, value])


def registered_as_external_input(context: RankContext, case: Case) -> None:
    """What travels is written over the registered buffer; when that is the input, nothing may be lost."""
    op = new_op(context, case)
    indices = [torch.from_numpy(ids) for ids in case.steps[0].indices]
    route = reference.route(indices, case.experts_per_rank)
    returned = [cases.expert_rows(case, 1, rank, route.received(rank)) for rank in range(context.world_size)]
    own = returned[context.rank]
    op.dispatch(cases.payload(case, 0, context.rank), None, None, indices[context.rank])
    buffer = op.get_registered_combine_input_buffer(BF16)
    buffer[: len(own)].copy_(own)
    out, _ = op.combine(buffer, None, indices[context.rank], use_external_inp_buf=True)
    if case.quant_type == "fp8_direct_cast":
        expected = quantised_reference.fp8_direct_cast_combine(route, returned)
    else:
        expected = quantised_reference.fp8_blockwise_combine(route, returned, case.scales_per_row)
    require_same_bits(out[: len(expected[context.rank])], expected[context.rank], "combined rows")


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("quant_type", ["fp8_direct_cast", "fp8_blockwise"])
def test_the_registered_buffer_as_external_input(world_size: int, quant_type: str):
    pool(world_size).run(registered_as_external_input, quantised_case(world_size, 96, quant_type, values="wide"))


# ---- what is refused


def refused(context: RankContext, case: Case, text: str, dtype: torch.dtype, external: bool) -> None:
    """ValueError before anything is sent: on this rank alone, and the op goes on."""
    op = new_op(context, case)
    ids = torch.zeros(3, 4, dtype=torch.int32)
    received = op.dispatch(torch.ones(3, 96, dtype=BF16), None, None, ids)[0]
    if case.kernel_type == "AsyncLL":
        op.dispatch_recv()
    if context.rank == 0:
        raises(
            ValueError,
            lambda: op.combine(received.to(dtype), None, ids, use_external_inp_buf=external),
            says=text,
        )
    context.barrier()
    received = op.dispatch(torch.ones(3, 96, dtype=BF16), None, None, ids)
    if case.kernel_type == "AsyncLL":
        op.dispatch_recv()
    require(int(received[4]) == (0 if context.rank else 6), "a dispatch after the refusal")


REFUSED = [
    ("fp8_blockwise", kernel_type, BF16, True, "only supports IntraNode/IntraNodeLL/AsyncLL combine")
    for kernel_type in ("InterNode", "InterNodeV1", "InterNodeV1LL")
] + [
    ("fp4_blockwise", kernel_type, BF16, True, "only supports IntraNode/IntraNodeLL combine")
    for kernel_type in ("InterNode", "InterNodeV1", "InterNodeV1LL", "AsyncLL")
]
for _quant_type, _kernel_types in BLOCKWISE.items():
    for _kernel_type in _kernel_types:
        REFUSED += [
            (_quant_type, _kernel_type, F32, True, "combine only supports bf16, got torch.float32"),
            (_quant_type, _kernel_type, torch.float8_e4m3fn, True, "combine only supports bf16"),
            (_quant_type, _kernel_type, BF16, False, "--zero-copy 0 (useExternalInpBuffer=True)"),
        ]


@pytest.mark.parametrize("quant_type,kernel_type,dtype,external,text", REFUSED)
def test_what_block_wise_quantisation_refuses(quant_type: str, kernel_type: str, dtype, external: bool, text: str):
    case = replace(quantised_case(2, 96, quant_type), kernel_type=kernel_type, combine_dtype=F32)
    pool(2).run(refused, case, text, dtype, external)


def number_of_scales(context: RankContext, value: str, quant_type: str) -> str:
    with environment(("MORI_FP8_COMBINE_SCALE_DIM", value)):
        try:
            op = new_op(context, Case(context.world_size, 96, 4, 2, 4, (), quant_type=quant_type))
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return str(op._fp8_blockwise_combine_scale_dim)


def test_how_many_scales_a_row_has():
    for value, expected in (("", "56"), ("1", "1"), ("100000", "100000")):
        assert pool(1).run(number_of_scales, value, "fp8_blockwise") == [expected]
    for value in ("0", "-1", "many"):
        (text,) = pool(1).run(number_of_scales, value, "fp8_blockwise")
        assert text.startswith("ValueError") and "MORI_FP8_COMBINE_SCALE_DIM" in text and value in text


def different_scales(context: RankContext, quant_type: str) -> str:
    return number_of_scales(context, str(3 + context.rank), quant_type)


def test_ranks_agree_on_the_scales_of_block_wise_ops_only():
    assert pool(2).run(different_scales, "none") == ["3", "4"]
    for text in pool(2).run(different_scales, "fp4_blockwise"):
        assert text.startswith("ConfigMismatch") and "MORI_FP8_COMBINE_SCALE_DIM" in text


def disagreeing_ranks(context: RankContext, odd_dtype: torch.dtype, odd_external: bool) -> str:
    import mori

    case = quantised_case(context.world_size, 96, "fp8_direct_cast", combine_dtype=F32)
    op = new_op(context, case)
    ids = torch.zeros(3, 4, dtype=torch.int32)
    rows = torch.full((3, 96), 1.0625, dtype=BF16)
    received = op.dispatch(rows, None, None, ids)[0]
    is_odd = context.rank == context.world_size - 1
    dtype, external = (odd_dtype, odd_external) if is_odd else (BF16, True)
    try:
        op.combine(received.to(dtype), None, ids, use_external_inp_buf=external)
    except mori.errors.RowMismatch as error:
        text = str(error)
    else:
        raise AssertionError("ranks whose rows travel in different forms got no error")
    out, _ = op.combine(received, None, ids)
    require_same_bits(out[:3], torch.ones(3, 96, dtype=BF16), "the same dispatch, combined by all alike")
    return text


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("odd_dtype,odd_external", [(BF16, False), (F32, True)], ids=["zero copy", "float32"])
def test_ranks_that_disagree_all_raise(world_size: int, odd_dtype: torch.dtype, odd_external: bool):
    for text in pool(world_size).run(disagreeing_ranks, odd_dtype, odd_external):
        assert "quantised" in text and f"rank {world_size - 1}" in text
