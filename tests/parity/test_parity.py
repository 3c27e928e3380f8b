"""v1 and v2 give the same bits for random configurations, and the reference gives them too."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import torch

from mori.parity import __main__ as command_line
from mori.parity.compare import differences, differing_bits, drawn, report
from mori.parity.configuration import draw
from mori.parity.plain import expected as plainly_expected
from mori.parity.ranks import Way, play_all
from tests.parity.judge import expected, judge
from tests.ranks import pool

# world size -> configurations in every run, and in a full one
CONFIGURATIONS = {2: (400, 2000), 3: (100, 500), 4: (60, 300)}
RECORD = Path(__file__).with_name("results.json")


def play(world_size: int, count: int) -> tuple[int, int]:
    """Configurations and bytes that were compared; AssertionError for any difference."""
    answers = pool(world_size).run(judge, 0, count, timeout_s=1200)
    found = [text for texts, _ in answers for text in texts]
    assert found == [], "\n".join(found[:10])
    return count, sum(compared for _, compared in answers)


@pytest.mark.parametrize("world_size", CONFIGURATIONS)
def test_v1_and_v2_give_the_same_bits(world_size: int):
    _, compared = play(world_size, CONFIGURATIONS[world_size][0])
    assert compared > 1_000_000


def fingerprint(world_size: int, count: int) -> str:
    """Of the configurations: a record of others proves nothing."""
    return hashlib.sha256(repr(drawn(0, count, world_size)).encode()).hexdigest()[:16]


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_all_configurations():
    """Writes the record that is committed."""
    record = {}
    for world_size, (_, count) in CONFIGURATIONS.items():
        played, compared = play(world_size, count)
        record[str(world_size)] = {
            "configurations": played,
            "bytes": compared,
            "differing_bits": 0,
            "fingerprint": fingerprint(world_size, count),
        }
    RECORD.write_text(json.dumps(record, indent=2) + "\n")


def test_the_record_of_all_configurations_is_current():
    record = json.loads(RECORD.read_text())
    assert sum(each["configurations"] for each in record.values()) >= 2800
    assert all(each["differing_bits"] == 0 for each in record.values())
    for world_size, (_, count) in CONFIGURATIONS.items():
        assert record[str(world_size)]["fingerprint"] == fingerprint(world_size, count)


def test_configurations_cover_what_there_is():
    configurations = drawn(0, CONFIGURATIONS[2][0], 2)
    assert len({each.dtype for each in configurations}) == 5
    assert len({each.combine_dtype for each in configurations}) == 2
    assert {each.handles for each in configurations} == {True, False}
    assert {bool(each.scale_dim) for each in configurations} == {True, False}
    rounds = [each for configuration in configurations for each in configuration.rounds]
    assert {each.weights for each in rounds} == {True, False}
    assert len({each.external for each in rounds}) == 5
    assert any(0 in each.tokens for each in rounds)


@pytest.mark.parametrize("world_size", [2, 3])
def test_the_plain_check_agrees_with_the_reference(world_size: int):
    """The package's own one, which the command line uses."""
    for configuration in drawn(1000, 12, world_size):
        for rank in range(world_size):
            assert plainly_expected(configuration, rank) == expected(configuration, rank), configuration


def test_a_difference_is_named():
    what = ("combined rows", 0, 0)
    combining = next(each for each in drawn(1, 50, 2) if each.rounds[0].tokens[0] and each.rounds[0].external)
    configurations = [draw(0, 2), combining]
    outcomes = [[expected(each, rank) for rank in range(2)] for each in configurations]
    changed = [[dict(outcome) for outcome in ranks] for ranks in outcomes]
    changed[1][0][what] = bytes([changed[1][0][what][0] ^ 3]) + changed[1][0][what][1:]
    del changed[0][1]["ids", 0, -1]
    found = list(map(str, differences(("one", "other"), configurations, outcomes, changed)))
    assert len(found) == 2
    assert found[0].startswith("configuration 0, rank 1, round 0, dispatch: ids of one and other: only the first has")
    assert found[1].startswith(
        f"configuration {combining.seed}, rank 0, round 0, combine 0: combined rows of one and other: byte 0 is"
    )
    assert found[1].endswith("2 bits differ in all")
    assert differing_bits(b"\x01\x02", b"\x03") == 9
    _, line = report(("one", "other"), configurations, (outcomes, changed), expected)
    assert line.startswith("one against other: 2 configurations, 2 ranks") and line.endswith("4 differences")


def test_ways_are_written_like_this():
    assert Way.parse("v2:hip:host") == Way("v2", "hip", "host") and str(Way.parse("v1:hip:cuda")) == "v1:hip:cuda"
    for wrong in ("v2:hip", "v3:hip:host", "v2:hip:tpu", "v1:flydsl:host"):
        with pytest.raises(ValueError, match=wrong):
            Way.parse(wrong)


def test_the_command_line(capsys: pytest.CaptureFixture):
    assert command_line.main(["v1:hip:host", "v2:hip:host", "--configurations", "2", "--first", "7"]) == 0
    assert "v1:hip:host against v2:hip:host: 2 configurations, 2 ranks" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        command_line.main(["v1", "v2:hip:host"])


@pytest.mark.parametrize(
    "arguments, says",
    [
        ("v1:hip:host v2:hip:host --configurations 0", "--configurations is 0: play at least 1"),
        ("v1:hip:host v2:hip:host --world-size 0", "--world-size is 0: it must be in 1..64"),
        ("v1:hip:host v2:hip:host --world-size 9999", "--world-size is 9999: it must be in 1..64"),
        ("v1:hip:host v2:flydsl:host", "v2:flydsl:host: use a backend of v2 that loads here: hip"),
        ("v1:hip:cuda v2:hip:host", "v1:hip:cuda: torch sees no GPU here"),
    ],
)
def test_what_cannot_be_played_is_said_before_ranks_start(
    arguments: str, says: str, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(SystemExit) as ended:
        command_line.main(arguments.split())
    assert ended.value.code == 2
    assert says in capsys.readouterr().err


def test_a_rank_that_fails_says_why():
    with pytest.raises(RuntimeError, match="unknown kernel backend 'triton'"):
        play_all(Way("v2", "triton", "host"), [draw(0, 2)])
