"""What an op can be built from: legal configs, agreement between ranks, and the numbers that follow."""

from __future__ import annotations

import dataclasses
import re

import pytest
import torch

from tests.rank_worker import RankContext
from tests.ranks import pool
from tests.v1.cases import Case, Step, routing
from tests.v1.exercise import exercise, require

BASE = Case(2, 16, 4, 3, 8, (), scale_dim=2, scale_bytes=4)

# field: values on rank 0 and rank 1. Each must be refused on both ranks.
DISAGREEMENTS: dict[str, tuple] = {
    "hidden_dim": (16, 32),
    "max_token_type_size": (2, 4),
    "scale_dim": (2, 0),
    "scale_type_size": (4, 1),
    "max_num_inp_token_per_rank": (8, 16),
    "num_experts_per_rank": (3, 4),
    "num_experts_per_token": (4, 5),
    "max_total_recv_tokens": (0, 8),
}

# Differences that shape neither memory nor the wire.
HARMLESS: dict[str, tuple] = {
    "block_num": (80, 1),
    "warp_num_per_block": (8, 16),
    "rdma_block_num": (0, 7),
    "data_type": (torch.bfloat16, torch.float32),
    "use_external_inp_buf": (True, False),
    "gpu_per_node": (8, 2),
}


def build(context: RankContext, **overrides):
    import mori

    case = dataclasses.replace(BASE, world_size=context.world_size)
    return mori.ops.EpDispatchCombineOp(case.config(context.rank, **overrides))


def disagree(context: RankContext, field: str, values: tuple) -> str:
    import mori

    value = values[context.rank % 2]
    try:
        build(context, **{field: value})
    except mori.ConfigMismatch as error:
        text = str(error)
    else:
        raise AssertionError(f"an op was built although ranks disagree on {field}")
    build(context)  # and then all ranks can build one
    return text


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("field", DISAGREEMENTS)
def test_ranks_that_disagree_all_raise_and_name_field_ranks_and_values(world_size: int, field: str):
    values = DISAGREEMENTS[field]
    texts = pool(world_size).run(disagree, field, values)
    for text in texts:
        assert field in text
        for value in values:
            assert re.search(rf"\b{value}\b", text), text
        for rank in (0, 1):
            assert re.search(rf"\b{rank}\b", text), text


def agree(context: RankContext, field: str, values: tuple) -> int:
    op = build(context, **{field: values[context.rank]})
    ids = torch.zeros(3, 4, dtype=torch.int32)
    rows = torch.ones(3, 16, dtype=torch.bfloat16)
    return int(op.dispatch(rows, None, None, ids)[4])


@pytest.mark.parametrize("world_size", [2])
@pytest.mark.parametrize("field", HARMLESS)
def test_differences_that_do_not_matter(world_size: int, field: str):
    assert pool(world_size).run(agree, field, HARMLESS[field]) == [6, 0]


ILLEGAL: dict[str, tuple[dict, type[Exception], str]] = {
    "world_size unlike shmem": ({"world_size": 3, "gpu_per_node": 3}, ValueError, "world_size & 3 & 2"),
    "rank too large": ({"rank": 2}, ValueError, "rank & 2"),
    "no tokens": ({"max_num_inp_token_per_rank": 0}, ValueError, "max_num_inp_token_per_rank & 0"),
    "no hidden": ({"hidden_dim": 0}, ValueError, "hidden_dim & 0"),
    "no experts": ({"num_experts_per_rank": 0}, ValueError, "num_experts_per_rank & 0"),
    "no topk": ({"num_experts_per_token": 0}, ValueError, "num_experts_per_token & 0"),
    "negative scales": ({"scale_dim": -1}, ValueError, "scale_dim & -1"),
    "hidden no int": ({"hidden_dim": 16.0}, TypeError, "hidden_dim"),
    "no nodes": ({"gpu_per_node": 0}, ValueError, "gpu_per_node & 0"),
    "flat indices beyond int32": (
        {"max_num_inp_token_per_rank": 2**30},
        ValueError,
        "2 & 1073741824 & (536870911|16777215)",
    ),
    "quant unknown": ({"quant_type": "int4"}, ValueError, "none & fp8_direct_cast & fp8_blockwise & fp4_blockwise"),
    "kernel type unknown": ({"kernel_type": 17}, ValueError, "IntraNode"),
}


def illegal(context: RankContext, name: str) -> None:
    overrides, error_type, says = ILLEGAL[name]
    try:
        build(context, **overrides)
    except error_type as error:
        for pattern in says.split(" & "):
            require(re.search(pattern, str(error)), f"the message does not say {pattern!r}: {error}")
    else:
        raise AssertionError("an op was built")
    build(context)


@pytest.mark.parametrize("world_size", [2])
@pytest.mark.parametrize("name", ILLEGAL)
def test_illegal_config(world_size: int, name: str):
    pool(world_size).run(illegal, name)


def claims_to_be_rank_zero(context: RankContext) -> None:
    import mori

    case = dataclasses.replace(BASE, world_size=context.world_size)
    if context.rank == 1:
        with pytest.raises(ValueError, match=r"rank 0\D.*1"):
            mori.ops.EpDispatchCombineOp(case.config(0))
    build(context)  # the other ranks have been waiting in here


@pytest.mark.parametrize("world_size", [2])
def test_rank_must_be_the_rank_in_shmem(world_size: int):
    pool(world_size).run(claims_to_be_rank_zero)


