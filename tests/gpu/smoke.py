"""First steps on a machine with GPUs, one process per GPU: python3 tests/gpu/smoke.py

Prints one line per step and rank, and at the end "smoke: ok" or what failed. No test framework, nothing to configure.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

HIDDEN, EXPERTS, TOPK, MAX_TOKENS = 1024, 4, 3, 128
LIMIT_SECONDS = 300


class Rank:
    """One process: its steps report by name."""

    def __init__(self, rank: int, world: int, store: str) -> None:
        self.rank, self.world = rank, world
        self.device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(self.device)
        dist.init_process_group(
            "gloo", store=dist.FileStore(store, world), rank=rank, world_size=world, timeout=timedelta(seconds=60)
        )

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        self.say(f"{name}: ok ({1e3 * (time.perf_counter() - begin):.1f} ms)")

    def say(self, text: str) -> None:
        print(f"rank {self.rank}: {text}", flush=True)

    def tokens(self, seed: int) -> int:
        return len(self.data(self.rank, seed)[0])

    def data(self, rank: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Rows, weights and ids that `rank` dispatches; every rank can make those of all."""
        generator = torch.Generator().manual_seed(1000 * seed + rank)
        count = 0 if (seed + rank) % 5 == 4 else 60 + 7 * rank + seed
        rows = torch.randn(count, HIDDEN, generator=generator).to(torch.bfloat16)
        weights = torch.rand(count, TOPK, generator=generator)
        ids = torch.randint(-1, self.world * EXPERTS, (count, TOPK), generator=generator, dtype=torch.int32)
        return rows, weights, ids


def require(condition: object, text: str) -> None:
    if not condition:
        raise AssertionError(text)


