"""Two ranks on the GPUs of a driver: one dispatch and one combine through plans, as a program.

Ranks are threads; they exchange by hand what communicators exchange over sockets. Prints JSON for the test.
"""

from __future__ import annotations

import ctypes
import json
import sys
from pathlib import Path
from typing import Any

import torch

from mori import _core

WORLD, TOKENS, HIDDEN, EXPERTS, TOPK, MAX_TOKENS = 2, 5, 64, 2, 2, 8
CONTROL_BYTES = 1 << 16
TIMEOUT_NS = 30 * 10**9
NO_EXTRAS = _core.CallExtras()
DISPATCH, COMBINE = _core.KERNELS.index("dispatch"), _core.KERNELS.index("combine_bf16")
BFLOAT16 = 2


def shape(rank: int) -> _core.EpShape:
    return _core.EpShape(
        world_size=WORLD,
        rank=rank,
        max_tokens=MAX_TOKENS,
        hidden_dim=HIDDEN,
        max_element_bytes=2,
        scale_dim=0,
        scale_element_bytes=0,
        experts_per_rank=EXPERTS,
        topk=TOPK,
        max_recv_tokens=WORLD * MAX_TOKENS,
    )


class Rank:
    def __init__(self, api: str, rank: int, codes: dict[int, bytes]) -> None:
        self.api, self.rank = api, rank
        self.shape = shape(rank)
        regions, self.bytes = self.shape.regions()
        self.regions = {name: (offset, size) for name, offset, size, _ in regions}
        self.memory = _core.SymmetricMemory.create_gpu(
            api, rank, WORLD, CONTROL_BYTES + self.bytes, rank, _core.HANDLE_POSIX_DESCRIPTOR
        )
        self.memory.extend(CONTROL_BYTES + self.bytes)
        self.control = _core.SymmetricMemory.create_host(rank, WORLD, _core.COMM_CONTROL_BYTES)
        self.codes = codes

    def connect(self, peer: Rank) -> None:
        for chunk in range(self.memory.chunks):
            self.memory.map_peer(peer.rank, chunk, peer.memory.export_chunk(chunk))
        self.control.map_peer(peer.rank, 0, peer.control.export_chunk(0))

    def prepare(self) -> None:
        self.communicator = _core.Communicator(self.memory, self.control)
        block = _core.MemoryBlock(self.memory, CONTROL_BYTES, self.bytes)
        launcher = _core.Launcher.gpu(self.api, self.rank, self.shape)
        self.plan = _core.EpPlan(self.communicator, block, self.shape, launcher, TIMEOUT_NS)
        self.plan.prepare()
        for kernel, code in self.codes.items():
            self.plan.load(kernel, code)

    def region(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        offset, size = self.regions[name]
        address = self.memory.address(self.rank, CONTROL_BYTES + offset)
        return torch.frombuffer((ctypes.c_uint8 * size).from_address(address), dtype=dtype)


def main() -> None:
    """Arguments: "cuda" or "hip", files with the code of dispatch and combine."""
    api, *files = sys.argv[1:]
    codes = {kernel: Path(file).read_bytes() for kernel, file in zip((DISPATCH, COMBINE), files, strict=True)}
    ranks = [Rank(api, rank, codes) for rank in range(WORLD)]
    for rank in ranks:
        rank.prepare()
        for peer in ranks:
            if peer is not rank:
                rank.connect(peer)
    inputs: list[Any] = []
    for rank in ranks:
        rows = torch.arange(TOKENS * HIDDEN).reshape(TOKENS, HIDDEN).to(torch.bfloat16) + rank.rank
        # Every other token has experts on both ranks.
        ids = torch.tensor([[0, 1 + token % 2 * 2] for token in range(TOKENS)], dtype=torch.int32)
        inputs.append((rows, ids))
        addresses = (rows.data_ptr(), 0, 0, ids.data_ptr())
        rank.plan.dispatch(DISPATCH, TOKENS, 2 * HIDDEN, 0, BFLOAT16, *addresses, NO_EXTRAS, 0, 0, 0)
    states = []
    for rank in ranks:
        rank.plan.synchronize()
        states.append(rank.plan.state(0))
        received = states[-1][0]
        staged = rank.region("dispatch_rows", torch.bfloat16)[: received * HIDDEN].clone()
        inputs.append(staged)
        work = (COMBINE, received, 0, 2 * HIDDEN, BFLOAT16, TOKENS)
        rank.plan.combine(*work, staged.data_ptr(), 0, NO_EXTRAS, 0, 0, 0)
    sums = []
    for rank, (rows, ids) in zip(ranks, inputs[:WORLD], strict=True):
        rank.plan.synchronize()
        states.append(rank.plan.state(0))
        combined = rank.region("combine_rows", torch.bfloat16)[: TOKENS * HIDDEN].reshape(TOKENS, HIDDEN)
        destinations = torch.tensor([len(set((ids[token] // EXPERTS).tolist())) for token in range(TOKENS)])
        expected = (rows.float() * destinations[:, None]).to(torch.bfloat16)
        sums.append(bool(torch.equal(combined.view(torch.int16), expected.view(torch.int16))))
    facts = _core.gpu_device(api, 0)
    print(json.dumps({"states": states, "sums": sums, "runs_on": ranks[0].plan.runs_on, "facts": facts}))


if __name__ == "__main__":
    main()
