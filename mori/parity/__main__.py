"""The command line of mori.parity."""

from __future__ import annotations

import argparse

from .compare import drawn, report
from .plain import expected
from .ranks import Way, play_all

_SHOWN = 10
_MOST_RANKS = 64


def main(arguments: list[str] | None = None) -> int:
    """0 if all results are equal, bit for bit."""
    parser = argparse.ArgumentParser(prog="python -m mori.parity", description="Whether two ways give the same bits.")
    parser.add_argument("left", help="for example v1:hip:host")
    parser.add_argument("right", help="for example v2:hip:host")
    parser.add_argument("--configurations", type=int, default=50)
    parser.add_argument("--first", type=int, default=0, help="number of the first configuration")
    parser.add_argument("--world-size", type=int, default=2)
    chosen = parser.parse_args(arguments)
    try:
        ways = Way.parse(chosen.left), Way.parse(chosen.right)
        for way in ways:
            way.require_here()
    except ValueError as problem:
        parser.error(str(problem))
    if chosen.configurations < 1:
        parser.error(f"--configurations is {chosen.configurations}: play at least 1")
    if not 1 <= chosen.world_size <= _MOST_RANKS:
        parser.error(f"--world-size is {chosen.world_size}: it must be in 1..{_MOST_RANKS}, each rank is a process")
    configurations = drawn(chosen.first, chosen.configurations, chosen.world_size)
    played = play_all(ways[0], configurations), play_all(ways[1], configurations)
    found, line = report((str(ways[0]), str(ways[1])), configurations, played, expected)
    for difference in found[:_SHOWN]:
        print(difference)
    print(line)
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(main())
