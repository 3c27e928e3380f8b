"""The runs that are explored: every order of calls, empty ranks, faults; by name."""

from __future__ import annotations

from .program import Matrix, Program

ALL: Matrix = ((1, 1), (1, 1))
SENDS_NOTHING: Matrix = ((0, 0), (1, 1))  # rank 0
RECEIVES_NOTHING: Matrix = ((1, 0), (1, 0))  # rank 1
CROSSED: Matrix = ((0, 1), (1, 0))
ALL_3: Matrix = ((1, 1, 1), (1, 1, 1), (1, 1, 1))
RING: Matrix = ((0, 1, 0), (0, 0, 1), (1, 0, 0))
UNEVEN: Matrix = ((0, 0, 0), (1, 0, 1), (1, 0, 1))

TWO_RANKS = (
    *(
        Program(calls, calls)
        for calls in (
            "D",
            "DX",
            "DZ",
            "DD",
            "DDD",
            "DXX",
            "DZZ",
            "DZX",
            "DXZ",
            "DDXX",
            "DDZX",
            "XD",
            "ZDZ",
            "XXD",
            "DXXX",
            "DXDX",
            "DZDZ",
            "DXDD",
            "DXXDXX",
            "DZXDZX",
        )
    ),
    Program("DXX, rank 0 sends nothing", "DXX", rows=(SENDS_NOTHING,)),
    Program("DX, rank 1 receives nothing", "DX", rows=(RECEIVES_NOTHING,)),
    Program("DXXDX, rank 1 receives nothing at first", "DXXDX", rows=(RECEIVES_NOTHING, ALL)),
    Program("DZXDZ, rank 0 sends nothing at first", "DZXDZ", rows=(SENDS_NOTHING, CROSSED)),
    Program("DDX, counts change", "DDX", rows=(ALL, SENDS_NOTHING)),
    Program("DXDX, counts change", "DXDX", rows=(CROSSED, ALL)),
    Program("D split", "D", split_counts=True),
    Program("DDX split", "DDX", split_counts=True, rows=(CROSSED, ALL)),
    Program("DDD split", "DDD", split_counts=True, rows=(CROSSED, ALL, SENDS_NOTHING)),
    Program("one resident block", "DXXDX", one_resident=True),
    Program("DXX, no weights at rank 1", "DXX", no_weights=frozenset({(1, 1), (2, 0)})),
    Program("DZX, no weights", "DZX", no_weights=frozenset({(1, 0), (1, 1), (2, 1)})),
)
THREE_RANKS = (
    *(
        Program(f"{calls}, 3 ranks", calls, ranks=3, blocks=1, rows=(ALL_3,))
        for calls in ("DX", "DD", "DXX", "XD", "DZX")
    ),
    Program("DX, 3 ranks of 2 blocks", "DX", ranks=3, rows=(RING,)),
    Program("DD, 3 ranks of 2 blocks", "DD", ranks=3, rows=(RING, UNEVEN)),
    Program("DZXDX, 3 ranks, one resident block of 2", "DZXDX", ranks=3, one_resident=True, rows=(RING, UNEVEN)),
    Program("DXDX, 3 uneven ranks", "DXDX", ranks=3, blocks=1, rows=(RING, UNEVEN)),
    Program("DDZX, 3 uneven ranks", "DDZX", ranks=3, blocks=1, rows=(UNEVEN, RING)),
)
FAULTS = (
    Program("overflow", "DXDX", capacity=1, rows=(RECEIVES_NOTHING, CROSSED)),
    Program("row bytes differ", "DXDX", wide_rows=frozenset({(0, 1)})),
    Program("faulted dispatch sends no rows words", "DDX", wide_rows=frozenset({(0, 1)}), fault_skips_rows=True),
    Program("row bytes differ in combine", "DXX", wide_rows=frozenset({(1, 0)})),
    Program("stated fault", "DXD", bad_ids=frozenset({(0, 1)})),
    Program("stated fault in combine", "DXX", bad_ids=frozenset({(2, 0)})),
    Program("masked rank", "DXX", ranks=3, masked=frozenset({1}), rows=(ALL_3,)),
    Program("rank 1 dies", "DXX", mortal=1, blocks=2),
    Program("rank 1 dies, zero copy", "DZXD", mortal=1, blocks=1),
    Program("rank 2 of 3 dies", "DXX", ranks=3, blocks=1, mortal=2, rows=(UNEVEN,)),
    Program("rank 0 of 3 dies between dispatches", "DD", ranks=3, blocks=1, mortal=0, rows=(RING,)),
)
OUT_OF_STEP = (
    Program("dispatch meets combine", "DX", other_calls={1: "DD"}, out_of_step=True),
    Program("dispatch meets second combine", "DXX", other_calls={1: "DXD"}, out_of_step=True),
    Program("combine meets first dispatch", "X", other_calls={1: "D"}, out_of_step=True),
    Program("one of 3 ranks combines", "DD", ranks=3, blocks=1, other_calls={2: "DX"}, out_of_step=True, rows=(RING,)),
    Program("one of 3 ranks dispatches", "DXX", ranks=3, blocks=1, other_calls={0: "DXD"}, out_of_step=True),
    Program("call number off by two", "DX", call_offset=(0, 2), out_of_step=True),
)
# what callers are told not to do; the explorer must find out why
MISUSE = (Program("registered buffer refilled between two combines", "DZF"),)
CORRECT = (*TWO_RANKS, *THREE_RANKS, *FAULTS, *OUT_OF_STEP)
BY_NAME = {program.name: program for program in CORRECT}
