"""The table of environment variables: parsing, warnings, docs, and that nothing reads the environment past it."""

from __future__ import annotations

import ast
import warnings
from pathlib import Path

import pytest

import mori
from mori import env

PACKAGE = Path(mori.__file__).parent
DOCUMENT = Path(__file__).parent.parent / "docs" / "environment.md"


@pytest.mark.parametrize(
    "text, expected",
    [
        ("0", 0),
        ("1048576", 1 << 20),
        ("512b", 512),
        ("6G", 6 << 30),
        ("6g", 6 << 30),
        ("6GB", 6 << 30),
        ("6 GiB", 6 << 30),
        (" 64kib ", 64 << 10),
        ("512M", 512 << 20),
        ("512MB", 512 << 20),
        ("3TiB", 3 << 40),
    ],
)
def test_parse_bytes(text: str, expected: int) -> None:
    assert env.parse_bytes(text) == expected


@pytest.mark.parametrize("text", ["", "G", "-1", "1.5G", "6GG", "6iB", "6 X", "0x10", "6G 1M"])
def test_parse_bytes_refuses(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size: expected bytes, or a number with suffix K, M, G, T"):
        env.parse_bytes(text)


@pytest.mark.parametrize(
    "name, text, expected",
    [
        ("MORI_EP_VALIDATE", "1", True),
        ("MORI_EP_VALIDATE", "ON", True),
        ("MORI_EP_VALIDATE", "yes", True),
        ("MORI_EP_VALIDATE", "True", True),
        ("MORI_EP_VALIDATE", "0", False),
        ("MORI_EP_VALIDATE", "off", False),
        ("MORI_EP_VALIDATE", "No", False),
        ("MORI_EP_VALIDATE", "false", False),
        ("MORI_TIMEOUT_S", "0.25", 0.25),
        ("MORI_SHMEM_HEAP_SIZE", "6G", 6 << 30),
        ("MORI_HOST_THREADS", "3", 3),
        ("MORI_HOST_ISA", "avx2", "avx2"),
        ("MORI_EP_LAUNCH_CONFIG_MODE", "AUTO", "AUTO"),
        ("MORI_EP_DISP_GEOM", "80, 64,8", (80, 64, 8)),
        ("MORI_FP8_COMBINE_SCALE_DIM", "1", 1),
        ("MORI_WAVE_SIZE", "32", 32),
        ("MORI_NODE_ID", "rack 1", "rack 1"),
    ],
)
def test_get_parses(monkeypatch: pytest.MonkeyPatch, name: str, text: str, expected: object) -> None:
    monkeypatch.setenv(name, text)
    value = env.get(name)
    assert value == expected and type(value) is type(expected)


@pytest.mark.parametrize(
    "name, text, accepted",
    [
        ("MORI_EP_VALIDATE", "maybe", "1, true, on, yes or 0, false, off, no"),
        ("MORI_TIMEOUT_S", "soon", "a positive number of seconds"),
        ("MORI_TIMEOUT_S", "0", "a positive number of seconds"),
        ("MORI_TIMEOUT_S", "nan", "a positive number of seconds"),
        ("MORI_TIMEOUT_S", "inf", "a positive number of seconds"),
        ("MORI_HOST_THREADS", "-1", "a whole number from 0 to 2147483647"),
        ("MORI_HOST_THREADS", "2.5", "a whole number from 0 to 2147483647"),
        ("MORI_SHMEM_HEAP_SIZE", "lots", "suffix K, M, G, T"),
        ("MORI_EP_LAUNCH_CONFIG_MODE", "auto", "one of MANUAL, AUTO"),
        ("MORI_TARGET", "rocm", "one of host, cuda, hip"),
        ("MORI_FP8_COMBINE_SCALE_DIM", "0", "a whole number from 1 to 2147483647"),
        ("MORI_WAVE_SIZE", "16", "32 or 64"),
        ("MORI_EP_DISP_GEOM", "80,64", "three numbers block,rdma,warp"),
    ],
)
def test_get_names_variable_value_and_form(
    monkeypatch: pytest.MonkeyPatch, name: str, text: str, accepted: str
) -> None:
    monkeypatch.setenv(name, text)
    with pytest.raises(ValueError) as caught:
        env.get(name)
    assert str(caught.value).startswith(f"{name}={text!r} is not valid: expected ")
    assert accepted in str(caught.value)


@pytest.mark.parametrize(
    "name, default",
    [
        ("MORI_TIMEOUT_S", 300.0),
        ("MORI_BOOTSTRAP_TIMEOUT", 300.0),
        ("MORI_SHMEM_HEAP_SIZE", 4 << 30),
        ("MORI_HOST_THREADS", 0),
        ("MORI_HOST_ISA", "auto"),
        ("MORI_EP_LAUNCH_CONFIG_MODE", "MANUAL"),
        ("MORI_TARGET", None),
    ],
)
def test_unset_and_empty_give_the_default(monkeypatch: pytest.MonkeyPatch, name: str, default: object) -> None:
    monkeypatch.delenv(name, raising=False)
    assert env.get(name) == default
    monkeypatch.setenv(name, " ")
    assert env.get(name) == default


def test_unknown_names_are_no_variables() -> None:
    with pytest.raises(KeyError):
        env.get("MORI_NO_SUCH_VARIABLE")


def test_unknown_variables_warn_once_with_the_nearest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(env, "_warned", False)
    monkeypatch.setenv("MORI_SHMEM_HEAPSIZE", "6G")
    monkeypatch.setenv("MORI_ZZZZZZ", "1")
    monkeypatch.setenv("MORI_OPS_LOG_LEVEL", "info")
    with pytest.warns(UserWarning, match="is not known to mori") as caught:
        env.warn_unknown()
    texts = [str(each.message) for each in caught]
    assert any("MORI_SHMEM_HEAPSIZE" in text and "did you mean MORI_SHMEM_HEAP_SIZE?" in text for text in texts)
    assert any("MORI_ZZZZZZ" in text and "docs/environment.md" in text for text in texts)
    assert not any("LOG_LEVEL" in text or "MORI_SHMEM_HEAP_SIZE is" in text for text in texts)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        env.warn_unknown()


def test_the_table_is_whole() -> None:
    listed = [variable for area in env.AREAS.values() for variable in area]
    assert len(listed) == len(env.VARIABLES)  # no name twice
    for variable in listed:
        assert variable.meaning.endswith("."), variable.name
        if variable.default is not None:
            parsed = variable.kind.parse(str(variable.default))
            assert parsed == variable.default, variable.name


def test_the_document_is_true() -> None:
    assert DOCUMENT.read_text() == env.markdown(), "write docs/environment.md again, its second line says how"


def _environment_names(tree: ast.AST) -> set[str]:
    """String constants like MORI_X inside any expression that touches os.environ or os.getenv."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.Call, ast.Subscript, ast.Compare)):
            source = ast.unparse(node)
            if "environ" in source or "getenv" in source:
                constants = [each.value for each in ast.walk(node) if isinstance(each, ast.Constant)]
                names |= {value for value in constants if isinstance(value, str) and value.startswith("MORI_")}
    return names


def test_nothing_else_reads_mori_variables() -> None:
    reading = ast.parse("import os\nos.environ['MORI_A'], os.getenv('MORI_B'), 'MORI_C' in os.environ")
    assert _environment_names(reading) == {"MORI_A", "MORI_B", "MORI_C"}
    for path in PACKAGE.rglob("*.py"):
        assert not _environment_names(ast.parse(path.read_text())), path


def test_every_variable_asked_for_is_in_the_table() -> None:
    asked = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if (
                isinstance(node, ast.Call)
                and ast.unparse(node.func) == "env.get"
                and isinstance(node.args[0], ast.Constant)
            ):
                asked.add(node.args[0].value)
    assert "MORI_BOOTSTRAP_TIMEOUT" in asked
    assert asked <= set(env.VARIABLES)


@pytest.mark.parametrize(
    "name, text",
    [
        ("MORI_TIMEOUT_S", "1e12"),
        ("MORI_SHMEM_HEAP_SIZE", "999999999999T"),
        ("MORI_SHMEM_HEAP_SIZE", "0"),
        ("MORI_HOST_THREADS", "4294967297"),
    ],
)
def test_values_out_of_all_proportion_are_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, name: str, text: str
) -> None:
    monkeypatch.setenv(name, text)
    with pytest.raises(ValueError, match=name):
        env.get(name)