def destinations(ids: torch.Tensor, rank: int) -> torch.Tensor:
    """Which tokens have an expert on `rank`."""
    return ((ids >= 0) & (ids // EXPERTS == rank)).any(dim=1)


def memory(me: Rank) -> None:
    import mori

    shmem = mori.shmem
    with me.step("symmetric tensors: write own, read peers"):
        copies = shmem.mori_shmem_create_tensor_list_intra_node((3, 100_000), torch.int32)
        copies[me.rank].fill_(me.rank + 1)
        shmem.shmem_barrier_on_stream()
        for peer, view in enumerate(copies):
            require(view.device == me.device, f"the view of rank {peer} is on {view.device}")
            require(bool((view == peer + 1).all()), f"rank {peer}'s copy holds {view.flatten()[:4].tolist()}")
        shmem.shmem_barrier_on_stream()
    with me.step("write into the next rank's memory"):
        copies[(me.rank + 1) % me.world][1].fill_(100 + me.rank)
        shmem.shmem_barrier_on_stream()
        writer = (me.rank - 1) % me.world
        require(bool((copies[me.rank][1] == 100 + writer).all()), f"{copies[me.rank][1][:4].tolist()} arrived")
        require(bool((copies[me.rank][2] == me.rank + 1).all()), "the neighbouring row changed")
    with me.step("growth of the heap by 200 MB"):
        large = shmem.mori_shmem_create_tensor((50 << 20,), torch.float32)
        require(float(large.abs().max()) == 0.0, "new memory is not zero")
        shmem.mori_shmem_free_tensor(large)


def new_op(me: Rank, **fields: object) -> object:
    import mori

    config = mori.ops.EpDispatchCombineConfig(
        data_type=torch.bfloat16,
        rank=me.rank,
        world_size=me.world,
        hidden_dim=HIDDEN,
        scale_dim=0,
        scale_type_size=0,
        max_token_type_size=4,
        max_num_inp_token_per_rank=MAX_TOKENS,
        num_experts_per_rank=EXPERTS,
        num_experts_per_token=TOPK,
        **fields,
    )
    return mori.ops.EpDispatchCombineOp(config)


def check_results(me: Rank, seed: int, out: tuple, combined: torch.Tensor) -> None:
    rows, weights, _, ids, count = (tensor if tensor is None else tensor.cpu() for tensor in out)
    expected = [me.data(source, seed) for source in range(me.world)]
    chosen = [destinations(each[2], me.rank) for each in expected]
    received = int(count[0])
    require(received == sum(int(each.sum()) for each in chosen), f"{received} rows were received")
    for found, part, name in ((rows, 0, "rows"), (weights, 1, "weights"), (ids, 2, "ids")):
        wanted = torch.cat([each[part][which] for each, which in zip(expected, chosen, strict=True)])
        require(torch.equal(found[:received], wanted), f"{name} differ")
    own_rows, _, own_ids = expected[me.rank]
    copies = sum(destinations(own_ids, peer).float() for peer in range(me.world))
    wanted = (own_rows.float() * copies[:, None]).to(torch.bfloat16)
    require(torch.equal(combined[: len(own_rows)].cpu(), wanted), "combined rows differ")


def operator(me: Rank) -> None:
    with me.step("construction of an op (compiles its kernels)"):
        op = new_op(me)
    for seed in range(5):
        with me.step(f"dispatch and combine, {me.tokens(seed)} tokens"):
            rows, weights, ids = (tensor.to(me.device) for tensor in me.data(me.rank, seed))
            out = op.dispatch(rows, weights, None, ids, call_local_expert_count=True)
            combined, _ = op.combine(out[0], None, ids)
            op.check()
            check_results(me, seed, out, combined)
    with me.step("statistics and positions"):
        require(op.stats()["dispatches"] == 5, str(op.stats()))
        positions = op.get_dispatch_src_token_pos()
        require(positions.shape[0] == int(out[4][0]), f"{positions.shape[0]} positions")
        require(bool((positions[1:] > positions[:-1]).all()), "positions are not ordered")
    with me.step("zero copy"):
        rows, weights, ids = (tensor.to(me.device) for tensor in me.data(me.rank, 1))
        out = op.dispatch(rows, weights, None, ids)
        buffer = op.get_registered_combine_input_buffer(torch.bfloat16)
        buffer.copy_(out[0])
        combined, _ = op.combine(buffer, None, ids, use_external_inp_buf=0)
        op.check()
        check_results(me, 1, out, combined)
    graphs(me, op)
    small = new_op(me, max_total_recv_tokens=me.world)
    overflow(me, small)


def graphs(me: Rank, op: object) -> None:
    with me.step("a graph of dispatch and combine, replayed with new data"):
        size = 64
        rows = torch.zeros(size, HIDDEN, dtype=torch.bfloat16, device=me.device)
        weights = torch.zeros(size, TOPK, device=me.device)
        ids = torch.full((size, TOPK), -1, dtype=torch.int32, device=me.device)
        graph = torch.cuda.CUDAGraph()
        dist.barrier()
        with torch.cuda.graph(graph):
            out = op.dispatch(rows, weights, None, ids)
            combined, _ = op.combine(out[0], None, ids)
        for seed in range(3):
            new_rows = torch.full((size, HIDDEN), float(1 + seed + me.rank), dtype=torch.bfloat16)
            rows.copy_(new_rows)
            ids.copy_(torch.arange(size * TOPK, dtype=torch.int32).reshape(size, TOPK) % (me.world * EXPERTS))
            graph.replay()
            op.check()
            copies = sum(destinations(ids.cpu(), peer).float() for peer in range(me.world))
            wanted = (new_rows.float() * copies[:, None]).to(torch.bfloat16)
            require(torch.equal(combined[:size].cpu(), wanted), f"replay {seed} differs")


def overflow(me: Rank, op: object) -> None:
    import mori

    with me.step("an overflow raises on every rank, and the op goes on"):
        rows = torch.ones(32, HIDDEN, dtype=torch.bfloat16, device=me.device)
        ids = torch.zeros(32, TOPK, dtype=torch.int32, device=me.device)
        op.dispatch(rows, None, None, ids)
        try:
            op.check()
        except mori.ReceiveOverflow as error:
            me.say(f"  {error}")
        else:
            raise AssertionError("nothing was raised")
        ids.fill_(-1)
        ids[0] = me.rank * EXPERTS
        out = op.dispatch(rows, None, None, ids)
        op.check()
        require(int(out[4][0]) == 1, f"{int(out[4][0])} rows after the fault")


def death(me: Rank) -> None:
    import mori

    op = new_op(me)
    rows, weights, ids = (tensor.to(me.device) for tensor in me.data(me.rank, 1))
    op.dispatch(rows, weights, None, ids)
    op.check()
    dist.barrier()
    if me.rank == me.world - 1:
        time.sleep(0.5)  # the others are in their kernels by then
        me.say("kills itself")
        os.kill(os.getpid(), signal.SIGKILL)
    op.dispatch(rows, weights, None, ids)
    begin = time.perf_counter()
    try:
        op.check()
    except mori.PeerLost as error:
        seconds = time.perf_counter() - begin - 0.5
        me.say(f"noticed the death after {seconds:.2f} s: {error}")
        require(error.peer == me.world - 1, f"rank {error.peer} was named")
        require(seconds < 2.5, f"it took {seconds:.2f} s")
    else:
        raise AssertionError("nothing was raised")
    mori.shmem.shmem_finalize()


def run(rank: int, world: int, store: str) -> None:
    try:
        me = Rank(rank, world, store)
        import mori

        with me.step("communicator"):
            mori.shmem.shmem_torch_process_group_init("default")
        steps: tuple[Callable[[Rank], None], ...] = (memory, operator, death)
        for step in steps:
            step(me)
            if step is not death:
                dist.barrier()
        me.say("all steps: ok")
    except BaseException:
        print(f"rank {rank}: FAILED\n{traceback.format_exc()}", flush=True)
        os._exit(1)
    os._exit(0)  # the process group has lost a rank: nothing to tear down in order


def main() -> int:
    found = min(torch.cuda.device_count(), 8)
    print(f"torch {torch.__version__}, CUDA {torch.version.cuda}, {found} GPUs", flush=True)
    world = 2 if found == 1 and os.environ.get("MORI_SHARE_GPU") == "1" else found
    if world < 2:
        print("smoke: needs 2 GPUs")
        return 1
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.setdefault("MORI_TIMEOUT_S", "20")
    os.environ.setdefault("MORI_BOOTSTRAP_TIMEOUT", "60")
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        processes = [context.Process(target=run, args=(rank, world, store)) for rank in range(world)]
        for process in processes:
            process.start()
        deadline = time.monotonic() + LIMIT_SECONDS
        for process in processes:
            process.join(max(1.0, deadline - time.monotonic()))
        late = [process for process in processes if process.is_alive()]
        for process in late:
            process.kill()
            process.join()
    codes = [process.exitcode for process in processes]
    expected = [0] * (world - 1) + [-signal.SIGKILL]
    print("smoke: ok" if codes == expected and not late else f"smoke: FAILED, exit codes {codes}, {len(late)} hung")
    return 0 if codes == expected and not late else 1


if __name__ == "__main__":
    sys.exit(main())
