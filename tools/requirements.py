"""Prints requirements of pyproject.toml, one a line, for the Makefile: versions are written down there only.

requirements.py build                     everything in the extra "build"
requirements.py dev --only torch          what the extra "dev" says of torch
requirements.py dev --without torch       everything else in it
requirements.py --have-torch              exit status 0 if this interpreter has a torch that is recent enough
"""

from __future__ import annotations

import argparse
import ast
import importlib.metadata
import importlib.util
import re
from pathlib import Path

PYPROJECT = (Path(__file__).parents[1] / "pyproject.toml").read_text()


def requirements(key: str) -> list[str]:
    """The array of that name. Python 3.10 has no TOML parser, but such an array reads the same in Python."""
    found = re.search(rf"^{key} = (\[.*?\])$", PYPROJECT, flags=re.MULTILINE | re.DOTALL)
    if found is None:
        raise SystemExit(f"pyproject.toml has no list named {key}")
    return [str(one) for one in ast.literal_eval(found[1])]


def name(requirement: str) -> str:
    return re.split(r"[\s<>=!~\[;]", requirement, maxsplit=1)[0]


def numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version.split("+")[0])[:2])


def torch_folder() -> Path | None:
    """The site folder of a torch that can be imported here and is at least what the package depends on."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    (needed,) = (one for one in requirements("dependencies") if name(one) == "torch")
    recent = numbers(importlib.metadata.version("torch")) >= numbers(needed)
    return Path(spec.origin).parents[1] if recent else None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("extra", nargs="?", default="dependencies")
    parser.add_argument("--only")
    parser.add_argument("--without")
    parser.add_argument("--have-torch", action="store_true")
    arguments = parser.parse_args()
    if arguments.have_torch:
        folder = torch_folder()
        print(folder or "none")
        return 0 if folder else 1
    for requirement in requirements(arguments.extra):
        if arguments.only in (None, name(requirement)) and arguments.without != name(requirement):
            print(requirement)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
