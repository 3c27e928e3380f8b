"""The guide's example on CPUs: its text, and a run of it from the installed package, good and with a fault."""

from __future__ import annotations

import re

import pytest
import torch

from mori.demo import adapt, check
from tests.package.commands import python


def test_every_rank_reports_and_the_verdict_closes_the_output() -> None:
    result = python("-m", "mori.demo", timeout_s=150)
    assert result.returncode == 0, result.stdout + result.stderr
    own = dict(re.findall(r"Rank (\d): sent 128 tokens, received (\d+)", result.stdout))
    assert sorted(own) == [str(rank) for rank in range(8)]
    table = re.findall(r"^ +(\d) +128 +(\d+)((?: +[\d.]+){10})$", result.stdout, flags=re.MULTILINE)
    assert {rank: rows for rank, rows, _ in table} == own
    assert all(float(cell) > 0 for *_, cells in table for cell in cells.split())
    rows = sum(int(received) for received in own.values())
    assert result.stdout.splitlines()[-1] == f"demo: ok, 8 ranks, {rows} rows, every bit as expected"


def test_one_flipped_bit_fails_and_is_named() -> None:
    result = python("-m", "mori.demo", "--flip-bit", timeout_s=150)
    assert result.returncode == 1
    number = r"-?[\d.]+(?:e-\d+)?"
    assert re.fullmatch(
        rf"demo: FAILED: rank 3: received row 5, column 70: got {number} \(0x[0-9a-f]{{4}}\), "
        rf"expected {number} \(0x[0-9a-f]{{4}}\) \(1 values differ\)",
        result.stdout.splitlines()[-1],
    )


def test_the_adapted_text_is_the_published_one_but_for_the_list() -> None:
    text = adapt.cpu_example(4711)
    assert "cuda" not in text
    assert 'os.environ["MASTER_PORT"] = "4711"' in text
    changed = [line for line in adapt.cpu_diff().splitlines()[2:] if line[0] in "+-"]
    assert len([line for line in changed if line[0] == "-"]) == 7
    assert [line.strip() for line in changed if line[0] == "+"] == [
        '+    device = torch.device("cpu")',
        '+        backend="gloo",',
        "+    check(rank, world_size, input_data, indices, dispatch_out, recv_count, combine_out)",
        '+    os.environ["MASTER_PORT"] = "<a free port>"',
    ]


def test_a_text_that_the_list_does_not_fit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapt, "published", lambda: "nothing of the kind")
    with pytest.raises(ValueError, match="0 times, expected 1"):
        adapt.cpu_example(1)


def test_compare_names_the_first_value_that_differs() -> None:
    expected = torch.ones(3, 4, dtype=torch.bfloat16)
    check.compare("same", expected.clone(), expected)
    got = expected.clone()
    got[1, 2] = 2.0
    got[2, 0] = 2.0
    with pytest.raises(
        check.Mismatch, match=r"rows row 1, column 2: got 2.0 \(0x4000\), expected 1.0 \(0x3f80\) \(2 v"
    ):
        check.compare("rows", got, expected)


def test_compare_sees_the_sign_of_zero() -> None:
    zero = torch.zeros(1, 1, dtype=torch.bfloat16)
    with pytest.raises(check.Mismatch, match="0x8000"):
        check.compare("rows", -zero, zero)
