"""Small programs as users write them, run as processes of their own: `python -m tests.v1.programs NAME RANK ID`.

They show what the end of a process does, which ranks of a pool never come to. Two ranks, no torch.distributed.
"""

from __future__ import annotations

import os
import signal
import sys
import time

import torch

import mori

WORLD_SIZE = 2
kept: list = []


def make_op(rank: int):
    config = mori.ops.EpDispatchCombineConfig(
        data_type=torch.bfloat16,
        rank=rank,
        world_size=WORLD_SIZE,
        hidden_dim=64,
        scale_dim=0,
        scale_type_size=0,
        max_token_type_size=2,
        max_num_inp_token_per_rank=16,
        num_experts_per_rank=2,
        num_experts_per_token=2,
        use_external_inp_buf=False,
    )
    return mori.ops.EpDispatchCombineOp(config)


def round_trip(op) -> None:
    rows = torch.ones(16, 64, dtype=torch.bfloat16)
    ids = torch.tensor([[0, 3]] * 16, dtype=torch.int32)
    received, _, _, _, count = op.dispatch(rows, None, None, ids)
    out, _ = op.combine(received, None, ids)
    if int(count) != 32 or not bool((out[:16] == 2).all()):
        raise SystemExit("wrong result")


def exit_without_finalize(rank: int) -> None:
    """With the op, its views and heap memory alive until the interpreter takes them down."""
    op = make_op(rank)
    round_trip(op)
    views = op.dispatch(torch.zeros(0, 64, dtype=torch.bfloat16), None, None, torch.zeros(0, 2, dtype=torch.int32))
    kept.extend([op, views, op.get_registered_combine_input_buffer(torch.bfloat16), mori.shmem.shmem_malloc(4096)])


def finalize_and_exit(rank: int) -> None:
    op = make_op(rank)
    round_trip(op)
    del op
    mori.shmem.shmem_finalize()


def one_exits_early(rank: int) -> None:
    op = make_op(rank)
    round_trip(op)
    while rank != 0:
        round_trip(op)


def one_raises(rank: int) -> None:
    op = make_op(rank)
    round_trip(op)
    if rank == 0:
        raise ZeroDivisionError("an error in the expert computation")
    while True:
        round_trip(op)


def one_is_killed(rank: int) -> None:
    op = make_op(rank)
    started = time.monotonic()
    while True:
        round_trip(op)
        if rank == 0 and time.monotonic() - started > 0.3:
            print(time.monotonic(), flush=True)
            os.kill(os.getpid(), signal.SIGKILL)


def catches_and_goes_on_alone(rank: int) -> None:
    """The survivor tears down and starts again without the peer."""
    op = make_op(rank)
    round_trip(op)
    if rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        while True:
            round_trip(op)
    except mori.PeerLost:
        pass
    del op
    mori.shmem.shmem_finalize()
    mori.shmem.shmem_init_attr(mori.shmem.MORI_SHMEM_INIT_WITH_UNIQUEID, 0, 1, mori.shmem.shmem_get_unique_id())
    print("alone:", mori.shmem.shmem_npes())


if __name__ == "__main__":
    name, own_rank, unique_id = sys.argv[1], int(sys.argv[2]), bytes.fromhex(sys.argv[3])
    torch.set_num_threads(1)
    mori.shmem.shmem_init_attr(mori.shmem.MORI_SHMEM_INIT_WITH_UNIQUEID, own_rank, WORLD_SIZE, unique_id)
    globals()[name](own_rank)
