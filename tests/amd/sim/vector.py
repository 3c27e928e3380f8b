"""How a row of the table becomes a vector instruction: sources in, a function over all lanes, a destination out.

The two steps, `evaluate` and `commit`, are apart so that both halves of a dual instruction read before either writes.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any, NamedTuple

import numpy as np

from tests.amd.sim.errors import Unknown
from tests.amd.sim.lanes import dpp_lanes, dpp_source, is_dpp
from tests.amd.sim.operands import Read, Type, vector_source, vgpr_of
from tests.amd.sim.program import Instruction
from tests.amd.sim.sdwa import SDWA_MODIFIERS, sdwa_destination, sdwa_source
from tests.amd.sim.table import Execute, Target, allow_modifiers, operands, semantics
from tests.amd.sim.wave import Wave

Function = Callable[..., Any]


class Steps(NamedTuple):
    evaluate: Callable[[Wave], Any]
    commit: Callable[[Wave, Any], None]


class Words(Enum):
    """Which words of the sources a result of two words depends on."""

    APART = 0
    """Each on the same word."""
    UPWARDS = 1
    """The low word on low words, the high word on all: sums and products."""
    MIXED = 2


BindSteps = Callable[[Instruction, Target], Steps]
STEPS: dict[str, BindSteps] = {}
TYPES = {kind.label: kind for kind in Type}


def register_steps(names: str, bind_steps: BindSteps) -> None:
    def bind(instruction: Instruction, target: Target) -> Execute:
        evaluate, commit = bind_steps(instruction, target)
        return lambda wave: commit(wave, evaluate(wave))

    for name in names.split():
        STEPS[name] = bind_steps
        dual = f"v_dual_{name.removeprefix('v_')}"
        semantics(name)(bind)
        semantics(dual)(_bind_dual)


def _bind_dual(instruction: Instruction, target: Target) -> Execute:
    if instruction.second is None:
        raise Unknown(f"{instruction.mnemonic} on its own")
    halves = []
    for half in (instruction, instruction.second):
        name = f"v_{half.mnemonic.removeprefix('v_dual_')}"
        if name not in STEPS:
            raise Unknown(f"no semantics for {half.mnemonic}")
        halves.append(STEPS[name](half, target))
    first, second = halves

    def execute(wave: Wave) -> None:
        # Copies, for the first commit may change what the second is a view of.
        one, taint = np.array(first.evaluate(wave)), wave.take_taint()
        other, other_taint = np.array(second.evaluate(wave)), wave.take_taint()
        wave.tainted_low, wave.tainted_high = taint
        first.commit(wave, one)
        wave.tainted_low, wave.tainted_high = other_taint
        second.commit(wave, other)

    return execute


def vector(names: str, result: str, sources: str, function: Function, words: Words = Words.UPWARDS) -> None:
    """A row for every name. Types are those of `Type`; `self` among the sources is the destination's old value."""
    kinds = sources.split()

    def bind_steps(instruction: Instruction, target: Target) -> Steps:
        allow_modifiers(instruction, *_modifiers_of(instruction))
        destination, *texts = operands(instruction, len(kinds) + 1 - kinds.count("self"))
        reads = [
            vector_source(destination, TYPES[result]) if kind == "self" else source(instruction, texts.pop(0), kind, i)
            for i, kind in enumerate(kinds)
        ]
        return Steps(_evaluation(function, reads), commitment(instruction, destination, TYPES[result], words))

    register_steps(names, bind_steps)


def _modifiers_of(instruction: Instruction) -> tuple[str, ...]:
    if instruction.form == "sdwa":
        return SDWA_MODIFIERS
    if is_dpp(instruction):
        return tuple(instruction.modifiers)
    return ("clamp",) if instruction.mnemonic.endswith("_f32") else ()


def source(instruction: Instruction, text: str, kind: str, position: int) -> Read:
    """One of the sources, with what SDWA and DPP do to it."""
    if instruction.form == "sdwa":
        return sdwa_source(instruction, text, TYPES[kind], position)
    read = vector_source(text, TYPES[kind])
    return dpp_source(instruction, text, TYPES[kind]) if position == 0 and is_dpp(instruction) else read


def _evaluation(function: Function, reads: list[Read]) -> Callable[[Wave], Any]:
    if len(reads) == 1:
        (one,) = reads
        return lambda wave: function(one(wave))
    if len(reads) == 2:
        one, two = reads
        return lambda wave: function(one(wave), two(wave))
    return lambda wave: function(*[read(wave) for read in reads])


def commitment(
    instruction: Instruction, destination: str, kind: Type, words: Words = Words.UPWARDS
) -> Callable[[Wave, Any], None]:
    """Writes a result to the lanes that are switched on, or those of them that DPP leaves."""
    register = vgpr_of(destination, kind.words)
    lanes = dpp_lanes(instruction) if is_dpp(instruction) else None
    clamps = "clamp" in instruction.modifiers
    bits = None if kind in (Type.U32, Type.U64) else (np.uint32 if kind.words == 1 else np.uint64)
    if instruction.form == "sdwa":
        if kind.words != 1:
            raise Unknown(f"{instruction.text}")
        return sdwa_destination(instruction, register, kind)

    def commit(wave: Wave, value: Any) -> None:
        if clamps:
            value = np.clip(value, kind.dtype(0), kind.dtype(1))
        if bits is not None:
            value = np.asarray(value, kind.dtype).view(bits)
        mask = wave.exec if lanes is None else lanes(wave)
        if kind.words == 1:
            wave.write_vgpr(register, value, mask)
        else:
            wave.write_vgpr_pair(register, value, mask)
        if wave.tainted_low or wave.tainted_high:
            pass_taint(wave, register, kind, mask, words)

    return commit


def pass_taint(wave: Wave, register: int, kind: Type, mask: int, words: Words = Words.UPWARDS) -> None:
    """What was computed from undefined lanes is undefined."""
    low, high = wave.take_taint()
    if kind.words == 1:
        wave.blocked[register] |= (low | high) & mask
        return
    wave.blocked[register] |= (low | high if words is Words.MIXED else low) & mask
    wave.blocked[register + 1] |= (high if words is Words.APART else low | high) & mask
