"""`mori support`: the rules as answers, as text, as JSON, as exit status; the tables of docs/support-matrix.md."""

from __future__ import annotations

import json
import runpy
import sys
from typing import Any

import pytest
from typer.testing import CliRunner

from mori.cli import app
from mori.ops import restrictions
from mori.support import Question, answer
from tests.package.commands import ROOT

sys.path.insert(0, str(ROOT / "tools"))
import support_matrix

RULES = {row.id for row in restrictions.TABLE}

# What is asked, and the rules that say no.
ANSWERS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "v1": ({}, ()),
    "v1 fp8 of the arch": ({"arch": "gfx942", "dispatch_dtype": "fp8", "combine_dtype": "fp8"}, ()),
    "v1 fp8 of another": ({"arch": "gfx942", "combine_dtype": "fp8_ocp"}, ("arithmetic",)),
    "v1 fp4": ({"arch": "gfx942", "dispatch_dtype": "fp4", "combine_dtype": "fp4"}, ("arithmetic",)),
    "v1 fp4 only moved": ({"arch": "gfx942", "dispatch_dtype": "fp4"}, ()),
    "v1 fp4 wire": ({"arch": "gfx942", "quant_type": "fp4_blockwise"}, ("v1-fp4-wire",)),
    "v1 kernel type": ({"quant_type": "fp4_blockwise", "kernel_type": "AsyncLL"}, ("v1-blockwise-kernel-type",)),
    "v1 several": (
        {"quant_type": "fp8_blockwise", "combine_dtype": "f32", "zero_copy": True},
        ("v1-blockwise-dtype", "v1-blockwise-in-place"),
    ),
    "v1 nodes": ({"gpu_per_node": 4, "kernel_type": "InterNode"}, ("v1-nodes",)),
    "v1 range": ({"topk": 0}, ("v1-range-num_experts_per_token",)),
    "v1 no quant type": ({"quant_type": "fp9"}, ("",)),
    "hip": ({"api": "v2", "backend": "hip", "arch": "gfx1250", "dispatch_dtype": "fp4"}, ()),
    "hip by default": ({"api": "v2", "arch": "sm_90", "combine_mode": "scatter"}, ("hip-scatter",)),
    "flydsl by default": ({"api": "v2", "arch": "gfx950"}, ("flydsl-not-built",)),
    "hip several": (
        {"api": "v2", "enable_std_moe": True, "max_total_recv_tokens": 8, "features": ("replay",)},
        ("hip-std-moe", "hip-receive-cap", "hip-call-replay"),
    ),
    "v2 config": ({"api": "v2", "hidden_dim": 7172}, ("v2-row-bytes",)),
    "v2 wave": ({"api": "v2", "backend": "hip", "arch": "gfx1250", "world_size": 257}, ("v2-world-size-of-a-block",)),
    "v2 wider wave": ({"api": "v2", "backend": "hip", "arch": "gfx950", "world_size": 257}, ()),
}


@pytest.fixture(autouse=True)
def host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MORI_TARGET", "host")
    monkeypatch.delenv("MORI_V2_KERNEL_BACKEND", raising=False)


@pytest.mark.parametrize("name", ANSWERS)
def test_answers(name: str):
    fields, rules = ANSWERS[name]
    found = answer(Question(**fields))
    assert tuple(reason.rule for reason in found.reasons) == rules
    assert found.supported == (not rules)
    assert found.arch == fields.get("arch", "host")
    assert all(reason.text and reason.error for reason in found.reasons)


@pytest.mark.parametrize(
    "fields, words",
    [
        ({"api": "v3"}, "v1, v2"),
        ({"arch": "gfx90a"}, "gfx942"),
        ({"dispatch_dtype": "f16"}, "bf16"),
        ({"kernel_type": "Intra"}, "IntraNodeLL"),
        ({"api": "v2", "features": ("graphs",)}, "local_expert_count"),
        ({"api": "v2", "backend": "nope"}, "backend 'nope' is unknown: there are flydsl, hip"),
    ],
)
def test_words_that_do_not_exist(fields: dict[str, Any], words: str):
    with pytest.raises(ValueError, match=words):
        answer(Question(**fields))


@pytest.mark.parametrize(
    "arguments, status, says",
    [
        ("--api v2 --dtype f32", 0, "v2 with backend hip on host: yes"),
        ("--arch gfx942 --combine-dtype fp4", 1, "v1 on gfx942: no\n  gfx942 cannot run combine_fp4"),
        ("--api v2 --std-moe --feature std_moe", 1, "[hip-std-moe]\n  feature std_moe"),
        ("--arch gfx9", 2, "Invalid value"),
    ],
)
def test_command(arguments: str, status: int, says: str):
    result = CliRunner().invoke(app, ["support", *arguments.split()])
    assert result.exit_code == status
    assert says in result.output


def test_json():
    result = CliRunner().invoke(app, ["support", "--api", "v2", "--quant", "fp8_blockwise", "--json"])
    said = json.loads(result.stdout)
    assert result.exit_code == 1
    assert {key: said[key] for key in ("supported", "api", "backend", "arch")} == {
        "supported": False,
        "api": "v2",
        "backend": "hip",
        "arch": "host",
    }
    (reason,) = said["reasons"]
    assert (reason["rule"], reason["error"]) == ("hip-quant", "ValueError")


def test_it_is_a_module_too(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(sys, "argv", ["mori.support", "--arch", "gfx942", "--dtype", "fp4"])
    monkeypatch.delitem(sys.modules, "mori.support")  # as in a process that runs the module and nothing else
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("mori.support", run_name="__main__")
    assert ended.value.code == 1
    assert capsys.readouterr().out.startswith("v1 on gfx942: no\n")


def test_the_tables_name_rules_that_there_are():
    rules = support_matrix.rules()
    for row in restrictions.TABLE:
        assert (f"| `{row.id}` |" in rules) != support_matrix._is_range(row)
    cells = [cell for line in support_matrix.dtypes().splitlines() for cell in line.split("|")[2:-1]]
    named = {word.strip(" `") for cell in cells for word in cell.split(",") if "`" in cell}
    assert named and named <= RULES
    assert support_matrix.features().count("\n") == 1 + len(support_matrix.FEATURES)
    assert "| `world_size` | 1 | 512 | v1, v2 |" in support_matrix.ranges()
