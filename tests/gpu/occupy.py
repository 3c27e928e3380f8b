"""A kernel that does nothing but hold multiprocessors: one block takes all shared memory of one of them."""

from __future__ import annotations

import torch

from benchmarks.device_code import Kernel, most_shared_bytes

SOURCE = """
extern "C" __global__ void occupy(volatile int* leave, unsigned long long longest_ns, int* count, volatile int* full) {
  extern __shared__ int held[];
  unsigned long long start, now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));
  if (threadIdx.x == 0) {
    held[0] = 0;
    if (atomicAdd(count, 1) == gridDim.x - 1) *full = 1;
    do {
      asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    } while (*leave == 0 && now - start < longest_ns);
  }
}
"""


def processors() -> int:
    return torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count


class Occupant:
    """Holds `blocks` multiprocessors of the current device until `leave`, at most `longest_s` seconds."""

    def __init__(self, blocks: int, longest_s: float) -> None:
        # Pinned memory has one address for both sides.
        self._leave, self._full = (torch.zeros(1, dtype=torch.int32, pin_memory=True) for _ in range(2))
        self._count = torch.zeros(1, dtype=torch.int32, device="cuda")
        self._stream = torch.cuda.Stream(priority=-1)
        self._stream.wait_stream(torch.cuda.current_stream())
        self._end = torch.cuda.Event()
        kernel = Kernel("occupy", SOURCE, "occupy", shared_bytes=most_shared_bytes(torch.cuda.current_device()))
        addresses = self._count.data_ptr(), self._full.data_ptr()
        kernel(blocks, 32, self._leave.data_ptr(), round(longest_s * 1e9), *addresses, self._stream)
        self._end.record(self._stream)
        while not int(self._full) and not self._end.query():
            pass  # all of it is on the device before anything else is launched

    def runs(self) -> bool:
        return not self._end.query()

    def leave(self) -> None:
        self._leave[0] = 1
        self._end.synchronize()
