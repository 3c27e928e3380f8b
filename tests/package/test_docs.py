"""Documents say what is true: generated parts are current, commands and links lead somewhere."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import pytest

from mori.cli import app
from tests.package.commands import ROOT, python

sys.path.insert(0, str(ROOT / "tools"))
import check_tree
import generated_docs

DOCUMENTS = [str(path.relative_to(ROOT)) for path in generated_docs.documents()]


def commands(document: str) -> list[list[str]]:
    """Words of every line after a prompt in the document's console blocks, without variable assignments."""
    blocks = re.findall(r"^```console\n(.*?)^```", (ROOT / document).read_text(), flags=re.MULTILINE | re.DOTALL)
    lines = [line[2:] for block in blocks for line in block.splitlines() if line.startswith("$ ")]
    split = [shlex.split(re.sub(r"^(\w+=(<[^>]*>|\S*) )+", "", line), comments=True) for line in lines]
    return [words for words in split if words]


def test_generated_parts_are_current() -> None:
    assert generated_docs.outdated() == []


@pytest.mark.parametrize("document", DOCUMENTS)
def test_commands_exist(document: str) -> None:
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    programs = {command.name or command.callback.__name__ for command in app.registered_commands if command.callback}
    for program, *arguments in commands(document):
        if program == "make":
            assert set(arguments) <= set(targets)
        elif program == "mori":
            assert arguments[0] in programs
        else:
            assert program == "pip", f"{document} shows {program}: say here how to check that it exists"


def test_the_two_commands_are_in_the_readme() -> None:
    assert [["make", "demo"], ["make", "test"]] == [words for words in commands("README.md") if words[0] == "make"][:2]


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_lead_to_files(document: str) -> None:
    text = (ROOT / document).read_text()
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text):
        assert ((ROOT / document).parent / target).exists(), target


def test_the_tables_that_parts_come_from_are_complete() -> None:
    options = generated_docs.build_options()
    assert options.count("\n") == 1 + (ROOT / "cmake/build_options.cmake").read_text().count("\nmori_option(")
    assert "`mori.PeerLost`" in generated_docs.errors()


def test_the_tree_check_sees_what_it_should(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_tree, "ROOT", tmp_path)
    (tmp_path / "mori").mkdir()
    long, hinting = tmp_path / "mori" / "long.py", tmp_path / "notes.md"
    long.write_text("x = 1\n" * 16_001 + '\n# why\n"""What\nand how."""\n')
    hinting.write_text("see /" + "home/someone/notes\n")
    found = "\n".join(check_tree.violations([long, hinting]))
    assert "mori/long.py: 16005 lines, at most 600" in found
    assert "the median source file has 16005 lines" in found
    assert "csrc and mori have 16001 lines of code, the budget is 16000" in found
    assert "notes.md:1: path of one machine" in found


def test_tools_run_as_programs() -> None:
    result = python(str(ROOT / "tools" / "requirements.py"), "dev", "--only", "torch")
    assert result.stdout == "torch==2.13.0\n"
    assert "torch" not in python(str(ROOT / "tools" / "requirements.py"), "dev", "--without", "torch").stdout
    assert python(str(ROOT / "tools" / "requirements.py"), "--have-torch").returncode == 0
