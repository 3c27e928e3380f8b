"""Dispatch and combine from beginning to end, with experts that return what they get, and every result checked.

    python3 examples/ops/dispatch_combine/test_dispatch_combine.py
    python3 examples/ops/dispatch_combine/test_dispatch_combine.py --dtype fp4
    python3 examples/ops/dispatch_combine/test_dispatch_combine.py --quant-type fp8_direct_cast

One process per GPU, or two on CPUs. `--dtype fp4` dispatches pairs of fp4 values and combines bf16.
"""

from __future__ import annotations

import argparse
import os
import tempfile

import torch
import torch.distributed as dist

import mori

TOKENS, HIDDEN, EXPERTS_PER_RANK, TOPK = 128, 4096, 16, 8
FP4 = torch.float4_e2m1fn_x2
FP4_VALUES = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
# |result - expected| <= this x (1 + |expected|), by quantisation of the rows on their way back
TOLERANCE = {"none": 1e-2, "fp8_direct_cast": 1e-1, "fp8_blockwise": 7e-2}


def bf16_values(rows: torch.Tensor) -> torch.Tensor:
    """[n, hidden] of bf16 rows, or of fp4 rows, whose bytes hold the even column in the low half."""
    if rows.dtype != FP4:
        return rows
    raw = rows.view(torch.uint8)
    codes = torch.stack([raw & 15, raw >> 4], dim=2).flatten(1)
    return FP4_VALUES.to(raw.device)[codes.long()].bfloat16()


def build_op(rank: int, world_size: int, dtype: torch.dtype, quant_type: str) -> mori.ops.EpDispatchCombineOp:
    config = mori.ops.EpDispatchCombineConfig(
        data_type=dtype,
        rank=rank,
        world_size=world_size,
        hidden_dim=HIDDEN,
        scale_dim=HIDDEN // 32 if dtype == FP4 else 0,
        scale_type_size=1,
        max_token_type_size=2,
        max_num_inp_token_per_rank=TOKENS,
        num_experts_per_rank=EXPERTS_PER_RANK,
        num_experts_per_token=TOPK,
        quant_type=quant_type,
    )
    return mori.ops.EpDispatchCombineOp(config)


def inputs_of(rank: int, world_size: int, dtype: torch.dtype, device: torch.device) -> tuple:
    """What any rank sends: every rank can make it, and so check what arrives."""
    generator = torch.Generator().manual_seed(123 + rank)
    if dtype == FP4:
        rows = torch.randint(0, 256, (TOKENS, HIDDEN // 2), dtype=torch.uint8, generator=generator).view(FP4)
        scales = torch.randint(120, 135, (TOKENS, HIDDEN // 32), dtype=torch.uint8, generator=generator)
        scales = scales.view(torch.float8_e8m0fnu).to(device)
    else:
        rows, scales = torch.randn(TOKENS, HIDDEN, generator=generator).bfloat16(), None
    weights = torch.rand(TOKENS, TOPK, generator=generator)
    experts = torch.rand(TOKENS, world_size * EXPERTS_PER_RANK, generator=generator).argsort(dim=1)[:, :TOPK]
    return rows.to(device), weights.to(device), scales, experts.int().to(device)


def run(rank: int, world_size: int, dtype: torch.dtype, quant_type: str, rendezvous: str) -> None:
    device = torch.device("cpu")
    if mori.target.current().is_device:
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world_size)
    torch._C._distributed_c10d._register_process_group("default", dist.group.WORLD)
    mori.shmem.shmem_torch_process_group_init("default")

    op = build_op(rank, world_size, dtype, quant_type)
    everything = [inputs_of(peer, world_size, dtype, device) for peer in range(world_size)]
    rows, weights, scales, experts = everything[rank]
    out, out_weights, out_scales, out_experts, count = op.dispatch(rows, weights, scales, experts)

    # Position i says which token of which rank received row i is. decode_send_flat_idx takes it apart: ranks are
    # world_size * TOKENS apart, not TOKENS.
    positions = op.get_dispatch_src_token_pos()
    assert len(positions) == int(count) == len(positions.unique())
    for row, position in enumerate(positions):
        source, token = op.decode_send_flat_idx(position)
        for received, sent in zip((out, out_weights, out_scales, out_experts), everything[source], strict=True):
            if sent is not None:
                same = torch.equal(received[row].view(torch.uint8), sent[token].view(torch.uint8))
                assert same, f"rank {rank}: row {row} is not token {token} of rank {source}"

    # Experts that do nothing. combine adds up the rows of a token as they come, without router weights.
    result, result_weights = op.combine(bf16_values(out), out_weights, experts)
    ranks = torch.arange(world_size, device=device)
    copies = (experts[:, :, None] // EXPERTS_PER_RANK == ranks).any(dim=1).sum(dim=1, keepdim=True)
    expected = bf16_values(rows).float() * copies
    tolerance = TOLERANCE[quant_type]
    torch.testing.assert_close(result[: len(rows)].float(), expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(result_weights[: len(rows)], weights * copies, rtol=1e-5, atol=1e-5)
    print(f"rank {rank}: sent {len(rows)} tokens, received {int(count)} rows, all results as expected")

    dist.barrier()
    del op
    mori.shmem.shmem_finalize()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=["bf16", "fp4"], default="bf16", help="rows of dispatch")
    parser.add_argument("--quant-type", choices=list(TOLERANCE), default="none", help="wire of combine")
    arguments = parser.parse_args()
    world_size = torch.cuda.device_count() if mori.target.current().is_device else 2
    dtype = FP4 if arguments.dtype == "fp4" else torch.bfloat16
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with tempfile.TemporaryDirectory() as folder:
        further = (world_size, dtype, arguments.quant_type, f"{folder}/rendezvous")
        torch.multiprocessing.spawn(run, further, nprocs=world_size)


if __name__ == "__main__":
    main()
