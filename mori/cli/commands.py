"""The commands, one function each; each imports what it needs, so that `mori --help` is quick."""

from __future__ import annotations

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
