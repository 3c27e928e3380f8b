"""What the façades promise whatever the world: lifecycle, overlap, halves, views. One rank, in this process."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import mori
from mori import shmem

from .test_config import make_config
from .tuning import combine_rule, rule, write

HIDDEN, TOPK, TOKENS = 16, 2, 4


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch) -> Iterator[bytes]:
    monkeypatch.setenv("MORI_SHMEM_HEAP_SIZE", "16M")
    unique_id = shmem.shmem_get_unique_id()
    assert shmem.shmem_init_attr(shmem.MORI_SHMEM_INIT_WITH_UNIQUEID, 0, 1, unique_id) == 0
    yield unique_id
    shmem.shmem_finalize()


def make_op(**changes: object) -> mori.ops.EpDispatchCombineOp:
    sizes = {"world_size": 1, "hidden_dim": HIDDEN, "max_token_type_size": 2, "max_num_inp_token_per_rank": TOKENS}
    experts = {"num_experts_per_rank": 4, "num_experts_per_token": TOPK}
    return mori.ops.EpDispatchCombineOp(make_config(**(sizes | experts | changes)))


def arguments() -> tuple[torch.Tensor, torch.Tensor, None, torch.Tensor]:
    rows = torch.arange(TOKENS * HIDDEN).reshape(TOKENS, HIDDEN).to(torch.bfloat16)
    ids = torch.tensor([[0, 1], [2, 3], [1, -1], [3, 3]], dtype=torch.int32)
    return rows, torch.rand(TOKENS, TOPK), None, ids


def test_init_twice_with_equal_arguments_has_no_effect(session: bytes):
    op = make_op()
    assert shmem.shmem_init_attr(1, 0, 1, session) == 0
    assert (shmem.shmem_mype(), shmem.shmem_npes()) == (0, 1)
    op.dispatch(*arguments())


def test_init_twice_with_other_arguments_is_refused(session: bytes):
    with pytest.raises(
        RuntimeError, match=r"already initialised as rank 0 of 1 .*rank 1 of 2 .*shmem_finalize"
    ) as caught:
        shmem.shmem_init_attr(1, 1, 2, session)
    assert session[40:60].hex() not in str(caught.value)
    with pytest.raises(RuntimeError, match="already initialised"):
        shmem.shmem_init_attr(1, 0, 1, bytes(128))


def test_init_refuses_what_it_cannot_do():
    with pytest.raises(RuntimeError, match="without MPI"):
        shmem.shmem_init_attr(shmem.MORI_SHMEM_INIT_WITH_MPI_COMM, 0, 1, bytes(128))
    with pytest.raises(RuntimeError, match="Invalid unique ID size: got 127 bytes, expected 128"):
        shmem.shmem_init_attr(1, 0, 1, bytes(127))
    with pytest.raises(TypeError, match="int 128"):
        shmem.shmem_init_attr(1, 0, 1, 128)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"rank 2 is outside 0\.\.1"):
        shmem.shmem_init_attr(1, 2, 2, bytes(128))
    with pytest.raises(NotImplementedError, match="host target"):
        shmem.shmem_module_init(None)


def test_use_after_finalize_is_refused_and_init_works_again(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MORI_SHMEM_HEAP_SIZE", "16M")
    rows = arguments()[0]
    for _ in range(2):
        shmem.shmem_init_attr(1, 0, 1, shmem.shmem_get_unique_id())
        op = make_op()
        received = op.dispatch(*arguments())[0]
        assert shmem.shmem_finalize() == shmem.shmem_finalize() == 0
        calls = (shmem.shmem_mype, shmem.shmem_barrier_all, lambda: shmem.shmem_malloc(8), make_op, op.reset, op.stats)
        for call in (*calls, lambda op=op: op.dispatch(*arguments())):
            with pytest.raises(mori.NotInitialized, match="finalised"):
                call()
        assert torch.equal(received, rows)


def test_a_forked_child_has_no_part_in_it(session: bytes):
    op = make_op()
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        refused = 0
        for call in (shmem.shmem_mype, lambda: op.dispatch(*arguments())):
            try:
                call()
            except mori.NotInitialized as error:
                refused += "forked" in str(error)
        os.write(writer, bytes([refused]))
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(reader, 1) == bytes([2])
    os.close(reader)
    os.close(writer)
    op.dispatch(*arguments())


def test_heap_addresses(session: bytes):
    address = shmem.shmem_malloc(1000)
    assert address % 256 == 0
    assert shmem.shmem_malloc_align(4096, 10) % 4096 == 0
    assert shmem.shmem_malloc(0) == shmem.shmem_malloc_align(3, 8) == shmem.shmem_malloc_align(0, 8) == 0
    assert shmem.shmem_ptr_p2p(address + 4, 0, 0) == address + 4
    assert shmem.shmem_ptr_p2p(address, 1, 0) == 0
    shmem.shmem_free(0)
    shmem.shmem_free(address)
    with pytest.raises(ValueError, match="not the address of a live allocation"):
        shmem.shmem_free(address)
    with pytest.raises(mori.HeapExhausted, match=r"\d+.*MORI_SHMEM_HEAP_SIZE"):
        shmem.shmem_malloc(17 << 20)


def test_freed_bytes_are_used_again_once_no_view_lives(session: bytes):
    size = 10 << 20
    tensor = shmem.mori_shmem_create_tensor((size,), torch.uint8)
    assert tensor.__symm_tensor__
    shmem.mori_shmem_free_tensor(tensor)
    with pytest.raises(mori.HeapExhausted):
        shmem.shmem_malloc(size)
    tensor.fill_(1)
    del tensor
    assert shmem.shmem_malloc(size) != 0


def test_a_buffer_frees_what_it_owns(session: bytes):
    size = 10 << 20
    buffer = shmem.MoriShmemBuffer(shmem.shmem_malloc(size), size, torch.int32)
    assert torch.from_dlpack(buffer).fill_(7).data_ptr() == buffer.ptr
    assert buffer.tensor((4, 5))[3, 4] == 7
    buffer.free()
    buffer.free()
    del buffer
    assert shmem.shmem_malloc(size) != 0


def test_an_op_dies_with_its_last_reference_and_gives_its_memory_back(session: bytes):
    wide = {"hidden_dim": 1 << 18, "max_num_inp_token_per_rank": 8}  # three regions of 4 MiB
    op = make_op(**wide)
    gone = weakref.ref(op)
    with pytest.raises(mori.HeapExhausted, match="EpDispatchCombineOp needs"):
        make_op(**wide)
    del op
    assert gone() is None
    make_op(**wide)


@pytest.mark.parametrize("argument", ["input", "weights", "indices"])
def test_arguments_must_not_overlap_the_receive_memory(session: bytes, argument: str):
    op = make_op()
    given = dict(zip(("input", "weights", "scales", "indices"), arguments(), strict=True))
    received = dict(zip(given, op.dispatch(**given), strict=False))
    with pytest.raises(ValueError, match=rf"{argument} overlaps the receive memory.*{argument}\.clone\(\)"):
        op.dispatch(**given | {argument: received[argument]})
    op.dispatch(**given | {argument: received[argument].clone()})
    # The same memory of another op is nobody's business.
    other = make_op()
    assert torch.equal(other.dispatch(**given | {argument: received[argument]})[0], given["input"])


def test_combine_input_must_be_the_registered_buffer_or_apart_from_it(session: bytes):
    op = make_op()
    rows, weights, _, ids = arguments()
    op.dispatch(rows, weights, None, ids)
    buffer = op.get_registered_combine_input_buffer(torch.bfloat16)
    buffer.copy_(rows)
    for external in (0, 1, False, True, -1):
        assert torch.equal(op.combine(buffer, None, ids, use_external_inp_buf=external)[0], rows)
        op.dispatch(rows, weights, None, ids)
    half = op.get_registered_combine_input_buffer(torch.bfloat16, hidden_dim=HIDDEN // 2)
    with pytest.raises(ValueError, match="does not start at its first row"):
        op.combine(buffer.view(-1, HIDDEN // 2)[1 : TOKENS + 1], None, ids)
    half.copy_(rows[:, : HIDDEN // 2])
    assert torch.equal(op.combine(half, None, ids, use_external_inp_buf=0)[0], rows[:, : HIDDEN // 2])


def test_zero_copy_with_a_foreign_tensor_never_combines_stale_rows(session: bytes):
    op = make_op(use_external_inp_buf=False)
    rows, weights, _, ids = arguments()
    op.get_registered_combine_input_buffer(torch.bfloat16).fill_(99)
    received = op.dispatch(rows, weights, None, ids)[0]
    assert torch.equal(op.combine(received.clone(), None, ids)[0], rows)


def test_halves_of_a_complete_kernel_type(session: bytes):
    op = make_op()
    given = arguments()
    for half in (op.dispatch_recv, op.combine_recv):
        with pytest.raises(RuntimeError, match=f"{half.__name__} without a "):
            half()
    rows = op.dispatch_send(*given)[0]
    assert torch.equal(rows, given[0])
    for send in (lambda: op.dispatch_send(*given), lambda: op.combine_send(rows, None, given[3])):
        with pytest.raises(RuntimeError, match="dispatch_recv is missing"):
            send()
    op.reset()
    assert op.dispatch_recv(call_local_expert_count=True) is None
    # Ids 0 1 | 2 3 | 1 | 3 3
    assert op.local_expert_count.tolist() == [1, 2, 1, 3]
    assert torch.equal(op.combine_send(rows.clone(), None, given[3])[0], given[0])
    assert op.combine_recv() is None
    with pytest.raises(RuntimeError, match="without a combine_send"):
        op.combine_recv()


def test_combine_weights_without_rows_are_harmless(session: bytes):
    op = make_op()
    rows, weights, _, ids = arguments()
    received = op.dispatch(rows, weights, None, ids)
    assert op.combine(received[0], None, ids)[1] is None
    assert torch.equal(op.combine(received[0], received[1], ids)[1], weights)
    for empty in (weights[:0], torch.empty(0), torch.empty(0, 7, dtype=torch.float64)):
        assert torch.equal(op.combine(received[0], empty, ids)[1], torch.zeros(TOKENS, TOPK))
    clamped = op.combine(received[0], received[1][:2], ids)[1]
    assert torch.equal(clamped, torch.cat([weights[:2], torch.zeros(2, TOPK)]))


def test_combine_before_any_dispatch_is_zeros(session: bytes):
    op = make_op()
    op.get_registered_combine_input_buffer(torch.bfloat16).fill_(5)
    out, _ = op.combine(torch.ones(9, HIDDEN, dtype=torch.bfloat16), None, torch.zeros(9, TOPK, dtype=torch.int32))
    assert torch.equal(out, torch.zeros(TOKENS, HIDDEN, dtype=torch.bfloat16))


def test_launch_sizes_of_the_last_calls_are_kept(session: bytes, monkeypatch: pytest.MonkeyPatch):
    op = make_op()
    assert (op.launch_config_mode, op.auto_block_num) == ("MANUAL", None)
    rows, weights, _, ids = arguments()
    op.dispatch(rows, weights, None, ids, 64, 4)  # the sixth is rdma_block_num
    op.combine(rows, None, ids, block_num=7, warp_per_block=3)
    assert op._cached_dispatch_launch == (64, 4, 8)
    assert op._cached_combine_launch == (7, 0, 3)
    monkeypatch.setenv("MORI_EP_LAUNCH_CONFIG_MODE", "AUTO")
    op = make_op()
    op.dispatch(rows, weights, None, ids, 64, 4)
    assert op._cached_dispatch_launch == op.get_launch_config() == (128, 0, 16)
    assert (op.launch_config_mode, op.auto_block_num, op.auto_warp_per_block) == ("AUTO", 128, 16)


def test_auto_takes_tuned_rules_and_results_stay_the_same(
    session: bytes, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    manual = make_op()
    assert (manual._dispatch_rules, manual._combine_rules) == (None, None)
    rows, weights, _, ids = arguments()
    expected = [tensor.clone() for tensor in manual.dispatch(rows, weights, None, ids) if tensor is not None]
    total = manual.combine(rows, None, ids)[0].clone()

    of_call = {"hidden_dim": HIDDEN, "topk": TOPK}
    rules = [rule(TOKENS - 1, 3, **of_call), rule(TOKENS, 5, **of_call), rule(TOKENS, 7, hidden_dim=1)]
    rules += [
        combine_rule(TOKENS, 9, zero_copy=zero_copy, rdma_block_num=zero_copy + 1, **of_call)
        for zero_copy in (False, True)
    ]
    monkeypatch.setenv("MORI_EP_TUNING_CONFIG", str(write(tmp_path / "rules.json", rules)))
    monkeypatch.setenv("MORI_EP_LAUNCH_CONFIG_MODE", "AUTO")
    op = make_op()
    received = op.dispatch(rows, weights, None, ids, 64, 4, 2)
    assert op._cached_dispatch_launch == op.get_launch_config() == op.get_launch_config(True, 64, 4, 2) == (5, 0, 8)
    for found, wanted in zip((tensor for tensor in received if tensor is not None), expected, strict=True):
        assert torch.equal(found, wanted)
    assert torch.equal(op.combine(rows, None, ids, 64, 4, 2)[0], total)
    assert op._cached_combine_launch == op.get_launch_config(is_dispatch=False) == (9, 1, 8)
    buffer = op.get_registered_combine_input_buffer(torch.bfloat16)
    buffer.copy_(rows)
    assert torch.equal(op.combine(buffer, None, ids, use_external_inp_buf=0)[0], total)
    assert op._cached_combine_launch == (9, 2, 8)
    op.dispatch(rows[: TOKENS - 1], weights[: TOKENS - 1], None, ids[: TOKENS - 1])
    assert op._cached_dispatch_launch == (3, 0, 8)
    # What calls without a rule get is what it was.
    assert (op.auto_block_num, op.auto_rdma_block_num, op.auto_warp_per_block) == (128, 0, 16)
    assert [len(each) for each in (op._dispatch_rules, op._combine_rules)] == [3, 2]


def test_numbers_of_device_and_op(session: bytes, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MORI_FP8_COMBINE_SCALE_DIM", "28")
    op = make_op(scale_dim=3, scale_type_size=4)
    assert op._handle_info == {
        "multi_processor_count": len(os.sched_getaffinity(0)),
        "max_threads": 1024,
        "world_size": 1,
        "hidden_dim": HIDDEN,
        "scale_dim": 3,
        "scale_type_size": 4,
        "fp8_blockwise_combine_scale_dim": 28,
        "fp8_blockwise_combine_scale_type_size": 4,
        "kernel_type": 0,
        "quant_type": 0,
    }
    assert all(type(number) is int for number in op._handle_info.values())
    monkeypatch.delenv("MORI_FP8_COMBINE_SCALE_DIM")
    assert op._fp8_blockwise_combine_scale_dim == 28  # read when the op was built
    assert make_op()._fp8_blockwise_combine_scale_dim == 56
    for text in ("0", "-1", "2.5", "many"):
        monkeypatch.setenv("MORI_FP8_COMBINE_SCALE_DIM", text)
        with pytest.raises(ValueError, match=f"MORI_FP8_COMBINE_SCALE_DIM='{text}'.*a whole number from 1"):
            make_op()


def test_rank_and_world_must_be_those_of_shmem(session: bytes):
    for rank, world_size in ((1, 2), (0, 2)):
        with pytest.raises(ValueError, match=rf"rank {rank} of world_size {world_size}, .* rank 0 of 1"):
            make_op(rank=rank, world_size=world_size)
