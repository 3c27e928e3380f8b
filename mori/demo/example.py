"""The CPU text of the guide's example as an importable module: its `run_ep` is found by the processes it spawns.

The text is executed in this module's namespace, where it also finds `check`.
"""

from __future__ import annotations

import ast
import gc
import io
import linecache
import sys

from mori.demo.adapt import cpu_example
from mori.demo.check import check

__all__ = ["check", "run"]

_NAME = "<guide example on CPUs>"


def _execute(text: str, *, main_block: bool) -> None:
    linecache.cache[_NAME] = (len(text), None, text.splitlines(keepends=True), _NAME)  # for readable tracebacks
    tree = ast.parse(text, _NAME)
    definitions, main = tree.body[:-1], tree.body[-1]
    assert isinstance(main, ast.If), "the example ends with its `if __name__` block"
    exec(compile(ast.Module(main.body if main_block else definitions, []), _NAME, "exec"), globals())


def run(port: int) -> None:
    """What running the example as a script does: its `if __name__ == "__main__"` block, which spawns the ranks."""
    _execute(cpu_example(port), main_block=True)


_execute(cpu_example("set by run"), main_block=False)
# What the imports made stays for ever: no later collection, the one at exit included, needs to look at it.
gc.freeze()
gc.enable()
# Eight processes write to one place: each line as a whole, as soon as it is complete.
if isinstance(sys.stdout, io.TextIOWrapper):
    sys.stdout.reconfigure(line_buffering=True, write_through=False)
