"""What the engine decides before anything is launched."""

from __future__ import annotations

from mori.ops.engine import compile_order


def test_ranks_begin_to_compile_with_different_kernels() -> None:
    names = ("dispatch", "combine_bf16", "pack")
    orders = [compile_order(names, rank) for rank in range(4)]
    assert [order[0] for order in orders] == ["dispatch", "combine_bf16", "pack", "dispatch"]
    assert all(sorted(order) == sorted(names) for order in orders)
    assert compile_order((), 3) == []
