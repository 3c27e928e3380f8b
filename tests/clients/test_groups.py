"""How clients register their process group and start and end shmem."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from tests.clients.callers import WORLD_SIZE, check_result, new_op
from tests.clients.layer import Layer
from tests.rank_worker import RankContext
from tests.ranks import pool
from tests.v1.exercise import require

LAYER = Layer([9, 16])


def round_trip(context: RankContext) -> None:
    op, rank = new_op(LAYER, context), context.rank
    rows, weights, scales, ids, _ = op.dispatch(LAYER.rows[rank], LAYER.weights[rank], None, LAYER.ids[rank])
    check_result(LAYER, rank, op.combine(LAYER.experts(rank, rows, scales, weights, ids), None, LAYER.ids[rank])[0])


def register_a_cpu_group(name: str) -> None:
    """vLLM, AITER ("mori") and the Megatron fork ("mori_ep")."""
    import mori

    cpu_group = dist.new_group(backend="gloo")
    torch._C._distributed_c10d._register_process_group(name, cpu_group)
    mori.shmem.shmem_torch_process_group_init(name)


def register_unless_registered(name: str) -> None:
    """SGLang: every layer asks; torch's word for a known name makes it skip the rest."""
    import mori

    group = dist.new_group(backend="gloo")
    skipped = 0
    for _ in range(3):
        try:
            torch._C._distributed_c10d._register_process_group(name, group)
        except RuntimeError as error:
            require("already" in str(error), str(error))
            skipped += 1
            continue
        mori.shmem.shmem_torch_process_group_init(name)
    require(skipped == 2, f"{skipped} registrations were skipped")


def pass_the_name_of_a_group(name: str) -> None:
    """A training framework: the name that torch itself gave the group."""
    import mori

    mori.shmem.shmem_torch_process_group_init(dist.new_group(backend="gloo").group_name)


FORMS: dict[str, Callable[[str], None]] = {
    "mori": register_a_cpu_group,
    "mori_ep": register_a_cpu_group,
    "mori, by every layer": register_unless_registered,
    "name of the group": pass_the_name_of_a_group,
}


def start_and_end(context: RankContext, form: str) -> None:
    import mori

    mori.shmem.shmem_finalize()  # the pool's own
    FORMS[form](form.split(",")[0])
    require(mori.shmem.shmem_mype() == context.rank and mori.shmem.shmem_npes() == WORLD_SIZE, "ranks of the group")
    round_trip(context)
    require(mori.shmem.shmem_finalize() == 0, "finalize")


@pytest.mark.parametrize("form", FORMS)
def test_groups_by_name(form: str):
    ranks = pool(WORLD_SIZE)
    ranks.renew()  # names of an earlier test would be registered still
    try:
        ranks.run(start_and_end, form)
    finally:
        ranks.renew()
