"""The commands, one function each; each imports what it needs, so that `mori --help` is quick."""

from __future__ import annotations

import subprocess
import sys

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
