"""Rules of the tree that no linter knows: sizes of files, the line budget, what must not be written down, docs tables.

Prints every violation and exits with status 1 if there is one. Looks at the files that git tracks or would track.
"""

from __future__ import annotations

import ast
import re
import statistics
import subprocess
from collections.abc import Iterator
from pathlib import Path

import generated_docs

ROOT = Path(__file__).parents[1]
MAX_FILE_LINES = 600
MAX_MEDIAN_LINES = 200
# The package and its core should read in a day. Reasons and contracts are not what makes code long to read, and a
# budget that counted them would pay for leaving them out: docstrings, lines of comment alone and blank lines are free.
BUDGET_LINES, BUDGET_FOLDERS = 16_000, ("csrc", "mori")
FREE_LINE = re.compile(r"\s*($|//|#(?!\s*(if|else|elif|endif|define|include|pragma)))")
CODE = {".py", ".hpp", ".cpp", ".cu", ".hip", ".cmake", ".sh"}
TEXT = CODE | {".md", ".toml", ".txt", ".in", ""}

# What belongs to one machine, one place of download or one work list means nothing to a reader.
FORBIDDEN = {
    "path of one machine": re.compile(r"(?<![\w./])/(work|root|home|tmp/work)/"),
    "host name of a package registry": re.compile(
        r"\b(pypi|pythonhosted|pytorch|npmjs|debian|ubuntu)\.(org|com|net)\b"
    ),
    "number on a work list": re.compile(r"\bissues? #?\d{1,2}\b", re.IGNORECASE),
    "unfinished business": re.compile(r"\b(TODO|FIXME|XXX)\b"),
}


def tree() -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return [ROOT / line for line in listed.stdout.splitlines() if (ROOT / line).is_file()]


def lines_of(file: Path) -> list[str]:
    return file.read_text(encoding="utf-8").splitlines()


def lines_of_code(file: Path, lines: list[str]) -> int:
    documented: set[int] = set()
    for node in ast.walk(ast.parse("\n".join(lines))) if file.suffix == ".py" else ():
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            documented.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return sum(number not in documented and not FREE_LINE.match(line) for number, line in enumerate(lines, start=1))


def violations(files: list[Path]) -> Iterator[str]:
    texts = {file: lines_of(file) for file in files if file.suffix in TEXT}
    for file, lines in texts.items():
        name = file.relative_to(ROOT)
        if len(lines) > MAX_FILE_LINES:
            yield f"{name}: {len(lines)} lines, at most {MAX_FILE_LINES}: split it"
        if file == Path(__file__):
            continue
        for number, line in enumerate(lines, start=1):
            for what, pattern in FORBIDDEN.items():
                if found := pattern.search(line):
                    yield f"{name}:{number}: {what}: {found[0]!r}"

    code = {file: len(lines) for file, lines in texts.items() if file.suffix in CODE}
    if (median := statistics.median(code.values())) >= MAX_MEDIAN_LINES:
        yield f"the median source file has {median:g} lines, it must have fewer than {MAX_MEDIAN_LINES}"
    budgeted = [file for file in code if file.relative_to(ROOT).parts[0] in BUDGET_FOLDERS]
    used = sum(lines_of_code(file, texts[file]) for file in budgeted)
    if used > BUDGET_LINES:
        yield f"{' and '.join(BUDGET_FOLDERS)} have {used} lines of code, the budget is {BUDGET_LINES}"

    for document in generated_docs.outdated():
        yield f"{document.relative_to(ROOT)}: not what its source says now: run `make docs`"


def main() -> int:
    found = list(violations(tree()))
    print("\n".join(found) or "the tree keeps its rules")
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(main())
