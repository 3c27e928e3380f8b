"""The commands, one function each; each imports what it needs, so that `mori --help` is quick."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

app = typer.Typer(
    name="mori",
    help="Expert-parallel dispatch and combine for Mixture-of-Experts models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.callback()
def _commands() -> None:
    """Expert-parallel dispatch and combine for Mixture-of-Experts models."""


@app.command()
def info() -> None:
    """What is installed here and what it would run on."""
    from mori.cli.info import collect

    table = Table(show_header=False, box=None, pad_edge=False)
    for name, value in collect():
        table.add_row(name, value)
    Console(soft_wrap=True, highlight=False).print(table)


@app.command()
def demo() -> None:
    """The complete example of the user guide with 8 ranks on CPUs, checked bit for bit and timed."""
    # A process of its own: the ranks are spawned from it and import its main module again, which has to be light.
    raise typer.Exit(subprocess.run([sys.executable, "-m", "mori.demo"], check=False).returncode)


@app.command(name="compile")
def compile_kernels(
    out: Annotated[Path, typer.Option(help="Folder to fill; MORI_JIT_CACHE_DIR can point at it.")],
    arch: Annotated[str, typer.Option(help="Archs, separated by commas. Default: all that have kernels.")] = "",
    config: Annotated[
        list[str] | None,
        typer.Option(help="An op: fields of EpDispatchCombineConfig, as world_size=8,hidden_dim=7168,...; repeatable."),
    ] = None,
    kernel: Annotated[list[str] | None, typer.Option(help="Only this kernel; repeatable.")] = None,
    compiler: Annotated[str | None, typer.Option(help="Only this compiler of docs/jit.md.")] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Compilations at a time.")] = os.cpu_count() or 1,
) -> None:
    """Compile kernels ahead of time, without a GPU, for ops of these configs or of the ones that are shipped."""
    from mori.cli.compile import ARCHS_TO_COMPILE, compile_ahead

    archs = arch.replace(" ", "").split(",") if arch else ARCHS_TO_COMPILE
    try:
        failures = compile_ahead(archs, out, config or (), kernel or [], compiler, jobs, typer.echo)
    except (TypeError, ValueError, NotImplementedError) as problem:
        raise typer.BadParameter(str(problem)) from None
    raise typer.Exit(1 if failures else 0)


@app.command()
def support(
    api: Annotated[str, typer.Option(help="v1 or v2.")] = "v1",
    arch: Annotated[str | None, typer.Option(help="host, sm_90, gfx942, ... Default: this machine's.")] = None,
    backend: Annotated[str | None, typer.Option(help="Of v2: hip or flydsl. Default: what an op would get.")] = None,
    dtype: Annotated[
        str, typer.Option(help="Of rows in both legs: bf16, f32, fp8 (that of the arch), fp4, ...")
    ] = "bf16",
    dispatch_dtype: Annotated[str | None, typer.Option(help="Of rows in dispatch.")] = None,
    combine_dtype: Annotated[str | None, typer.Option(help="Of rows in combine.")] = None,
    quant: Annotated[str, typer.Option(help="quant_type of the config.")] = "none",
    kernel_type: Annotated[str, typer.Option(help="Of v1.")] = "IntraNode",
    zero_copy: Annotated[bool, typer.Option("--zero-copy", help="Of v1: combine from the registered buffer.")] = False,
    combine_mode: Annotated[str, typer.Option(help="Of v2: gather or scatter.")] = "gather",
    world_size: int = 8,
    gpu_per_node: Annotated[int | None, typer.Option(help="Default: all ranks on one node.")] = None,
    hidden_dim: int = 7168,
    max_tokens: Annotated[int, typer.Option(help="max_num_inp_token_per_rank of the config.")] = 4096,
    experts_per_rank: int = 32,
    topk: int = 8,
    scale_dim: int = 0,
    scale_type_size: int = 4,
    max_recv: Annotated[int, typer.Option(help="max_total_recv_tokens of the config.")] = 0,
    std_moe: Annotated[bool, typer.Option("--std-moe", help="Of v2: enable_std_moe.")] = False,
    feature: Annotated[
        list[str] | None, typer.Option(help="Of v2: replay, local_expert_count or std_moe; repeatable.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Whether an op of this config can run there, and if not, why. Exit status 0 or 1; 2 for words it does not know."""
    from mori.support import Question, answer

    question = Question(
        api=api,
        arch=arch,
        backend=backend,
        dispatch_dtype=dispatch_dtype or dtype,
        combine_dtype=combine_dtype or dtype,
        quant_type=quant,
        kernel_type=kernel_type,
        zero_copy=zero_copy,
        combine_mode=combine_mode,
        world_size=world_size,
        gpu_per_node=gpu_per_node,
        hidden_dim=hidden_dim,
        max_tokens=max_tokens,
        experts_per_rank=experts_per_rank,
        topk=topk,
        scale_dim=scale_dim,
        scale_type_size=scale_type_size,
        max_total_recv_tokens=max_recv,
        enable_std_moe=std_moe,
        features=tuple(feature or ()),
    )
    try:
        found = answer(question)
    except ValueError as problem:
        raise typer.BadParameter(str(problem)) from None
    if as_json:
        typer.echo(json.dumps(found._asdict() | {"reasons": [reason._asdict() for reason in found.reasons]}))
    else:
        typer.echo(found.describe())
    raise typer.Exit(0 if found.supported else 1)
