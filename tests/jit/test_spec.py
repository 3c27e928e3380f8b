"""What a spec accepts, and when two specs are one."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest

from mori.jit import Spec


def test_constants_become_definitions_in_one_order() -> None:
    spec = Spec("k", "text", constants={"ROWS": 3, "ALIGNED": True, "ELEMENT": "float"})
    assert spec.definitions == ("-DALIGNED=1", "-DELEMENT=float", "-DROWS=3")
    assert spec == Spec("k", "text", constants={"ELEMENT": "float", "ROWS": "3", "ALIGNED": 1})


def test_a_spec_is_a_key_and_travels_between_processes() -> None:
    spec = Spec("k", Path("runtime/k.cu"), constants={"N": 1}, flags=("-lineinfo",))
    copy = pickle.loads(pickle.dumps(spec))
    assert {spec: "found"}[copy] == "found"
    assert spec != Spec("k", Path("runtime/k.cu"), constants={"N": 2}, flags=("-lineinfo",))


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"name": "a/b"}, "name='a/b'"),
        ({"name": "x" * 65}, "up to 64"),
        ({"source": "runtime/k.cu"}, r"pass pathlib.Path\('runtime/k.cu'\)"),
        ({"source": "int a;\0"}, "NUL"),
        ({"constants": {"3N": 1}}, "'3N' is no macro name"),
        ({"target": "fpga"}, "target='fpga'.*cuda"),
        ({"arch": "gfx942"}, "arch='gfx942' is no arch of target cuda.*sm_90"),
        ({"flags": ("-I/opt",)}, "include_dirs"),
        ({"flags": ("--include-path=/opt",)}, "include_dirs"),
        ({"flags": ("-include", "x.hpp")}, "write #include"),
    ],
)
def test_what_cannot_be_right_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Spec(**{"name": "k", "source": "text", **arguments})


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"kernels": "add"}, r"kernels='add': expected a tuple, \('add',\)"),
        ({"include_dirs": Path("/opt")}, "include_dirs='/opt'"),
        ({"constants": {"N": 1.5}}, "N=1.5 is a float"),
        ({"source": b"text"}, "source is a bytes"),
    ],
)
def test_wrong_types_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        Spec(**{"name": "k", "source": "text", **arguments})
