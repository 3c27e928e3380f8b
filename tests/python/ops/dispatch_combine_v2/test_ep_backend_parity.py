"""Two kernel backends on one communicator get the same inputs and must give the same bits.

HIDDEN, TOPK, EPR (experts per rank), SWEEP (tokens), BACKENDS (two names, "flydsl,hip"). In place of a backend that
does not load, v1 is compared; the output says so.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[4]))

import torch

from mori.ops.dispatch_combine_v2 import EpDispatchCombineOp
from mori.parity.compare import differences
from mori.parity.configuration import Configuration, Round
from mori.parity.play import play
from tests.python.ops.dispatch_combine_v2.ranks import Rank, number, numbers, run
from tests.python.ops.harness import ranks_of
from tests.rank_worker import RankContext
from tests.v2.ranks import communicator


def ways(available: list[str]) -> list[tuple[str, str]]:
    """(API, backend) of what is compared."""
    asked = os.environ.get("BACKENDS", "flydsl,hip").split(",")
    return [("v2", name) if name in available else ("v1", "hip") for name in asked]


def configuration(world_size: int, tokens: int) -> Configuration:
    return Configuration(
        seed=tokens,
        world_size=world_size,
        hidden=number("HIDDEN", 2048),
        topk=number("TOPK", 4),
        experts_per_rank=number("EPR", 4),
        max_tokens=tokens,
        dtype=torch.bfloat16,
        combine_dtype=torch.bfloat16,
        scale_dim=0,
        handles=True,
        rounds=(Round((tokens,) * world_size, weights=True, external=(False, True)),),
    )


def program(this: Rank) -> bool:
    from mori.shmem import state

    available = EpDispatchCombineOp.available_backends()
    compared = ways(available)
    names = ["/".join(way) for way in compared]
    passed = True

    def barrier() -> None:
        this.finish_kernels()
        this.communicator.barrier()

    for tokens in numbers("SWEEP", "8,64,512"):
        case = configuration(this.world_size, tokens)
        outcomes = []
        for api, backend in compared:
            comm = state.current().communicator if api == "v1" else this.communicator
            outcomes.append(play(case, this.rank, api, backend, comm, barrier))
        found = list(differences((names[0], names[1]), [case], [[outcomes[0]]], [[outcomes[1]]]))
        same = this.agree(not found)
        passed &= same
        this.say(f"# PARITY ct={tokens} {names[0]} against {names[1]}: {'PASS' if same else 'FAIL'}")
        for difference in found[:5]:
            print(f"rank {this.rank}: {difference}", flush=True)
    for name in set(os.environ.get("BACKENDS", "flydsl,hip").split(",")) - set(available):
        this.say(f"# PARITY: backend {name} does not load here, v1 took its place")
    return passed


def with_shmem(this: Rank) -> bool:
    from mori import shmem

    shmem.shmem_torch_process_group_init("default")
    passed = program(this)
    shmem.shmem_finalize()
    return passed


def in_pool(context: RankContext) -> list[str]:
    this = Rank(context.rank, context.world_size, communicator(context))
    program(this)
    return this.lines


def test_ep_backend_parity() -> None:
    for lines in ranks_of().run(in_pool):
        results = [line for line in lines if "ct=" in line]
        assert len(results) == 3 and all(line.endswith("PASS") for line in results), lines


if __name__ == "__main__":
    raise SystemExit(run(with_shmem))
