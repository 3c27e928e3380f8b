"""Where two outcomes differ."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from .configuration import Configuration, draw
from .play import Outcome

Played = list[list[Outcome]]
"""By configuration and rank."""


class Difference(NamedTuple):
    configuration: Configuration
    rank: int
    what: tuple[str, int, int]
    ways: tuple[str, str]
    text: str

    def __str__(self) -> str:
        name, number, combine = self.what
        when = "dispatch" if combine < 0 else f"combine {combine}"
        return (
            f"configuration {self.configuration.seed}, rank {self.rank}, round {number}, {when}: {name} of "
            f"{self.ways[0]} and {self.ways[1]}: {self.text}"
        )


def differing_bits(left: bytes, right: bytes) -> int:
    """Of two byte strings; those that only one of them has all count."""
    shared = min(len(left), len(right))
    bits = (int.from_bytes(left[:shared], "little") ^ int.from_bytes(right[:shared], "little")).bit_count()
    return bits + 8 * (max(len(left), len(right)) - shared)


def differences(ways: tuple[str, str], configurations: list[Configuration], *played: Played) -> Iterator[Difference]:
    """Of two ways that played the same configurations."""
    left_played, right_played = played
    for configuration, left_ranks, right_ranks in zip(configurations, left_played, right_played, strict=True):
        for rank, (left, right) in enumerate(zip(left_ranks, right_ranks, strict=True)):
            for what in sorted(left.keys() | right.keys(), key=lambda key: (key[1:], key[0])):
                if left.get(what) != right.get(what):
                    yield Difference(configuration, rank, what, ways, _spell(left.get(what), right.get(what)))


def _spell(left: bytes | None, right: bytes | None) -> str:
    if left is None or right is None:
        return f"only {'the second' if left is None else 'the first'} has any"
    if len(left) != len(right):
        return f"{len(left)} and {len(right)} bytes"
    at = next(index for index, (one, other) in enumerate(zip(left, right, strict=True)) if one != other)
    return f"byte {at} is 0x{left[at]:02x} and 0x{right[at]:02x}, {differing_bits(left, right)} bits differ in all"


def drawn(first: int, count: int, world_size: int) -> list[Configuration]:
    return [draw(seed, world_size) for seed in range(first, first + count)]


def report(
    ways: tuple[str, str],
    configurations: list[Configuration],
    played: tuple[Played, Played],
    reference: Callable[[Configuration, int], Outcome],
) -> tuple[list[Difference], str]:
    """Differences between the two and from the reference, and what they come to in one line."""
    ranks = range(configurations[0].world_size)
    expected = [[reference(configuration, rank) for rank in ranks] for configuration in configurations]
    found = list(differences(ways, configurations, *played))
    for way, outcomes in zip(ways, played, strict=True):
        found += differences((way, "reference"), configurations, outcomes, expected)
    compared = sum(len(value) for configuration in played[0] for outcome in configuration for value in outcome.values())
    line = (
        f"{ways[0]} against {ways[1]}: {len(configurations)} configurations, {len(ranks)} ranks, "
        f"{compared / 1e6:.1f} MB of results each, {len(found)} differences"
    )
    return found, line
