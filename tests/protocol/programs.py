"""The runs that are explored: every order of calls, both paths, empty ranks, faults, deaths; by name."""

from __future__ import annotations

from .program import Matrix, Program

ALL: Matrix = ((1, 1), (1, 1))
SENDS_NOTHING: Matrix = ((0, 0), (1, 1))  # rank 0
RECEIVES_NOTHING: Matrix = ((1, 0), (1, 0))  # rank 1
CROSSED: Matrix = ((0, 1), (1, 0))
NOTHING: Matrix = ((0, 0), (0, 0))
ALL_3: Matrix = ((1, 1, 1), (1, 1, 1), (1, 1, 1))
RING: Matrix = ((0, 1, 0), (0, 0, 1), (1, 0, 0))
UNEVEN: Matrix = ((0, 0, 0), (1, 0, 1), (1, 0, 1))


def staged(*paths: str) -> frozenset[tuple[int, int]]:
    """One word per rank, one letter per call: S where the rank takes the staged path."""
    return frozenset(
        (index, rank) for rank, path in enumerate(paths) for index, letter in enumerate(path) if letter == "S"
    )


ORDERS = ("D", "DX", "DZ", "DD", "DXX", "DZZ", "DZX", "DXZ", "XD", "ZDZ", "XXD", "DXXX", "DZXDZX", "DXXDXX")
TWO_RANKS = (
    *(Program(calls, calls) for calls in ORDERS),
    Program("DDD, 1 block at times", "DDD", one_block=frozenset({(0, 1), (1, 0), (2, 1)})),
    Program("DXX, 2 stagers", "DXX", stagers=2),
    Program("DXDX, 2 stagers", "DXDX", stagers=2, rows=(CROSSED, ALL)),
    Program("DXX, rank 0 sends nothing", "DXX", rows=(SENDS_NOTHING,)),
    Program("DX, rank 1 receives nothing", "DX", rows=(RECEIVES_NOTHING,)),
    Program("DXXDX, rank 1 receives nothing at first", "DXXDX", rows=(RECEIVES_NOTHING, ALL)),
    Program("DZXDZ, rank 0 sends nothing at first", "DZXDZ", rows=(SENDS_NOTHING, CROSSED)),
    Program("DXDX, no rows at first", "DXDX", rows=(NOTHING, ALL)),
    Program("DDX, counts change", "DDX", rows=(ALL, SENDS_NOTHING)),
    Program("D split", "D", split=True),
    Program("DDX split", "DDX", split=True, blocks=1, rows=(CROSSED, ALL)),
    Program("DDD split", "DDD", split=True, blocks=1, rows=(CROSSED, ALL, SENDS_NOTHING)),
    Program("one resident block", "DXXDX", resident=(1, 1), stagers=2, rows=(CROSSED, ALL)),
    Program("DXX, no weights at rank 1", "DXX", no_weights=frozenset({(1, 1), (2, 0)})),
    Program("DZX, no weights", "DZX", no_weights=frozenset({(1, 0), (1, 1), (2, 1)})),
    Program("DZDZ, no weights", "DZDZ", no_weights=frozenset({(1, 0), (1, 1), (3, 0), (3, 1)})),
)
STAGED = (
    Program("S", "D", staged=staged("S", "S")),
    Program("S and D", "D", staged=staged("S", "D")),
    Program("SS", "DD", staged=staged("SS", "SS")),
    Program("SSS", "DDD", staged=staged("SSS", "SSS")),
    Program("SSS, 1 block", "DDD", blocks=1, staged=staged("SSS", "SSS")),
    Program("SSSS, 1 block", "DDDD", blocks=1, staged=staged("SSSS", "SSSS")),
    Program("SSS and SDS", "DDD", staged=staged("SSS", "SDS"), rows=(CROSSED, ALL)),
    Program("SDS and DSD", "DDD", staged=staged("SDS", "DSD")),
    Program("SXS", "DXD", staged=staged("SXS", "SXS")),
    Program("SXXS", "DXXD", staged=staged("SXXS", "SXXD")),
    Program("SXXSX", "DXXDX", staged=staged("SXXSX", "SXXSX"), blocks=1),
    Program("SZXS", "DZXD", staged=staged("SZXS", "DZXS")),
    Program("SXS, rank 0 sends nothing", "DXD", staged=staged("SXS", "SXS"), rows=(SENDS_NOTHING,)),
    Program("SSS, no rows in the second", "DDD", staged=staged("SSS", "SSS"), rows=(ALL, NOTHING, ALL)),
    Program("S split", "D", staged=staged("S", "S"), split=True),
    Program("SS and DS split", "DD", blocks=1, staged=staged("SS", "DS"), split=True, rows=(CROSSED, ALL)),
    Program("SS, 3 ranks", "DD", ranks=3, blocks=1, staged=staged("SS", "DS", "SS"), rows=(RING,)),
    Program("SSS, 3 ranks", "DDD", ranks=3, blocks=1, staged=staged("SSS", "SSS", "SSS"), rows=(UNEVEN,)),
    Program("SXS, 3 ranks", "DXD", ranks=3, blocks=1, staged=staged("SXS", "DXS", "SXD"), rows=(RING, UNEVEN)),
    Program("SSS, all rows of 3 ranks", "DDD", ranks=3, blocks=1, rows=(ALL_3,), staged=staged("SSS", "SDS", "DSS")),
    Program("SXXS, 3 ranks", "DXXD", ranks=3, blocks=1, rows=(ALL_3, UNEVEN), staged=staged("SXXS", "DXXS", "SXXD")),
    Program("one resident block, staged", "DD", resident=(1, 1), staged=staged("SS", "SS")),
    Program("one resident block, one rank staged", "DXD", resident=(1, 1), staged=staged("SXD", "DXS")),
    Program("one resident block at rank 0, staged", "DD", resident=(1, 2), staged=staged("SD", "SS")),
    Program("2 of 3 blocks resident, staged", "D", blocks=3, resident=(2, 2), staged=staged("S", "S")),
    Program("staged overflow", "DXD", capacity=1, staged=staged("SXS", "SXD"), rows=(RECEIVES_NOTHING, CROSSED)),
    Program("staged, row bytes differ", "DDD", staged=staged("SSS", "SSS"), wide_rows=frozenset({(0, 1)})),
)
THREE_RANKS = (
    *(
        Program(f"{calls}, 3 ranks", calls, ranks=3, blocks=1, rows=(ALL_3,))
        for calls in ("DX", "DD", "DXX", "XD", "DZX")
    ),
    Program("D, 3 ranks of 2 blocks", "D", ranks=3, rows=(RING,)),
    Program("DZXDX, 3 ranks, one resident block of 2", "DZXDX", ranks=3, resident=(1, 1, 1), rows=(RING, UNEVEN)),
    Program("DXDX, 3 uneven ranks", "DXDX", ranks=3, blocks=1, rows=(RING, UNEVEN)),
    Program("DDZX, 3 uneven ranks", "DDZX", ranks=3, blocks=1, rows=(UNEVEN, RING)),
)
FAULTS = (
    Program("overflow", "DXDX", capacity=1, rows=(RECEIVES_NOTHING, CROSSED)),
    Program("row bytes differ", "DXDX", wide_rows=frozenset({(0, 1)})),
    Program("row bytes differ, split", "D", split=True, wide_rows=frozenset({(0, 1)})),
    Program("row bytes differ in combine", "DXX", wide_rows=frozenset({(1, 0)})),
    Program("masked rank", "DXX", ranks=3, masked=frozenset({1}), rows=(ALL_3,)),
    Program("masked rank, staged", "DD", ranks=3, masked=frozenset({1}), rows=(ALL_3,), staged=staged("SS", "", "SD")),
)
DEATHS = (
    Program("rank 1 dies", "DXX", mortal=1),
    Program("rank 1 dies, zero copy", "DZXD", mortal=1, blocks=1),
    Program("rank 2 of 3 dies", "DXX", ranks=3, blocks=1, mortal=2, rows=(UNEVEN,)),
    Program("rank 0 of 3 dies between dispatches", "DD", ranks=3, blocks=1, mortal=0, rows=(RING,)),
    Program(
        "rank 2 of 3 dies, zero copy",
        "DZ",
        ranks=3,
        blocks=1,
        mortal=2,
        rows=(ALL_3,),
        no_weights=frozenset({(1, 0), (1, 1), (1, 2)}),
    ),
    Program("rank 1 dies, staged", "DD", mortal=1, staged=staged("SS", "SS")),
    Program("rank 1 dies, staged and direct", "DXD", mortal=1, staged=staged("DXS", "SXD")),
    Program("rank 2 of 3 dies, staged", "DDD", ranks=3, blocks=1, mortal=2, rows=(RING,), staged=staged(*["SSS"] * 3)),
)
OUT_OF_STEP = (
    Program("dispatch meets combine", "DX", other_calls={1: "DD"}, out_of_step=True),
    Program("staged dispatch meets combine", "DX", other_calls={1: "DD"}, staged=staged("SX", "SS"), out_of_step=True),
    Program("dispatch meets second combine", "DXX", other_calls={1: "DXD"}, out_of_step=True),
    Program("combine meets first dispatch", "X", other_calls={1: "D"}, out_of_step=True),
    Program("one of 3 ranks combines", "DD", ranks=3, blocks=1, other_calls={2: "DX"}, out_of_step=True, rows=(RING,)),
    Program("one of 3 ranks dispatches", "DXX", ranks=3, blocks=1, other_calls={0: "DXD"}, out_of_step=True),
    Program("call number off by two", "DX", call_offset=(0, 2), out_of_step=True),
)
# what callers are told not to do; the explorer must find out why
MISUSE = (Program("registered buffer refilled between two combines", "DZF"),)
# too many states for every change
FULL = (
    Program("DX, 3 ranks of 2 blocks", "DX", ranks=3, rows=(RING,)),
    Program("S, 3 ranks of 2 blocks", "D", ranks=3, rows=(RING,), staged=staged("S", "D", "S")),
)
CORRECT = (*TWO_RANKS, *STAGED, *THREE_RANKS, *FAULTS, *DEATHS, *OUT_OF_STEP)
BY_NAME = {program.name: program for program in CORRECT}