KERNEL_TYPES = {"IntraNode": 0, "InterNode": 1, "InterNodeV1": 2, "InterNodeV1LL": 3, "AsyncLL": 4, "IntraNodeLL": 5}


def every_kernel_type(context: RankContext) -> None:
    import mori

    for name in KERNEL_TYPES:
        op = build(context, kernel_type=mori.ops.EpDispatchCombineKernelType[name])
        require(op.config.kernel_type is mori.ops.EpDispatchCombineKernelType[name], f"{name}: config changed")


@pytest.mark.parametrize("world_size", [2])
def test_every_kernel_type_is_built_with_the_default_gpu_per_node(world_size: int):
    pool(world_size).run(every_kernel_type)


def test_enums_and_config_are_what_clients_expect():
    import mori
    from mori.ops import EpDispatchCombineConfig, EpDispatchCombineKernelType

    assert {member.name: int(member.value) for member in EpDispatchCombineKernelType} == KERNEL_TYPES
    assert mori.ops.EpDispatchCombineKernelType.IntraNode is EpDispatchCombineKernelType(0)
    names = (
        "data_type rank world_size hidden_dim scale_dim scale_type_size max_token_type_size max_num_inp_token_per_rank "
        "num_experts_per_rank num_experts_per_token warp_num_per_block block_num max_total_recv_tokens "
        "use_external_inp_buf kernel_type gpu_per_node rdma_block_num num_qp_per_pe quant_type"
    )
    assert [field.name for field in dataclasses.fields(EpDispatchCombineConfig)] == names.split()
    config = EpDispatchCombineConfig(torch.bfloat16, 0, 2, 16, 0, 0, 2, 8, 3, 4)
    assert (config.warp_num_per_block, config.block_num, config.max_total_recv_tokens) == (8, 80, 0)
    assert config.use_external_inp_buf is True and config.gpu_per_node == 8 and config.quant_type == "none"
    assert config.kernel_type is EpDispatchCombineKernelType.IntraNode


def derived_sizes(context: RankContext, cap: int) -> tuple[int, ...]:
    op = build(context, max_total_recv_tokens=cap)
    flat = 1 * (context.world_size * 8) + 5
    require(op.decode_send_flat_idx(flat) == (1, 5), f"decoded {op.decode_send_flat_idx(flat)}")
    require(op.decode_send_flat_idx(torch.tensor(flat, dtype=torch.int32)) == (1, 5), "decoding of a tensor")
    require(op.max_num_tokens_to_send_per_rank() == 8, "M")
    require(op.max_num_tokens_to_send() == 8 * context.world_size, "W * M")
    require(op.launch_config_mode == "MANUAL", op.launch_config_mode)
    return op.max_num_tokens_to_recv(), op.max_num_tokens_to_recv_per_rank()


@pytest.mark.parametrize("world_size", [3])
@pytest.mark.parametrize(
    "cap,expected", [(0, (24, 8)), (-5, (24, 8)), (1, (3, 1)), (4, (6, 2)), (24, (24, 8)), (99, (24, 8))]
)
def test_derived_sizes(world_size: int, cap: int, expected: tuple[int, int]):
    assert pool(world_size).run(derived_sizes, cap) == [expected] * world_size


def launch_sizes(context: RankContext) -> list[tuple]:
    op = build(context, block_num=40, warp_num_per_block=4, rdma_block_num=2)
    require(not hasattr(op, "_cached_dispatch_launch"), "a launch is cached before any call")
    ids, rows = torch.zeros(3, 4, dtype=torch.int32), torch.ones(3, 16, dtype=torch.bfloat16)
    found = []
    for overrides in ({}, {"block_num": 9}, {"warp_per_block": 3}, {"block_num": 9, "rdma_block_num": 5}):
        received = op.dispatch(rows, None, None, ids, **overrides)[0]
        op.combine(received, None, ids, **overrides)
        found += [tuple(op._cached_dispatch_launch), tuple(op._cached_combine_launch)]
    return found


@pytest.mark.parametrize("world_size", [1])
def test_launch_sizes_come_from_the_call_else_from_the_config(world_size: int):
    [found] = pool(world_size).run(launch_sizes)
    manual = [(40, 2, 4), (9, 2, 4), (40, 2, 3), (9, 5, 4)]
    assert found == [sizes for sizes in manual for _ in range(2)]
    [found] = pool(world_size, MORI_EP_LAUNCH_CONFIG_MODE="AUTO").run(launch_sizes_in_auto)
    assert found == ("AUTO", 128, 0, 16, (128, 0, 16))


def launch_sizes_in_auto(context: RankContext) -> tuple:
    op = build(context)
    op.dispatch(torch.ones(1, 16, dtype=torch.bfloat16), None, None, torch.zeros(1, 4, dtype=torch.int32), 7, 0, 3)
    sizes = (op.auto_block_num, op.auto_rdma_block_num, op.auto_warp_per_block)
    return op.launch_config_mode, *sizes, tuple(op._cached_dispatch_launch)


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("cap", [4, 6, 7])
def test_up_to_the_receive_cap_all_is_well(world_size: int, cap: int):
    tokens = [cap // world_size] * world_size
    to_rank_0 = tuple(ids * 0 for ids in routing("any", tokens, 4, 3))
    steps = (Step("dispatch", to_rank_0), Step("combine"), Step("combine"))
    case = Case(world_size, 16, 4, 3, 8, steps, receive_cap=cap, values="bits")
    pool(world_size).run(exercise, case)
