"""Prints requirements of pyproject.toml, one a line, for the Makefile: versions are written down there only.

requirements.py build                     everything in the extra "build"
requirements.py dev --only torch          what the extra "dev" says of torch
requirements.py dev --without torch       everything else in it
requirements.py --have-torch              exit status 0 if this interpreter has a torch that is recent enough
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import re
from pathlib import Path

try:
    import tomllib
except ImportError:  # Python 3.10; pip has brought the same parser all along
    from pip._vendor import tomli as tomllib  # type: ignore[no-redef]

PROJECT = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]


def name(requirement: str) -> str:
    return re.split(r"[\s<>=!~\[;]", requirement, maxsplit=1)[0]


def numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version.split("+")[0])[:2])


def have_torch() -> bool:
    """Whether torch can be imported here and is at least what the package depends on."""
    if importlib.util.find_spec("torch") is None:
        return False
    (needed,) = (one for one in PROJECT["dependencies"] if name(one) == "torch")
    return numbers(importlib.metadata.version("torch")) >= numbers(needed)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("extra", nargs="?", choices=sorted(PROJECT["optional-dependencies"]))
    parser.add_argument("--only")
    parser.add_argument("--without")
    parser.add_argument("--have-torch", action="store_true")
    arguments = parser.parse_args()
    if arguments.have_torch:
        return 0 if have_torch() else 1
    for requirement in PROJECT["optional-dependencies"][arguments.extra]:
        if arguments.only in (None, name(requirement)) and arguments.without != name(requirement):
            print(requirement)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
