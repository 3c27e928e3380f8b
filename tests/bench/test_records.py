"""The rules of committed measurements: every file under benchmarks/results and tests/gpu/results obeys its schema."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import records
from tests.gpu import results, sanitize

ROOT = Path(__file__).parents[2]
BENCHMARKS = sorted((ROOT / "benchmarks" / "results").glob("**/*.json"))
GPU_TESTS = sorted((ROOT / "tests" / "gpu" / "results").glob("**/*.json"))
LONG_TESTS = sorted((ROOT / "tests" / "results").glob("**/*.json"))  # of `make test-full`, on CPUs

GOOD = records.Record(
    library="mori",
    library_version="0.1",
    mori_version="0.1",
    flydsl_version=None,
    target="cuda",
    device="NVIDIA H200",
    driver="580.1",
    ep_size=2,
    tokens=4096,
    hidden=7168,
    topk=8,
    experts=256,
    phase="dispatch",
    dtype="bfloat16",
    quant="none",
    scale_bytes=0,
    path="direct",
    combine_input=None,
    block_num=132,
    warp_per_block=16,
    geometry_source="auto",
    mode="graph",
    clock="wall",
    calls_per_repetition=50,
    repetitions=20,
    p50_us=170.0,
    p95_us=171.5,
    device_p50_us=None,
    logical_bytes=117_000_000,
    wire_bytes=58_700_000,
    logical_gbps=688.2,
    wire_gbps=345.3,
    link_limit_gbps=366.0,
    link_limit_kind="store",
    verified=True,
)


def content(record: dict[str, Any], **conditions: Any) -> dict[str, Any]:
    names = ("date", "device", "driver", "cuda", "mori", "torch", "python", "clocks_mhz")
    known = dict.fromkeys(names, "known") | {"flydsl": None} | conditions
    return {"schema": records.SCHEMA, "conditions": known, "records": [record]}


def host_problems(document: dict[str, Any]) -> list[str]:
    """Records of benchmarks/host_ep.py, which has no GPU to tell of."""
    needed = {"case", "largest_bytes_of_a_rank", "ms", "times_memcpy", "verified", "conditions"}
    found = [f"lacks {name}" for name in sorted(needed - set(document))]
    for phase, times in document.get("ms", {}).items():
        if not 0 < times["p50"] <= times["p95"]:
            found.append(f"{phase}: {times} are no percentiles of times")
    found += [
        f"conditions lack {name}" for name in ("date", "cpu", "torch", "mori") if not document["conditions"][name]
    ]
    return found


def problems_of(files: list[Path], judge: Callable[[dict[str, Any]], list[str]]) -> dict[str, list[str]]:
    found = {file.name: judge(json.loads(file.read_text())) for file in files}
    return {name: problems for name, problems in found.items() if problems}


def test_every_committed_benchmark_record():
    host = [file for file in BENCHMARKS if file.name.startswith("host_ep_")]
    assert problems_of(host, host_problems) == {}
    assert problems_of([file for file in BENCHMARKS if file not in host], records.problems) == {}


def test_every_committed_result_of_gpu_tests():
    judges = {results.SCHEMA: results.problems, sanitize.SCHEMA: sanitize.problems}
    assert problems_of(GPU_TESTS, lambda document: judges[document["schema"]](document)) == {}
    assert LONG_TESTS
    assert problems_of(LONG_TESTS, lambda document: results.problems(document, results.HOST_CONDITIONS)) == {}


def test_what_a_sanitizer_finds_is_a_problem():
    clean = {"findings": [0, 0], "exit_codes": [0, 0], "cases": [["a"], ["a"]]}
    assert sanitize.problems({"tools": {"memcheck": clean}}) == []
    for bad in ({"findings": [0, 1]}, {"findings": [None, 0]}, {"exit_codes": [0, 1]}, {"cases": [["a"], []]}):
        assert len(sanitize.problems({"tools": {"memcheck": clean | bad}})) == 1


def test_a_good_record_has_no_problems():
    assert records.problems(content(asdict(GOOD))) == []
    assert records.problems(json.loads(json.dumps(content(asdict(GOOD))))) == []


@pytest.mark.parametrize(
    "change,says",
    [
        ({"phase": "scatter"}, "phase"),
        ({"mode": "fast"}, "mode"),
        ({"p50_us": 180.0}, "percentiles"),
        ({"p50_us": "170"}, "p50_us"),
        ({"p50_us": -1.0}, "percentiles"),
        ({"tokens": 1.5}, "tokens"),
        ({"tokens": True}, "tokens"),
        ({"verified": False}, "not verified"),
        ({"verified": 1}, "verified"),
        ({"repetitions": 3}, "at least 20"),
        ({"logical_gbps": 900.0}, "logical_gbps"),
        ({"wire_gbps": None}, "wire_gbps"),
        ({"link_limit_kind": None}, "come together"),
        ({"link_limit_kind": "guess"}, "link_limit_kind"),
        ({"device": None}, "device"),
        ({"combine_input": "magic"}, "combine_input"),
    ],
)
def test_what_is_wrong_with_a_record_is_said(change: dict[str, Any], says: str):
    found = records.problems(content(asdict(replace(GOOD, **change))))
    assert len(found) >= 1 and any(says in problem for problem in found), found


def test_missing_and_unknown_fields_are_named():
    record = asdict(GOOD)
    del record["driver"]
    record["drivers"] = "580"
    [found] = records.problems(content(record))
    assert "'driver'" in found and "'drivers'" in found


@pytest.mark.parametrize("field", ["date", "device", "driver", "mori", "torch"])
def test_conditions_must_be_known(field: str):
    assert records.problems(content(asdict(GOOD), **{field: None})) == [f"conditions lack {field}"]


def test_another_schema_and_no_records():
    assert "schema" in records.problems({"records": []})[0]
    assert records.problems(content(asdict(GOOD)) | {"records": []}) == ["there are no records"]


def test_percentiles_and_rates():
    assert records.percentiles([float(value) for value in range(101)]) == (50.0, 95.0)
    with pytest.raises(ValueError, match="at least 2"):
        records.percentiles([1.0])
    assert records.gbps(58_700_000, 160.0) == 366.9
    assert records.gbps(1, 0.0) is None


def test_conditions_of_this_machine_are_plain_json():
    found = records.document([GOOD], link_limits_gbps={"store": 366.0})
    assert json.loads(json.dumps(found)) == found
    assert found["conditions"]["mori"] and found["conditions"]["torch"]
    assert found["conditions"]["link_limits_gbps"] == {"store": 366.0}
