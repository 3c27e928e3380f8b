"""Finding the source tree, and the headers that a source reaches."""

from __future__ import annotations

from pathlib import Path

import pytest

from mori.jit import SourcesNotFound, source_root
from mori.jit.sources import headers


def write(folder: Path, **files: str) -> None:
    """`a_b="text"` writes a/b.hpp."""
    for name, text in files.items():
        path = folder / f"{name.replace('_', '/')}.hpp"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def names(text: str, *folders: Path, beside: Path | None = None) -> set[str]:
    return {name for name, _ in headers(text, beside, folders)}


def test_the_root_holds_the_device_sources() -> None:
    assert (source_root() / "device" / "base.hpp").is_file()


@pytest.mark.parametrize("below", ["", "csrc"])
def test_the_root_can_be_set(below: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / below, device_base="")
    monkeypatch.setenv("MORI_SOURCE_ROOT", str(tmp_path))
    assert source_root() == tmp_path / below


def test_a_root_without_sources_is_an_error_that_says_what_to_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MORI_SOURCE_ROOT", str(tmp_path))
    with pytest.raises(SourcesNotFound, match=f"{tmp_path}.*MORI_SOURCE_ROOT"):
        source_root()
    assert issubclass(SourcesNotFound, FileNotFoundError)


def test_headers_are_followed_wherever_they_lead(tmp_path: Path) -> None:
    write(
        tmp_path,
        kernels_a='  #  include "../device/b.hpp"\n',
        device_b="#include <layout/c.hpp>\n#include <cuda_fp16.h>\n",
        layout_c='#pragma once\n#include "../kernels/a.hpp"\n',
        layout_unreached="",
    )
    assert names('#include "kernels/a.hpp"\n', tmp_path) == {"kernels/a.hpp", "../device/b.hpp", "layout/c.hpp"}


@pytest.mark.parametrize(
    "text",
    [
        '#include "x.hpp"',
        "/* why */ #include <x.hpp>",
        '#include \\\n "x.hpp"',
        '#include \\\r\n "x.hpp"',
        '%:include "x.hpp"',
        '#if __has_include("x.hpp")',
        '#if 0\n#include "x.hpp"\n#endif',
        '#define CHOSEN "x.hpp"\n#include CHOSEN',
    ],
)
def test_no_way_to_write_it_escapes(text: str, tmp_path: Path) -> None:
    write(tmp_path, x="int x;")
    assert names(text + "\n", tmp_path) == {"x.hpp"}


def test_every_file_that_a_name_could_mean_counts(tmp_path: Path) -> None:
    write(tmp_path / "beside", x="1")
    write(tmp_path / "first", x="2")
    write(tmp_path / "second", x="3")
    found = headers('#include "x.hpp"', tmp_path / "beside", (tmp_path / "first", tmp_path / "second"))
    assert len({digest for _, digest in found}) == 3
