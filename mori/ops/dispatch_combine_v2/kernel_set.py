"""What a backend hands to the op: kernels by launch size, and what they can do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

Spec = tuple[int, int]
"""(blocks, warps per block)."""


@dataclass
class KernelSet:
    """Kernels of one op, one for each launch size that its config may ask for.

    dispatch, dispatch_replay: called as `kernel(input=, indices=, weights=, scales=, dest_map=, num_tokens=)`; enqueue
        one dispatch that fills `dest_map`, or follows it. None: no replay.
    combine: called as `kernel(input=, dest_map=, total_recv=, num_tokens=, want_weights=)`.
    stages_in_kernel: combine takes rows from anywhere; else the op copies them into region out_tok first.
    self_resets_counters: dispatch sets the received count; else the op zeroes it before each dispatch.
    capabilities: names that the op advertises.
    unsupported: reasons why the config cannot be served after all.

    A backend whose op overrides `_enqueue_dispatch` or `_enqueue_combine` may hand in what these call otherwise.
    """

    dispatch: dict[Spec, Any]
    combine: dict[Spec, Any]
    dispatch_replay: dict[Spec, Any] | None = None
    stages_in_kernel: bool = False
    self_resets_counters: bool = True
    capabilities: frozenset[str] = frozenset()
    unsupported: tuple[str, ...] = ()


def specs_from(config: Any) -> tuple[list[Spec], list[Spec]]:
    """Launch sizes of dispatch and of combine that calls of a config may ask for."""
    if config.schedule:
        return sorted({row[1:3] for row in config.schedule}), sorted({row[3:5] for row in config.schedule})
    return (
        [(config.dispatch_block_num, config.warp_num_per_block)],
        [(config.combine_block_num, config.combine_warp_num_per_block)],
    )


def pick(config: Any, tokens: int) -> tuple[Spec, Spec]:
    """Launch sizes of dispatch and combine for so many tokens: those of the first bucket that holds them, else of the
    last."""
    if not config.schedule:
        (dispatch,), (combine,) = specs_from(config)
        return dispatch, combine
    row = next((row for row in config.schedule if row[0] is None or tokens <= row[0]), config.schedule[-1])
    return row[1:3], row[3:5]


def built(kernels: dict[Spec, Any], spec: Spec) -> Spec:
    """That launch size if a kernel was built for it, else the last one that was."""
    return spec if spec in kernels else list(kernels)[-1]
