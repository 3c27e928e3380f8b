"""The one table of semantics: mnemonic -> a function that binds an instruction's operands, giving what executes it.

Binding happens once per instruction of a program; the function that comes out runs every time the instruction does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from tests.amd.sim.errors import Unknown
from tests.amd.sim.program import Instruction
from tests.amd.sim.wave import Wave

Execute = Callable[[Wave], None]


class Target(NamedTuple):
    """What an instruction's meaning depends on beside its text."""

    arch: str
    lanes: int

    @property
    def is_gfx9(self) -> bool:
        return self.arch.startswith("gfx9")


Bind = Callable[[Instruction, Target], Execute]
TABLE: dict[str, Bind] = {}


def semantics(*mnemonics: str) -> Callable[[Bind], Bind]:
    def register(bind: Bind) -> Bind:
        for mnemonic in mnemonics:
            if mnemonic in TABLE:
                raise ValueError(f"{mnemonic} is in the table twice")
            TABLE[mnemonic] = bind
        return bind

    return register


def bind(instruction: Instruction, target: Target) -> Execute:
    """What executes the instruction. Unknown if the tables do not say."""
    if instruction.mnemonic not in TABLE:
        raise Unknown(f"no semantics for {instruction.mnemonic}")
    return TABLE[instruction.mnemonic](instruction, target)


def allow_modifiers(instruction: Instruction, *known: str) -> None:
    """Modifiers change what an instruction does, so one that its semantics do not mention is refused."""
    if strange := sorted(instruction.modifiers.keys() - set(known)):
        raise Unknown(f"modifier {strange[0]} of {instruction.mnemonic}")


def operands(instruction: Instruction, count: int) -> tuple[str, ...]:
    if len(instruction.operands) != count:
        raise Unknown(f"{instruction.mnemonic} with {len(instruction.operands)} operands, not {count}")
    return instruction.operands
