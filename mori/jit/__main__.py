"""`python -m mori.jit list | clear | path`: the cache of device code, seen from a shell."""

from __future__ import annotations

import typer

from mori.jit import cache as store

app = typer.Typer(
    help="The cache of compiled device code.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _open() -> store.Cache:
    opened = store.open_cache()  # says why not, as a warning
    if opened is None:
        raise typer.Exit(1)
    return opened


@app.command()
def path() -> None:
    """Where it is: MORI_JIT_CACHE_DIR, else ~/.cache/mori."""
    typer.echo(store.folder())


@app.command(name="list")
def list_entries() -> None:
    """One line per entry: name, arch, bytes, when it was made, by which compiler; "damaged" for one that is unsound."""
    opened = _open()
    for key in opened.keys():
        meta = opened.meta(key)
        if meta is None or opened.load(key) is None:
            typer.echo(f"{key[:12]}  damaged; it will be compiled anew")
            continue
        fields = (meta.get(field, "?") for field in ("name", "arch", "bytes", "created", "compiler"))
        typer.echo("  ".join([key[:12], *map(str, fields)]))


@app.command()
def clear() -> None:
    """Removes all entries, and nothing else that may be in the folder."""
    typer.echo(f"removed {_open().clear()} entries")


if __name__ == "__main__":
    app(prog_name="python -m mori.jit")
