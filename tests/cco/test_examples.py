"""The examples on CPUs, by ranks that are processes, one of them as a user starts it; and the guide's program."""

from __future__ import annotations

import ctypes
import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mori.cco import CCODevCommRequirements, Communicator, UniqueId, device, get_unique_id
from tests.cco.members import all_well, each, joined
from tests.package.commands import ROOT, without_mori_variables
from tests.rank_worker import RankContext
from tests.ranks import pool

FOLDER = ROOT / "examples" / "cco"
SAYS = {
    "barrier": "2000 rounds",
    "lsa_put": "100000 values from each of {} ranks, all as sent",
    "lsa_allreduce": "100003 sums over {} ranks, equal bit for bit to torch's",
}


def run(context: RankContext, name: str, unique_id: UniqueId) -> str:
    sys.path.insert(0, str(FOLDER))  # as for a program that is started there
    try:
        module = importlib.import_module(name)
    finally:
        sys.path.remove(str(FOLDER))
    with Communicator.init(context.world_size, context.rank, unique_id, 64 << 20) as comm:
        return module.example(comm)


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("name", SAYS)
def test_an_example(name: str, world_size: int, kernel_folder: Path) -> None:
    ranks = pool(world_size, bare=True, MORI_JIT_CACHE_DIR=str(kernel_folder))
    for said in ranks.run(run, name, get_unique_id()):
        assert said.startswith(SAYS[name].format(world_size))


def test_the_program_of_the_guide(kernel_folder: Path) -> None:
    source = re.search(r"^```cpp\n(.*?)^```", (ROOT / "docs" / "cco.md").read_text(), re.MULTILINE | re.DOTALL)
    assert source is not None

    class Arguments(ctypes.Structure):
        _fields_ = (("comm", ctypes.c_uint64), ("window", ctypes.c_uint64))

    with joined(2) as members:

        def greet(comm: Communicator) -> list[int]:
            memory = comm.alloc_mem(4096)
            memory.view(0, (3,), torch.int32).fill_(9)
            window = comm.register_window(memory.ptr, memory.size)
            dev_comm = comm.create_dev_comm(CCODevCommRequirements(lsa_barrier_count=8))
            kernel = device.compile(source[1], "greet", comm)
            kernel.launch(Arguments(dev_comm.ptr, window.handle), blocks=1, threads=64)
            return memory.view(0, (3,), torch.int32).tolist()

        assert all_well(each(members, greet)) == [[0, 1, 9]] * 2


def test_an_example_as_a_program(kernel_folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(FOLDER / "lsa_put.py"), "--ranks", "1"],
        env={
            **without_mori_variables(),
            "MORI_JIT_CACHE_DIR": str(kernel_folder),
            "PYTHONPATH": os.pathsep.join(sys.path),
        },
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "rank 0 of 1 on host: 100000 values from each of 1 ranks, all as sent\n"
