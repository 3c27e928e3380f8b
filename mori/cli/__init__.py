"""The command line program `mori`, also `python -m mori`."""

from __future__ import annotations

from mori.cli.commands import app

__all__ = ["app"]
