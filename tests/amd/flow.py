"""Where control may go inside a kernel: successors of instructions, what is reached from where, innermost loops."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import TypeVar

from tests.amd.sim.program import Program

State = TypeVar("State", bound=Hashable)


class Flow:
    """Instructions are named by their index in the program."""

    def __init__(self, program: Program) -> None:
        self.instructions = program.instructions
        self.successors = [list(self._successors(program, index)) for index in range(len(self.instructions))]

    def _successors(self, program: Program, index: int) -> Iterator[int]:
        one = self.instructions[index]
        if one.mnemonic.startswith(("s_setpc", "s_swappc", "s_call")):
            raise ValueError(f"{one.text}: kernels are expected to have no calls")
        if one.target:
            yield program.index_of[one.target]
        if one.mnemonic not in ("s_branch", "s_endpgm") and one.next_address in program.index_of:
            yield program.index_of[one.next_address]

    def walk(self, start: int, state: State, step: Callable[[int, State], State | None]) -> None:
        """Follows all ways from behind `start`. `step(index, state)` gives the state behind an instruction, None to go
        no further; it is called once for each pair."""
        pending, seen = [(index, state) for index in self.successors[start]], set[tuple[int, State]]()
        while pending:
            here = pending.pop()
            if here in seen:
                continue
            seen.add(here)
            behind = step(*here)
            if behind is not None:
                pending += [(index, behind) for index in self.successors[here[0]]]

    def innermost_loop(self, index: int) -> set[int]:
        """The smallest loop around an instruction; empty if there is none. Takes the loops' entries away one by one."""
        nodes, loop = set(range(len(self.instructions))), set[int]()
        while component := self._component_of(index, nodes):
            loop = component
            outside = (source for source in nodes - component for target in self.successors[source])
            entries = {target for source in set(outside) for target in self.successors[source]} & component
            nodes = component - (entries or {min(component)})
        return loop

    def _component_of(self, index: int, nodes: set[int]) -> set[int]:
        """The strongly connected component of `index` among `nodes`; empty if it cannot come back to itself."""
        if index not in nodes:
            return set()
        predecessors: dict[int, list[int]] = {node: [] for node in nodes}
        for source in nodes:
            for target in self.successors[source]:
                if target in nodes:
                    predecessors[target].append(source)
        forward = _reached(index, lambda node: (target for target in self.successors[node] if target in nodes))
        return forward & _reached(index, lambda node: predecessors[node])


def _reached(start: int, following: Callable[[int], Iterable[int]]) -> set[int]:
    """In one step or more."""
    pending, seen = list(following(start)), set[int]()
    while pending:
        node = pending.pop()
        if node not in seen:
            seen.add(node)
            pending += following(node)
    return seen
