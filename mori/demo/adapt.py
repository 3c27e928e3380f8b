"""The guide's complete example as published, and the same text adapted to a machine without GPUs.

guide_example.txt is the published text, unchanged. What a CPU needs otherwise is the list below and nothing else; each
old text must occur exactly as often as stated, so a change of either side is noticed.
"""

from __future__ import annotations

import difflib
from importlib import resources
from typing import NamedTuple

WORLD_SIZE = 8
# What the example's configuration says; the check has to know which experts live on which rank.
EXPERTS_PER_RANK = 32


class Replacement(NamedTuple):
    old: str
    new: str
    times: int = 1


CPU_REPLACEMENTS = (
    Replacement("    torch.cuda.set_device(rank)\n", ""),
    Replacement('torch.device("cuda", rank)', 'torch.device("cpu")'),
    Replacement('backend="cpu:gloo,cuda:nccl"', 'backend="gloo"'),
    Replacement("        device_id=device,\n", ""),
    Replacement("    torch.cuda.synchronize()\n", "", times=2),
)


def published() -> str:
    return resources.files("mori.demo").joinpath("guide_example.txt").read_text(encoding="utf-8")


def cpu_example(port: int | str) -> str:
    """The text for CPUs. `port` is where the process group meets; a line that checks the results is added."""
    everywhere = (
        Replacement('os.environ["MASTER_PORT"] = "12355"', f'os.environ["MASTER_PORT"] = "{port}"'),
        Replacement(
            "    # Cleanup\n",
            "    check(rank, world_size, input_data, indices, dispatch_out, recv_count, combine_out)\n    # Cleanup\n",
        ),
    )
    return adapted(*CPU_REPLACEMENTS, *everywhere)


def adapted(*replacements: Replacement) -> str:
    """The published text after the replacements, in order. ValueError for an old text that is not there as often."""
    text = published()
    for old, new, times in replacements:
        if text.count(old) != times:
            raise ValueError(f"the example has {old!r} {text.count(old)} times, expected {times}")
        text = text.replace(old, new)
    return text


def cpu_diff() -> str:
    """Unified diff from the published text to the CPU text, as the docs show it."""
    return "".join(
        difflib.unified_diff(
            published().splitlines(keepends=True),
            cpu_example("<a free port>").splitlines(keepends=True),
            "published",
            "on CPUs",
            n=1,
        )
    )
