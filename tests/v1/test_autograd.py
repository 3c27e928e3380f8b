"""Gradients of layers that are spread over ranks equal those of the same layers in one piece, in plain torch."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from tests.rank_worker import RankContext
from tests.ranks import pool
from tests.v1.exercise import raises, require

HIDDEN, TOPK, EXPERTS, MOST = 24, 3, 2, 9
CASES = [
    ("uneven", torch.float32, 1e-6),
    ("repeated", torch.float32, 1e-6),
    ("one-sided", torch.float32, 1e-6),
    ("uneven", torch.bfloat16, 0.03),
]
PARTS = ("tokens", "router weights", "experts")


class Problem(NamedTuple):
    """Tokens, router weights, ids and what the loss multiplies results by, of every rank; and all experts."""

    tokens: list[torch.Tensor]
    weights: list[torch.Tensor]
    ids: list[torch.Tensor]
    factors: list[torch.Tensor]
    experts: torch.Tensor


COUNTS = {"uneven": (0, MOST, 1), "repeated": (5, 0, 7), "one-sided": (4, 6, 2), "any": (4, 6, 2)}


def problem(style: str, world_size: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Problem:
    """uneven: ids among them -1 and one beyond the experts; repeated: two experts, so each token names one twice;
    one-sided: all of rank 0's; any: any of them.
    """
    generator = torch.Generator().manual_seed(seed)
    total = EXPERTS * world_size
    ranges = {"uneven": (-1, total + 1), "repeated": (total - 2, total), "one-sided": (0, EXPERTS), "any": (0, total)}
    lowest, beyond = ranges[style]

    def ids(n: int) -> torch.Tensor:
        return torch.randint(lowest, beyond, (n, TOPK), generator=generator, dtype=torch.int32)

    def values(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) / 4

    tokens = COUNTS[style][:world_size]
    return Problem(
        [values(n, HIDDEN).to(dtype) for n in tokens],
        [values(n, TOPK) for n in tokens],
        [ids(n) for n in tokens],
        [values(n, HIDDEN).to(dtype) for n in tokens],
        values(total, HIDDEN, HIDDEN).to(dtype),
    )


def apply_experts(rows: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, experts: torch.Tensor, first: int = 0):
    """Sums over k of weight x tanh(row x expert), for the experts given, of which the first has number `first`."""
    result = torch.zeros_like(rows)
    for number, expert in enumerate(experts, start=first):
        weight = torch.where(ids == number, weights, 0).sum(dim=1, keepdim=True)
        result = result + (weight * torch.tanh(rows @ expert)).to(rows.dtype)
    return result


Layer = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def gradients(parts: Sequence[torch.Tensor], loss_of: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
    """Of a loss in each of the tensors; zeros where the loss does not depend on one."""
    leaves = [part.clone().requires_grad_() for part in parts]
    loss_of(*leaves).backward()
    return [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves]


def in_one_piece(whole: Problem, rank: int, model: Callable[[Layer], Layer]) -> list[torch.Tensor]:
    """The gradients that are `rank`'s part, from all tokens of all ranks and all experts at once."""
    sizes = [len(tokens) for tokens in whole.tokens]
    ids, factors = torch.cat(whole.ids), torch.cat(whole.factors)
    parts = (torch.cat(whole.tokens).float(), torch.cat(whole.weights), whole.experts.float())

    def loss(tokens: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        return (model(apply_experts)(tokens, weights, ids, experts) * factors).sum()

    tokens, weights, experts = gradients(parts, loss)
    own = slice(rank * EXPERTS, (rank + 1) * EXPERTS)
    return [tokens.split(sizes)[rank], weights.split(sizes)[rank], experts[own]]


def on_rank(whole: Problem, rank: int, layer: Layer, model: Callable[[Layer], Layer]) -> list[torch.Tensor]:
    own = slice(rank * EXPERTS, (rank + 1) * EXPERTS)
    parts = (whole.tokens[rank], whole.weights[rank], whole.experts[own])

    def loss(tokens: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        return (model(layer)(tokens, weights, whole.ids[rank], experts) * whole.factors[rank]).sum()

    return gradients(parts, loss)


def require_close(actual: Sequence[torch.Tensor], expected: Sequence[torch.Tensor], what: str, within: float) -> None:
    for got, want, part in zip(actual, expected, PARTS, strict=True):
        torch.testing.assert_close(
            got.float(), want, rtol=within, atol=within, msg=lambda text, part=part: f"{what}, {part}: {text}"
        )


def new_op(context: RankContext, **fields: Any) -> Any:
    import mori

    config = {
        "data_type": torch.float32,
        "rank": context.rank,
        "world_size": context.world_size,
        "hidden_dim": HIDDEN,
        "scale_dim": 0,
        "scale_type_size": 0,
        "max_token_type_size": 4,
        "max_num_inp_token_per_rank": MOST,
        "num_experts_per_rank": EXPERTS,
        "num_experts_per_token": TOPK,
    }
    if "kernel_type" in fields:
        fields["kernel_type"] = mori.ops.EpDispatchCombineKernelType[fields["kernel_type"]]
    return mori.ops.EpDispatchCombineOp(mori.ops.EpDispatchCombineConfig(**config | fields))


def sharded(op: Any, *, reuse: bool = False, **options: Any) -> Layer:
    """The layer over ranks. A rank without rows takes a way around its experts, as programs do.

    reuse: calls with the same tensor of ids share a handle.
    """
    from mori.ops import autograd

    handles: dict[int, Any] = {}

    def layer(tokens: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        rows, row_weights, row_ids, count, handle = autograd.dispatch(
            op, tokens, weights, ids, handle=handles.get(id(ids)), **options
        )
        if reuse:
            handles[id(ids)] = handle
        size = int(count) if options.get("trim", True) else op.max_num_tokens_to_recv()
        require(len(rows) == len(row_weights) == len(row_ids) == size, f"{len(rows)} rows, not {size}")
        results = torch.zeros_like(rows)
        if int(count):
            results = apply_experts(rows, row_weights, row_ids, experts, op.config.rank * EXPERTS)
        return autograd.combine(op, results, None, ids, handle)[0]

    return layer


def stacked(layer: Layer) -> Layer:
    """Two layers, the second with weights that depend on the first and with other ranks' experts."""

    def model(tokens: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        first = layer(tokens, weights, ids, experts)
        return first + layer(tokens + first, weights * first[:, :TOPK].float(), ids ^ EXPERTS, experts)

    return model


def side_by_side(layer: Layer) -> Layer:
    """Two layers along the same ids that do not depend on each other."""

    def model(tokens: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        return layer(tokens * 2, weights, ids, experts) + layer(tokens, weights * weights, ids, experts)

    return model


def recomputed(layer: Layer) -> Layer:
    def model(*arguments: torch.Tensor) -> torch.Tensor:
        return checkpoint(stacked(layer), *arguments, use_reentrant=False)

    return model


def compare(context: RankContext, style: str, dtype: torch.dtype, within: float) -> None:
    intra, inter = new_op(context), new_op(context, kernel_type="InterNodeV1")
    forms: list[tuple[Callable[[Layer], Layer], Any, dict[str, bool]]] = [
        (stacked, intra, {}),
        (stacked, inter, {"trim": False}),
        (side_by_side, inter, {"reuse": True}),
        (side_by_side, intra, {"trim": False, "reuse": True}),
        (recomputed, intra, {}),
    ]
    for number, (model, op, options) in enumerate(forms):
        whole = problem(style, context.world_size, seed=number, dtype=dtype)
        actual = on_rank(whole, context.rank, sharded(op, **options), model)
        dtypes = [gradient.dtype for gradient in actual]
        require(dtypes == [dtype, torch.float32, dtype], f"gradients are {dtypes}")
        expected = in_one_piece(whole, context.rank, model)
        require_close(actual, expected, f"{model.__name__} {options}", within)


def destinations(ids: torch.Tensor, first: int, world_size: int) -> torch.Tensor:
    """[n, 1]: to how many distinct ranks each token goes, of those from `first` on."""
    ranks = torch.where((ids >= 0) & (ids < EXPERTS * world_size), ids.long() // EXPERTS, -1)
    return sum((ranks == rank).any(dim=1, keepdim=True).float() for rank in range(first, world_size))  # type: ignore[return-value]


def weights_of_combine(context: RankContext) -> None:
    """Rank 0 passes none: it gets no sums, those of others lack its part, and so do their gradients."""
    from mori.ops import autograd

    op, rank = new_op(context), context.rank
    whole = problem("any", context.world_size)
    weights, ids = whole.weights[rank].clone().requires_grad_(), whole.ids[rank]
    rows, row_weights, _, _, handle = autograd.dispatch(op, whole.tokens[rank], weights, ids)
    out, sums = autograd.combine(op, rows, row_weights**2 if rank else None, ids, handle)
    everywhere, counted = (destinations(ids, first, context.world_size) for first in (0, 1))
    require(bool((everywhere != counted).any()) and bool(counted.any()), "this shows nothing")
    torch.testing.assert_close(out, whole.tokens[rank] * everywhere)
    if rank == 0:
        require(sums is None, f"sums of no weights: {sums}")
        out.sum().backward()
        require(not weights.grad.any(), "gradient of weights without sums")  # type: ignore[union-attr]
    else:
        torch.testing.assert_close(sums, weights.detach() ** 2 * counted)
        factors = whole.factors[rank][:, :TOPK]
        (out.sum() + (sums * factors).sum()).backward()
        torch.testing.assert_close(weights.grad, 2 * weights.detach() * factors * counted)


def test_weights_of_combine_are_differentiable_and_each_rank_decides():
    pool(2).run(weights_of_combine)


def surplus_rows(context: RankContext) -> None:
    from mori.ops import autograd

    op, rank = new_op(context), context.rank
    whole = problem("uneven", context.world_size)
    tokens, ids = whole.tokens[rank], whole.ids[rank]
    rows, weights, row_ids, count, handle = autograd.dispatch(op, tokens, None, ids, trim=False)
    received = int(count)
    require(0 < received < len(rows), f"{received} rows received: this shows nothing")
    beyond = [view[received:] for view in (rows, weights, row_ids + 1)]
    require(not any(bool(view.any()) for view in beyond), "rows beyond the count are not zeros with ids -1")
    longer = torch.full((len(rows) + 2, HIDDEN), torch.nan)
    longer[:received] = rows[:received].detach()
    longer.requires_grad_()
    out, _ = autograd.combine(op, longer, None, ids, handle)
    torch.testing.assert_close(out, tokens * destinations(ids, 0, context.world_size))
    (out * whole.factors[rank]).sum().backward()
    expected = torch.zeros_like(longer)
    expected[:received] = op.dispatch(whole.factors[rank], None, None, ids, routing=handle)[0][:received]
    require(torch.equal(longer.grad, expected), "gradient of the rows passed")


def test_rows_beyond_the_count_are_ignored_and_get_no_gradient():
    pool(2).run(surplus_rows)


def one_rank_needs_gradients(context: RankContext) -> None:
    from mori.ops import autograd

    op, rank = new_op(context), context.rank
    whole = problem("any", context.world_size)
    with torch.no_grad():
        rows, _, _, _, handle = autograd.dispatch(op, whole.tokens[rank], None, whole.ids[rank])
    rows.requires_grad_(rank == 0)
    out, _ = autograd.combine(op, rows, None, whole.ids[rank], handle)
    out.sum().backward()
    expected = torch.ones_like(rows) if rank == 0 else None
    require(rows.grad is None if expected is None else torch.equal(rows.grad, expected), f"gradient {rows.grad}")


def test_ranks_whose_rows_need_no_gradient_do_their_part():
    pool(2).run(one_rank_needs_gradients)


def results_are_owned(context: RankContext) -> None:
    from mori.ops import autograd

    op, rank = new_op(context), context.rank
    first, later = (problem("uneven", context.world_size, seed=seed) for seed in range(2))
    with torch.no_grad():
        held: list[torch.Tensor] = []
        for trim in (True, False):
            rows, weights, ids, _, handle = autograd.dispatch(
                op, first.tokens[rank], first.weights[rank], first.ids[rank], trim=trim
            )
            held += [rows, weights, ids, *autograd.combine(op, rows, weights, first.ids[rank], handle)]  # type: ignore[list-item]
        require(not any(tensor.requires_grad for tensor in held), "a graph without need")
        before = [tensor.clone() for tensor in held]
        rows, weights, *_ = op.dispatch(later.tokens[rank], later.weights[rank], None, later.ids[rank])
        op.combine(rows, weights, later.ids[rank])
    require(all(map(torch.equal, held, before)), "a later call changes results")


def test_results_outlive_later_calls():
    pool(2).run(results_are_owned)


def second_derivative(tokens: torch.Tensor, out: torch.Tensor) -> None:
    [gradient] = torch.autograd.grad((out**2).sum(), tokens, create_graph=True)
    gradient.sum().backward()


def refusals(context: RankContext) -> None:
    from mori.ops import autograd

    op, rank = new_op(context), context.rank
    tokens, weights, ids, _, experts = problem("any", context.world_size)
    own = (tokens[rank], weights[rank], ids[rank])
    other = new_op(context, kernel_type="AsyncLL")
    raises(NotImplementedError, autograd.dispatch, other, *own, says="InterNodeV1, IntraNode")
    raises(TypeError, autograd.dispatch, op, own[0].to(torch.float8_e4m3fn), *own[1:], says="bfloat16")
    rows, _, _, _, handle = autograd.dispatch(op, *own)
    raises(TypeError, autograd.combine, op, rows.double(), None, own[2], handle, says="float64")
    raises(NotImplementedError, autograd.combine, other, rows, None, own[2], handle, says="InterNodeV1, IntraNode")
    raises(TypeError, autograd.combine, op, rows, None, own[2], None, says="EpDispatchRoutingHandle")
    quantised = new_op(context, quant_type="fp8_direct_cast")
    raises(ValueError, autograd.dispatch, quantised, *own, says="quant_type 'fp8_direct_cast'")
    leaf = own[0].clone().requires_grad_()
    out = sharded(op)(leaf, own[1], own[2], experts[rank * EXPERTS :][:EXPERTS])
    raises(RuntimeError, second_derivative, leaf, out, says="once_differentiable")


def test_what_is_refused():
    pool(2).run(refusals)


# The worlds of 2 ranks come before those of 3: changing worlds takes most of the time.


@pytest.mark.parametrize(("style", "dtype", "within"), CASES, ids=[f"{style} {dtype}" for style, dtype, _ in CASES])
@pytest.mark.parametrize("world_size", (2, 3))
def test_gradients_equal_those_of_one_piece(world_size: int, style: str, dtype: torch.dtype, within: float):
    pool(world_size).run(compare, style, dtype, within)


def run_the_document(context: RankContext, program: str, port: int) -> list[float]:
    variables = {
        "RANK": context.rank,
        "WORLD_SIZE": context.world_size,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    os.environ.update({name: str(value) for name, value in variables.items()})
    names: dict[str, Any] = {"__name__": "__main__"}
    try:
        exec(compile(program, "docs/autograd.md", "exec"), names)
        router = names["layer"].router.weight.detach()
        every = [torch.empty_like(router) for _ in range(context.world_size)]
        torch.distributed.all_gather(every, router)
        require(all(torch.equal(router, each) for each in every), "the router differs between ranks")
        return names["losses"]
    finally:
        import mori

        names.clear()
        mori.shmem.shmem_finalize()
        for name in variables:
            del os.environ[name]


def test_the_program_of_the_document():
    text = (Path(__file__).parents[2] / "docs" / "autograd.md").read_text(encoding="utf-8")
    [program] = re.findall(r"^```python\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    for losses in pool(2, bare=True).run(run_the_document, program, port):
        assert len(losses) == 8 and losses[-1] < 0.99 * losses[0]
