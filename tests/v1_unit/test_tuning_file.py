"""Saving tuned rules: what is replaced, what is printed, and that a file is whole at every moment."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
from pathlib import Path
from typing import Any

import pytest

from mori.ops.tuning_config import TuningConfigManager
from mori.ops.tuning_file import save_rule

from .tuning import blocks, combine_rule, rule, write

FACTS = {"gpu_arch": "gfx942", "gpu_model": "mi300x", "kernel_type": "IntraNode", "ep_size": 8}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "gfx942_mi300x_IntraNode_ep8_dispatch.json"


def save(path: Path, entry: dict[str, Any], phase: str = "dispatch", **facts: Any) -> dict[str, Any]:
    """Saves, and returns what the file holds then."""
    TuningConfigManager.save_tuning_result(path, FACTS | facts, entry, phase)
    return json.loads(path.read_text())


def test_a_new_file(tmp_path: Path):
    path = tmp_path / "not" / "there" / "yet.json"
    content = save(path, rule(latency_us=3.5))
    assert content == {"version": "1.0", **FACTS, "phase": "dispatch", "rules": [rule(latency_us=3.5)]}
    assert path.read_text() == json.dumps(content, indent=2) + "\n"
    assert os.listdir(path.parent) == [path.name]


def test_rules_are_added_in_order_and_facts_replaced(path: Path):
    for tokens in (512, 64, 128):
        save(path, rule(tokens, tokens))
    save(path, rule(64, 1, hidden_dim=1024))
    content = save(path, rule(64, 2, dtype="a"), driver="7.1", version="9", rules=[])
    assert blocks(content["rules"]) == [2, 1, 64, 128, 512]
    assert list(content) == ["version", *FACTS, "driver", "phase", "rules"]
    assert content["version"] == "1.0"


def test_the_same_call_is_replaced_whatever_was_measured(path: Path):
    save(path, rule(128, 1, bandwidth_gbps=300.0, latency_us=5.0))
    content = save(path, rule(128, 2, bandwidth_gbps=100.0))
    assert content["rules"] == [rule(128, 2, bandwidth_gbps=100.0)]


@pytest.mark.parametrize("other", [{"dtype": "fp4"}, {"num_tokens": 64}, {"hidden_dim": 4096}, {"topk": 8}])
def test_calls_that_differ_stay_apart(path: Path, other: dict[str, Any]):
    save(path, rule(block_num=1))
    assert sorted(blocks(save(path, rule(**{"block_num": 2} | other))["rules"])) == [1, 2]


def test_no_topk_and_null_are_the_same(path: Path):
    save(path, rule(block_num=1))
    assert blocks(save(path, rule(block_num=2, topk=None))["rules"]) == [2]


def test_combine_rules_are_told_apart_by_two_more_fields(path: Path):
    save(path, combine_rule(128, 1), "combine")
    save(path, combine_rule(128, 2, zero_copy=True), "combine")
    save(path, combine_rule(128, 3, quant_type="fp8_direct_cast"), "combine")
    content = save(path, combine_rule(128, 4, zero_copy=True), "combine")
    assert blocks(content["rules"]) == [3, 1, 4]
    assert content["phase"] == "combine"


def test_rules_of_both_phases_in_one_file_leave_each_other_alone(path: Path):
    save(path, combine_rule(128, 1), "combine")
    save(path, rule(128, 2))
    content = save(path, combine_rule(64, 3), "combine")
    assert sorted(blocks(content["rules"])) == [1, 2, 3]


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"version": "2.0", "rules": null}', b"\xff"])
def test_a_corrupt_file_counts_as_absent(path: Path, caplog: pytest.LogCaptureFixture, content: bytes):
    path.write_bytes(content)
    assert save(path, rule())["rules"] == [rule()]
    [record] = caplog.records
    assert record.levelno == logging.WARNING and "is written anew" in record.getMessage()


def test_broken_rules_of_the_file_go_with_a_warning(path: Path, caplog: pytest.LogCaptureFixture):
    write(path, [rule(64, 1), {"dtype": "bf16"}, 7])
    assert blocks(save(path, rule(128, 2))["rules"]) == [1, 2]
    [record] = caplog.records
    assert record.levelno == logging.WARNING and "2 of 3 rules" in record.getMessage()


def test_a_file_of_another_version_is_not_touched(path: Path):
    write(path, [rule(64, 1)], version="2.0")
    before = path.read_bytes()
    with pytest.raises(ValueError, match=r"has version '2\.0', this mori writes '1\.0': save to another file"):
        save(path, rule())
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    "entry, phase, says",
    [
        (rule(block_num="64"), "dispatch", "its block_num is '64', not a whole number"),
        (rule(), "combine", "it lacks zero_copy"),
        ({}, "dispatch", "it lacks dtype"),
    ],
)
def test_a_rule_that_could_not_be_read_back_is_refused(path: Path, entry: dict[str, Any], phase: str, says: str):
    with pytest.raises(ValueError, match=says):
        save(path, entry, phase)
    with pytest.raises(ValueError, match="phase 'both' is unknown"):
        save(path, rule(), "both")
    assert not path.exists()


def test_facts_that_are_no_json_leave_the_file_as_it_is(path: Path):
    before = save(path, rule())
    with pytest.raises(TypeError, match="JSON"):
        save(path, rule(64), extra=object())
    assert json.loads(path.read_text()) == before


def test_a_failed_write_leaves_the_old_file_and_nothing_else(path: Path, monkeypatch: pytest.MonkeyPatch):
    before = save(path, rule())

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        save(path, rule(64))
    assert os.listdir(path.parent) == [path.name]
    assert json.loads(path.read_text()) == before


def test_a_link_stays_a_link(path: Path, tmp_path: Path):
    link = tmp_path / "link.json"
    link.symlink_to(path)
    save(link, rule(64, 1))
    assert link.is_symlink() and blocks(json.loads(path.read_text())["rules"]) == [1]


def test_the_file_can_be_read_by_whom_the_umask_allows(path: Path):
    before = os.umask(0o027)
    try:
        save(path, rule())
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o640


def _write_rules(path: Path, tokens: range) -> None:
    for each in tokens:
        save_rule(path, FACTS, rule(each), "dispatch")


def test_writers_at_the_same_time_leave_a_whole_file(path: Path):
    save(path, rule(0))
    forked = multiprocessing.get_context("fork")
    writers = [forked.Process(target=_write_rules, args=(path, range(k, 41, 2))) for k in (1, 2)]
    for writer in writers:
        writer.start()
    seen = 0
    while any(writer.is_alive() for writer in writers):
        content = json.loads(path.read_text())
        counts = [each["num_tokens"] for each in content["rules"]]
        assert counts == sorted(set(counts)) and counts[0] == 0
        seen += 1
    for writer in writers:
        writer.join()
        assert writer.exitcode == 0
    # Whoever came last had seen its own rules.
    assert seen and {39, 40} & {each["num_tokens"] for each in json.loads(path.read_text())["rules"]}
    assert os.listdir(path.parent) == [path.name]


# ---- what is printed


def printed(capsys: pytest.CaptureFixture[str]) -> list[str]:
    lines = capsys.readouterr().out.splitlines()
    assert all(line.startswith("[mori-tuning] ") for line in lines)
    return [line.removeprefix("[mori-tuning] ").strip() for line in lines]


def test_a_new_rule_is_announced(path: Path, capsys: pytest.CaptureFixture[str]):
    save(path, rule(128, 64, latency_us=12.5, bandwidth_gbps=300))
    assert printed(capsys) == [
        "ADDED dispatch rule ('bf16', 128, 7168, None)",
        "config:  64/0/8 (block_num/rdma_block_num/warp_per_block)",
        "latency: 12.50 us",
        "bw:      300.00 GB/s",
    ]


def test_a_replaced_rule_is_compared(path: Path, capsys: pytest.CaptureFixture[str]):
    save(path, combine_rule(128, 64, topk=8, latency_us=10.0, bandwidth_gbps=300.0), "combine")
    capsys.readouterr()
    save(path, combine_rule(128, 80, topk=8, latency_us=8.0, bandwidth_gbps=330.0), "combine")
    assert printed(capsys) == [
        "REPLACED combine rule ('bf16', 128, 7168, 8, False, 'none')",
        "config:  64/0/8 -> 80/0/8 (block_num/rdma_block_num/warp_per_block)",
        "latency: 10.00 -> 8.00 us (-20.0%, better)",
        "bw:      300.00 -> 330.00 GB/s (+10.0%)",
    ]


@pytest.mark.parametrize(
    "old, new, says",
    [
        ({"latency_us": 10}, {"latency_us": 11}, "latency: 10.00 -> 11.00 us (+10.0%, worse)"),
        ({"latency_us": 10}, {"latency_us": 10}, "latency: 10.00 -> 10.00 us (+0.0%)"),
        ({"avg_latency_us": 10}, {"avg_latency_us": 5}, "latency: 10.00 -> 5.00 us (-50.0%, better)"),
        ({}, {"latency_us": 10}, "latency: 10.00 us"),
        ({"latency_us": 0}, {"latency_us": 10}, "latency: 0.00 -> 10.00 us"),
        ({"bandwidth_gbps": 100}, {"bandwidth_gbps": 90}, "bw:      100.00 -> 90.00 GB/s (-10.0%)"),
        (
            {"bandwidth_gbps": 100},
            {"bandwidth_gbps": 90, "bandwidth_metric": "grand_mean"},
            "bw:      100.00 -> 90.00 GB/s (not comparable: bandwidth_metric None -> grand_mean)",
        ),
        (
            {"bandwidth_gbps": 100, "bandwidth_metric": "grand_mean"},
            {"bandwidth_gbps": 90, "bandwidth_metric": "grand_mean"},
            "bw:      100.00 -> 90.00 GB/s (-10.0%)",
        ),
    ],
)
def test_measured_numbers(
    path: Path, capsys: pytest.CaptureFixture[str], old: dict[str, Any], new: dict[str, Any], says: str
):
    save(path, rule(**old))
    capsys.readouterr()
    save(path, rule(**new))
    assert printed(capsys)[2:] == [says]


def test_without_measurements_only_the_sizes_are_printed(path: Path, capsys: pytest.CaptureFixture[str]):
    save(path, rule(latency_us=1.0, bandwidth_gbps=1.0))
    capsys.readouterr()
    save(path, rule())
    assert [line.split(":")[0] for line in printed(capsys)[1:]] == ["config"]
