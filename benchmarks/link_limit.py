"""What the link between GPUs gives, both directions busy: 16-byte stores and loads by a kernel, and copy engines."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch

from benchmarks.device_code import Kernel, copy_async
from benchmarks.timing import barrier, slowest

SOURCE = """
extern "C" __global__ void __launch_bounds__(1024) copy_words(uint4* to, const uint4* from, unsigned long long count) {
  const unsigned long long step = (unsigned long long)gridDim.x * blockDim.x;
  unsigned long long i = (unsigned long long)blockIdx.x * blockDim.x + threadIdx.x;
  for (; i + 3 * step < count; i += 4 * step) {
    const uint4 a = from[i], b = from[i + step], c = from[i + 2 * step], d = from[i + 3 * step];
    to[i] = a;
    to[i + step] = b;
    to[i + 2 * step] = c;
    to[i + 3 * step] = d;
  }
  for (; i < count; i += step) to[i] = from[i];
}
"""
SIZE_BYTES = 256 << 20
BLOCKS = (16, 64, 132, 264)
THREADS = 1024
COPIES = 16
"""Long enough for the start of the ranks, some 0.1 ms apart, not to count."""
REPETITIONS = 5


def measure(rank: int, world_size: int) -> dict[str, float]:
    """Collective over mori.shmem. GB/s per direction by kind, the best grid's median; each rank works on the next one.

    Memory is symmetric memory, which peers reach through the same mappings as the kernels of dispatch and combine.
    """
    from mori import shmem

    own_source, own_target = shmem.shmem_malloc(SIZE_BYTES), shmem.shmem_malloc(SIZE_BYTES)
    peer = (rank + 1) % world_size
    peer_source, peer_target = (shmem.shmem_ptr_p2p(own, rank, peer) for own in (own_source, own_target))
    if 0 in (peer_source, peer_target):
        raise RuntimeError(f"rank {rank} cannot reach the memory of rank {peer}")
    kernel = Kernel("link_limit", SOURCE, "copy_words")
    stream = torch.cuda.current_stream()
    random = torch.randint(0, 256, (SIZE_BYTES,), dtype=torch.uint8, device="cuda")
    copy_async(own_source, random.data_ptr(), SIZE_BYTES, stream)

    def by_kernel(target: int, source: int, blocks: int) -> float:
        return _rate(lambda: kernel(blocks, THREADS, target, source, SIZE_BYTES // 16, stream))

    limits = {
        "store": max(by_kernel(peer_target, own_source, blocks) for blocks in BLOCKS),
        "load": max(by_kernel(own_target, peer_source, blocks) for blocks in BLOCKS),
        "copy_engine": _rate(lambda: copy_async(peer_target, own_source, SIZE_BYTES, stream)),
    }
    barrier()
    shmem.shmem_free(own_source)
    shmem.shmem_free(own_target)
    return {kind: round(rate, 1) for kind, rate in limits.items()}


def _rate(enqueue: Callable[[], None]) -> float:
    """GB/s at which the slowest rank moves SIZE_BYTES over and over while all do."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times_ms = []
    for _ in range(REPETITIONS):
        torch.cuda.synchronize()
        barrier()
        start.record()
        for _ in range(COPIES):
            enqueue()
        end.record()
        end.synchronize()
        times_ms.append(start.elapsed_time(end))
    return COPIES * SIZE_BYTES / statistics.median(slowest(times_ms)) / 1e6
