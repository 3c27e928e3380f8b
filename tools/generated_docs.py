"""The parts of docs/ that are printed from the tables of the code, so that they cannot say anything else.

In a document such a part stands between `<!-- generated: NAME -->` and `<!-- end of NAME -->`; docs/environment.md is
one as a whole. `make docs` prints all of them again; `make lint` and a test compare.
"""

from __future__ import annotations

import argparse
import inspect
import re
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # tables of the tests

sys.path.insert(0, str(Path(__file__).parent))

import support_matrix  # noqa: E402

import mori.errors  # noqa: E402
from mori import env  # noqa: E402
from mori.archs import ARCHS  # noqa: E402
from mori.demo import adapt  # noqa: E402
from tests.clients import table as clients  # noqa: E402

ENVIRONMENT = ROOT / "docs" / "environment.md"
ACTS = {"build": "at build time", "run": "at run time", "never": "not at all"}


def build_options() -> str:
    """The calls of mori_option in cmake/build_options.cmake as a table."""
    text = (ROOT / "cmake" / "build_options.cmake").read_text(encoding="utf-8")
    rows = re.findall(r'^mori_option\((\w+) (\w+) (\w+) "(.*)"\)$', text, flags=re.MULTILINE)
    lines = ["| option | default | acts | what it does here |", "|---|---|---|---|"]
    lines += [f"| `{name}` | {default} | {ACTS[when]} | {meaning} |" for name, default, when, meaning in rows]
    return "\n".join(lines)


def guide_example_diff() -> str:
    return f"```diff\n{adapt.cpu_diff()}```"


def guide_example_text() -> str:
    return f"```python\n{adapt.published()}```"


def errors() -> str:
    """Every exception of mori.errors: bases and the first sentence of its docstring."""
    lines = ["| exception | is also a | raised when |", "|---|---|---|"]
    for name, kind in vars(mori.errors).items():
        if inspect.isclass(kind) and issubclass(kind, BaseException) and kind.__module__ == "mori.errors":
            bases = ", ".join(f"`{base.__name__}`" for base in kind.__bases__)
            meaning = " ".join((inspect.getdoc(kind) or "").split("\n\n")[0].split())
            lines.append(f"| `mori.{name}` | {bases} | {meaning} |")
    return "\n".join(lines)


def archs() -> str:
    """The rows of mori.archs that AMD GPUs have."""
    lines = [
        "| arch | lanes of a wave | fp8 that is added up | fp4 that is added up | scratch memory of a block |",
        "|---|---|---|---|---|",
    ]
    for arch in ARCHS.values():
        if arch.target == "hip":
            fp8, kib = ", ".join(sorted(arch.fp8)), (arch.block_memory_bytes or 0) >> 10
            lines.append(f"| {arch.name} | {arch.lanes} | {fp8} | {arch.fp4 or 'none'} | {kib} KiB |")
    return "\n".join(lines)


PARTS: dict[str, Callable[[], str]] = {
    "build options": build_options,
    "guide example": guide_example_text,
    "guide example on CPUs": guide_example_diff,
    "errors": errors,
    "clients": clients.markdown,
    "archs": archs,
    "support by feature": support_matrix.features,
    "support by dtype": support_matrix.dtypes,
    "restrictions": support_matrix.rules,
    "ranges": support_matrix.ranges,
    "lifted restrictions": support_matrix.lifted,
    "not built": support_matrix.not_built,
}


def current(document: Path) -> str:
    """What the document should say."""
    if document == ENVIRONMENT:
        return env.markdown()
    text = document.read_text(encoding="utf-8")
    for name, part in PARTS.items():
        begin, end = f"<!-- generated: {name} -->", f"<!-- end of {name} -->"
        if begin in text:
            head, rest = text.split(begin)
            _, tail = rest.split(end)
            text = f"{head}{begin}\n{part()}\n{end}{tail}"
    return text


def documents() -> list[Path]:
    return [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]


def outdated() -> list[Path]:
    return [document for document in documents() if document.read_text(encoding="utf-8") != current(document)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="bring the documents up to date")
    write = parser.parse_args().write
    for document in outdated():
        print(("written: " if write else "not current: ") + str(document.relative_to(ROOT)))
        if write:
            document.write_text(current(document), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
