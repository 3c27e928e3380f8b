"""The same layer on a v1 op and on a v2 op, side by side in one process: every result is equal, bit for bit.

    torchrun --nproc_per_node=2 examples/ops/migrating_v1_to_v2.py
    python3 examples/ops/migrating_v1_to_v2.py

One process per GPU, or two on CPUs. docs/migrating-v1-to-v2.md goes through it.
"""

from __future__ import annotations

import os
import tempfile

import torch
import torch.distributed as dist

import mori
from mori.cco import Communicator, UniqueId, get_unique_id
from mori.ops import dispatch_combine_v2 as v2

TOKENS, HIDDEN, EXPERTS_PER_RANK, TOPK = 96, 1024, 4, 4


class LayerOnV1:
    def __init__(self, rank: int, world_size: int) -> None:
        torch._C._distributed_c10d._register_process_group("default", dist.group.WORLD)
        mori.shmem.shmem_torch_process_group_init("default")
        self.op = mori.ops.EpDispatchCombineOp(
            mori.ops.EpDispatchCombineConfig(
                data_type=torch.bfloat16,
                rank=rank,
                world_size=world_size,
                hidden_dim=HIDDEN,
                scale_dim=0,
                scale_type_size=0,
                max_token_type_size=2,
                max_num_inp_token_per_rank=TOKENS,
                num_experts_per_rank=EXPERTS_PER_RANK,
                num_experts_per_token=TOPK,
                use_external_inp_buf=False,
            )
        )

    def run(self, rows: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        received, row_weights, _, row_ids, count = self.op.dispatch(rows, weights, None, ids)
        total = int(count)
        buffer = self.op.get_registered_combine_input_buffer(torch.bfloat16)
        buffer[:total] = expert(received[:total])
        out, out_weights = self.op.combine(buffer, row_weights, ids)
        positions = self.op.get_dispatch_src_token_pos()
        stride = self.op.max_num_tokens_to_send()  # W * M
        return {
            "rows": received[:total].clone(),
            "ids": row_ids[:total].clone(),
            "source rank": positions // stride,
            "source token": positions % stride,
            "result": out[: len(rows)].clone(),
            "result weights": out_weights[: len(rows)].clone(),
        }

    def close(self) -> None:
        del self.op
        mori.shmem.shmem_finalize()


class LayerOnV2:
    def __init__(self, rank: int, world_size: int) -> None:
        courier = [bytes(get_unique_id()) if rank == 0 else b""]
        dist.broadcast_object_list(courier, src=0)
        self.comm = Communicator.init(world_size, rank, UniqueId.from_bytes(courier[0]), per_rank_vmm=1 << 30)
        config = v2.EpDispatchCombineConfig(
            rank=rank,
            world_size=world_size,
            hidden_dim=HIDDEN,
            max_num_inp_token_per_rank=TOKENS,
            num_experts_per_rank=EXPERTS_PER_RANK,
            num_experts_per_token=TOPK,
            kernel_backend="hip",
        )
        self.op = v2.EpDispatchCombineOp(config, self.comm)

    def run(self, rows: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        received, _, _, row_ids, count, routing = self.op.dispatch(rows, weights, None, ids, return_routing=True)
        total = int(count)
        buffer = self.op.combine_in_view()
        buffer[:total] = expert(received[:total])
        # Any weights ask for the sum of those that were received.
        out, out_weights = self.op.combine(buffer, weights, routing=routing)
        positions = routing.disp_tok_id_to_src_tok_id_local[:total]
        stride = self.op.cfg.max_num_inp_token_per_rank  # M
        return {
            "rows": received[:total].clone(),
            "ids": row_ids[:total].clone(),
            "source rank": positions // stride,
            "source token": positions % stride,
            "result": out.clone(),  # it has as many rows as tokens were dispatched
            "result weights": out_weights.clone(),
        }

    def close(self) -> None:
        self.op.close()
        self.comm.destroy()


def expert(rows: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.silu(rows) * 2


def run(rank: int, world_size: int, rendezvous: str) -> None:
    device = torch.device("cpu")
    if mori.target.current().is_device:
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=world_size)
    layers = LayerOnV1(rank, world_size), LayerOnV2(rank, world_size)
    generator = torch.Generator().manual_seed(7 + rank)
    for tokens in (TOKENS, 0, 31 + rank):
        rows = torch.randn(tokens, HIDDEN, generator=generator).bfloat16().to(device)
        weights = torch.rand(tokens, TOPK, generator=generator).to(device)
        ids = torch.randint(-1, world_size * EXPERTS_PER_RANK, (tokens, TOPK), generator=generator)
        on_v1, on_v2 = (layer.run(rows, weights, ids.int().to(device)) for layer in layers)
        for name, value in on_v1.items():
            assert torch.equal(value.view(torch.uint8), on_v2[name].view(torch.uint8)), f"rank {rank}: {name} differs"
        print(f"rank {rank}: {tokens} tokens, {len(on_v1['rows'])} rows received, {len(on_v1)} results are equal")
    dist.barrier()
    for layer in layers:
        layer.close()
    dist.destroy_process_group()


def main() -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if "RANK" in os.environ:
        return run(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), "env://")
    world_size = torch.cuda.device_count() if mori.target.current().is_device else 2
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(run, (world_size, f"file://{folder}/rendezvous"), nprocs=world_size)


if __name__ == "__main__":
    main()
