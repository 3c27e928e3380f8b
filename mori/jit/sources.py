"""Where device sources are, and which headers a source reaches.

The second is what makes the cache notice an edited header. Directives are searched for in the text, without looking at
`#if` or comments: a header too many in the key costs a compilation now and then, one too few would give stale code.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from pathlib import Path

from mori import env
from mori.jit.errors import SourcesNotFound

_PACKAGE = Path(__file__).parents[1]
_LANDMARK = Path("device", "base.hpp")
_INCLUDE = re.compile(
    r"""(?:\#|%:)[ \t]*(?:include_next|include)[ \t]*(?:<(?P<angled>[^>\n]+)>|"(?P<quoted>[^"\n]+)"|(?P<macro>\w+))
      | __has_include[ \t]*\([ \t]*[<"](?P<asked>[^>"\n]+)[>"]""",
    re.VERBOSE,
)


def source_root() -> Path:
    """The folder with device/, kernels/ and layout/.

    MORI_SOURCE_ROOT (that folder, or one that has it as csrc/), else the copy inside an installed package, else the one
    beside a package that is used from its source tree. SourcesNotFound names the places that were tried.
    """
    override = env.get("MORI_SOURCE_ROOT")
    if override:
        tried = [Path(override).expanduser(), Path(override).expanduser() / "csrc"]
    else:
        tried = [_PACKAGE / "csrc", _PACKAGE.parent / "csrc"]
    for folder in tried:
        if (folder / _LANDMARK).is_file():
            return folder.resolve()
    raise SourcesNotFound(
        f"no device sources: {_LANDMARK} is in none of {', '.join(map(str, tried))}; "
        "set MORI_SOURCE_ROOT to the folder that holds device/, kernels/ and layout/, or install mori anew"
    )


def headers(text: str, folder: Path | None, include_dirs: tuple[Path, ...]) -> list[tuple[str, str]]:
    """(name as written, SHA-256 of the content) of every header that the text reaches, in the order of discovery.

    `folder` is where the text itself comes from. Names that lead nowhere are the compiler's own headers, which its
    version stands for. Where a name leads to several files all of them count, so that no assumption about a compiler's
    search order is needed.
    """
    found: list[tuple[str, str]] = []
    seen: set[Path] = set()
    pending = [(text, folder)]
    while pending:
        including, beside = pending.pop()
        for name, file in _included(including, beside, include_dirs):
            real = file.resolve()
            if real in seen:
                continue
            seen.add(real)
            content = real.read_bytes()
            found.append((name, hashlib.sha256(content).hexdigest()))
            pending.append((content.decode("latin-1"), file.parent))
    return found


def _included(text: str, beside: Path | None, include_dirs: tuple[Path, ...]) -> Iterator[tuple[str, Path]]:
    for directive in _INCLUDE.finditer(re.sub(r"\\\r?\n", "", text)):
        if directive["macro"]:
            # Which header that is only a preprocessor knows: all that it could be.
            for folder in include_dirs:
                files = sorted(path for path in folder.rglob("*") if path.is_file())
                yield from ((str(path.relative_to(folder)), path) for path in files)
            continue
        name = directive["angled"] or directive["quoted"] or directive["asked"]
        for folder in (beside, *include_dirs) if beside else include_dirs:
            if (folder / name).is_file():
                yield name, folder / name
