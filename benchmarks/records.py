"""What a benchmark of dispatch and combine writes down: one record per measured phase, and the rules it obeys.

A file holds {"schema": ..., "conditions": {...}, "records": [...]}. Conditions are what all of its records share.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import subprocess
import time
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from statistics import quantiles
from typing import Any

SCHEMA = "ep-bench/1"

CHOICES = {
    "library": ("mori", "nccl"),
    "phase": ("dispatch", "combine", "pair"),
    "mode": ("graph", "eager"),
    "clock": ("wall", "host_enqueue"),
    "combine_input": ("zero_copy", "external", "staged", None),
    "path": ("direct", "staged", "all_to_all"),
    "geometry_source": ("auto", "given", "swept", "library"),
    "link_limit_kind": ("store", "load", "copy_engine", None),
}


@dataclass(frozen=True)
class Record:
    """One phase of one case. Times are of the slowest rank in each repetition; percentiles are over repetitions."""

    library: str
    library_version: str
    mori_version: str
    flydsl_version: str | None
    """null: not installed."""
    target: str
    """host | cuda | hip"""
    device: str
    driver: str
    ep_size: int
    tokens: int
    """Per rank."""
    hidden: int
    topk: int
    experts: int
    phase: str
    """combine in graph mode: the time of a pair less that of the dispatch alone, measured in turns."""
    dtype: str
    quant: str
    scale_bytes: int
    """Per row, moved along with the rows of a dispatch."""
    path: str
    combine_input: str | None
    block_num: int | None
    warp_per_block: int | None
    geometry_source: str
    mode: str
    clock: str
    """wall: time between two events around many calls, divided by their number.
    host_enqueue: host time from entry to return of single calls, percentiles on each rank, the slower rank's."""
    calls_per_repetition: int
    repetitions: int
    p50_us: float
    p95_us: float
    device_p50_us: float | None
    """First block in to last block out, by the global timer of the GPU; null: the kernels have no such stamps yet."""
    logical_bytes: int
    """Rows that the busiest rank receives (combine: that come back to it), its own included."""
    wire_bytes: int
    """What really crosses the link to the busiest rank: rows of other ranks with weights, ids, scales and positions."""
    logical_gbps: float | None
    wire_gbps: float | None
    link_limit_gbps: float | None
    """Measured in the same run, both directions busy, for the kind of access below; null: not measured."""
    link_limit_kind: str | None
    verified: bool
    """Last results of this very measurement equal the expected ones, bit for bit."""
    note: str = ""


def percentiles(times_us: list[float]) -> tuple[float, float]:
    """p50 and p95; ValueError for fewer than two values."""
    if len(times_us) < 2:
        raise ValueError(f"{len(times_us)} repetitions have no percentiles: at least 2")
    cuts = quantiles(times_us, n=100, method="inclusive")
    return round(cuts[49], 3), round(cuts[94], 3)


def gbps(size_bytes: int, time_us: float) -> float | None:
    return round(size_bytes / time_us / 1e3, 1) if time_us > 0 else None


def conditions() -> dict[str, Any]:
    """Where and with what this process runs. What cannot be found out is null."""
    import torch

    import mori

    gpus = _nvidia_smi("name", "driver_version", "clocks.sm", "clocks.mem", "clocks.max.sm")
    first = gpus[0] if gpus else [None] * 5
    return {
        "date": time.strftime("%Y-%m-%d %H:%M:%S"),
        "device": first[0],
        "device_count": len(gpus),
        "sm_count": torch.cuda.get_device_properties(0).multi_processor_count if gpus else None,
        "driver": first[1],
        "clocks_mhz": {"sm": first[2], "memory": first[3], "sm_max": first[4]},
        "cuda": torch.version.cuda,
        "mori": mori.__version__,
        "flydsl": _version("flydsl"),
        "nccl": _nccl_version(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "kernel": platform.release(),
        "cores": len(os.sched_getaffinity(0)),
        "environment": {
            name: value for name, value in sorted(os.environ.items()) if name.startswith(("MORI_", "NCCL_"))
        },
    }


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _nccl_version() -> str | None:
    import torch

    if not torch.cuda.is_available():
        return None
    return ".".join(map(str, torch.cuda.nccl.version()))


def _nvidia_smi(*queries: str) -> list[list[str]]:
    """A row per GPU; none where there is no such program."""
    command = ["nvidia-smi", f"--query-gpu={','.join(queries)}", "--format=csv,noheader,nounits"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return [[cell.strip() for cell in line.split(",")] for line in result.stdout.splitlines()]


def document(records: list[Record], **facts: Any) -> dict[str, Any]:
    """The content of a file; `facts` join the conditions."""
    return {"schema": SCHEMA, "conditions": conditions() | facts, "records": [asdict(record) for record in records]}


def write(file: Path, content: dict[str, Any]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(content, indent=1) + "\n")


def problems(content: dict[str, Any]) -> list[str]:
    """What is wrong with a file's content; empty if it may be committed."""
    found = []
    if content.get("schema") != SCHEMA:
        return [f"schema is {content.get('schema')!r}, expected {SCHEMA!r}"]
    needed = ("date", "device", "driver", "cuda", "mori", "torch", "python", "clocks_mhz")
    found += [f"conditions lack {field}" for field in needed if not content.get("conditions", {}).get(field)]
    if "flydsl" not in content.get("conditions", {}):
        found.append("conditions do not say which flydsl there was (null: none)")
    if not content.get("records"):
        found.append("there are no records")
    for number, record in enumerate(content.get("records", [])):
        found += [f"record {number}: {problem}" for problem in _record_problems(record)]
    return found


def _record_problems(record: dict[str, Any]) -> list[str]:
    names = {field.name: str(field.type) for field in fields(Record)}
    if set(record) != set(names):
        return [f"fields missing {sorted(set(names) - set(record))}, unknown {sorted(set(record) - set(names))}"]
    kinds = {"str": str, "int": int, "float": (int, float), "bool": bool}
    found = []
    for name, annotation in names.items():
        value = record[name]
        alternatives = [part.strip() for part in annotation.split("|")]
        legal = any(value is None if part == "None" else _is(value, part, kinds[part]) for part in alternatives)
        if not legal:
            found.append(f"{name} is {value!r}, expected {annotation}")
    if found:
        return found
    for name, choices in CHOICES.items():
        if record[name] not in choices:
            found.append(f"{name} is {record[name]!r}, expected one of {choices}")
    if not 0 < record["p50_us"] <= record["p95_us"]:
        found.append(f"p50_us {record['p50_us']} and p95_us {record['p95_us']} are no percentiles of times")
    if not record["verified"]:
        found.append("the results were not verified in the run")
    if record["repetitions"] < 20:
        found.append(f"{record['repetitions']} repetitions are too few, at least 20")
    if not 0 <= record["wire_bytes"]:
        found.append(f"wire_bytes is {record['wire_bytes']}")
    if (record["link_limit_gbps"] is None) != (record["link_limit_kind"] is None):
        found.append("link_limit_gbps and link_limit_kind come together")
    if record["clock"] == "wall" and record["logical_gbps"] != gbps(record["logical_bytes"], record["p50_us"]):
        found.append(f"logical_gbps {record['logical_gbps']} is not logical_bytes / p50_us")
    if record["clock"] == "wall" and record["wire_gbps"] != gbps(record["wire_bytes"], record["p50_us"]):
        found.append(f"wire_gbps {record['wire_gbps']} is not wire_bytes / p50_us")
    return found


def _is(value: Any, kind: str, types: Any) -> bool:
    return isinstance(value, types) and (kind == "bool" or not isinstance(value, bool))
