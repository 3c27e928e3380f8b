"""What moves values between registers and lanes without computing: undefined lanes are passed on, not refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tests.amd.sim.errors import Refused, Unknown
from tests.amd.sim.operands import (
    Kind,
    Type,
    lane_mask_source,
    parse_operand,
    scalar_source,
    scalar_words,
    scalar_words_destination,
    vector_source,
    vgpr_of,
)
from tests.amd.sim.program import Instruction
from tests.amd.sim.table import Execute, Target, allow_modifiers, operands, semantics
from tests.amd.sim.vector import Moved, Steps, commitment, register_steps, source
from tests.amd.sim.wave import UNDEFINED, WORD, Wave, lanes_of

Read = Callable[[Wave], Moved]


def moved_source(text: str, words: int = 1) -> Read:
    """A register as it is, with its undefined lanes; or a constant."""
    operand = parse_operand(text)
    if operand.negative or operand.absolute:
        read_float = vector_source(text, Type.F32)
        return lambda wave: Moved(np.asarray(read_float(wave)).view(np.uint32), 0)
    if operand.kind is not Kind.VGPR:
        read = vector_source(text, Type.U32 if words == 1 else Type.U64)
        return lambda wave: Moved(read(wave), 0)
    index = vgpr_of(text, words)
    kind = np.uint32 if words == 1 else np.uint64

    def from_register(wave: Wave) -> Moved:
        undefined = 0
        for register in range(index, index + words):
            undefined |= wave.blocked[register] & wave.exec
            if undefined and register in wave.awaited:
                raise Refused(wave.missing(register, undefined))
        return Moved(wave.vgpr[:, index : index + words].view(kind)[:, 0], undefined)

    return from_register


def moved_destination(text: str, words: int = 1) -> Callable[[Wave, Moved], None]:
    index = vgpr_of(text, words)

    def write(wave: Wave, moved: Moved) -> None:
        if words == 1:
            wave.write_vgpr(index, moved.value, wave.exec)
        else:
            wave.write_vgpr_pair(index, moved.value, wave.exec)
        for register in range(index, index + words) if moved.undefined else ():
            wave.blocked[register] |= moved.undefined

    return write


def _bind_move(instruction: Instruction, target: Target) -> Steps:
    destination, text = operands(instruction, 2)
    if instruction.form not in ("", "e32", "e64"):  # lanes or parts: what is undefined is refused
        return Steps(source(instruction, text, "u32", 0), commitment(instruction, destination, Type.U32))
    allow_modifiers(instruction)
    words = 2 if instruction.mnemonic.endswith("64") else 1
    return Steps(moved_source(text, words), moved_destination(destination, words))


register_steps("v_mov_b32 v_mov_b64", _bind_move)


def _bind_select(instruction: Instruction, target: Target) -> Steps:
    """The second source where the mask has a bit, else the first; the mask may be left out, it is VCC then."""
    destination, *texts = instruction.operands
    mask_text = texts.pop() if len(texts) == 3 else ("vcc" if target.lanes == 64 else "vcc_lo")
    mask = lane_mask_source(mask_text)
    if instruction.form == "sdwa":
        return _select_parts(instruction, destination, texts, mask)
    allow_modifiers(instruction)
    first, second = (moved_source(text) for text in texts)

    def evaluate(wave: Wave) -> Moved:
        chosen = mask(wave)
        zero, one = first(wave), second(wave)
        value = np.where(lanes_of(chosen & wave.everyone, wave.lanes), one.value, zero.value)
        return Moved(value, zero.undefined & ~chosen | one.undefined & chosen)

    return Steps(evaluate, moved_destination(destination))


def _select_parts(instruction: Instruction, destination: str, texts: list[str], mask: Any) -> Steps:
    first, second = (source(instruction, text, "u32", i) for i, text in enumerate(texts))

    def evaluate(wave: Wave) -> Any:
        return np.where(lanes_of(mask(wave) & wave.everyone, wave.lanes), second(wave), first(wave))

    return Steps(evaluate, commitment(instruction, destination, Type.U32))


register_steps("v_cndmask_b32", _bind_select)


@semantics("v_swap_b32")
def swap(instruction: Instruction, target: Target) -> Execute:
    allow_modifiers(instruction)
    one, other = operands(instruction, 2)
    reads, writes = (moved_source(one), moved_source(other)), (moved_destination(one), moved_destination(other))

    def execute(wave: Wave) -> None:
        first, second = (Moved(moved.value.copy(), moved.undefined) for moved in (read(wave) for read in reads))
        writes[0](wave, second)
        writes[1](wave, first)

    return execute


@semantics("v_pk_mov_b32")
def packed_move(instruction: Instruction, target: Target) -> Execute:
    """The low word from one half of the first source, the high word from one half of the second."""
    allow_modifiers(instruction, "op_sel", "op_sel_hi")
    destination, *texts = operands(instruction, 3)
    choice = [int(digit) for digit in instruction.modifiers.get("op_sel", "[0,1]").strip("[]").split(",")]
    registers = []
    for text, high in zip(texts, choice, strict=True):
        operand = parse_operand(text)
        letter = "v" if operand.kind is Kind.VGPR else "s"
        registers.append(moved_source(f"{letter}{operand.index + high}"))
    start = vgpr_of(destination, 2)
    writes = [moved_destination(f"v{start + i}") for i in range(2)]

    def execute(wave: Wave) -> None:
        values = [Moved(np.array(moved.value), moved.undefined) for moved in (read(wave) for read in registers)]
        for write, value in zip(writes, values, strict=True):
            write(wave, value)

    return execute


# Between a lane and a scalar register. These look at lanes whether they are switched on or not.


def _lane_word(wave: Wave, register: int, lane: int) -> Any:
    if wave.blocked[register] >> lane & 1:
        if register in wave.awaited:
            raise Refused(wave.missing(register, 1 << lane))
        return UNDEFINED
    return int(wave.vgpr[lane, register])


@semantics("v_readlane_b32")
def read_lane(instruction: Instruction, target: Target) -> Execute:
    destination, text, lane = operands(instruction, 3)
    write, register, which = scalar_words_destination(destination), vgpr_of(text, 1), scalar_source(lane)
    return lambda wave: write(wave, [_lane_word(wave, register, which(wave) % wave.lanes)])


@semantics("v_readfirstlane_b32")
def read_first_lane(instruction: Instruction, target: Target) -> Execute:
    destination, text = operands(instruction, 2)
    write, register = scalar_words_destination(destination), vgpr_of(text, 1)

    def execute(wave: Wave) -> None:
        lane = (wave.exec & -wave.exec).bit_length() - 1 if wave.exec else 0
        write(wave, [_lane_word(wave, register, lane)])

    return execute


@semantics("v_writelane_b32")
def write_lane(instruction: Instruction, target: Target) -> Execute:
    destination, text, lane = operands(instruction, 3)
    register, read, which = vgpr_of(destination, 1), scalar_words(text), scalar_source(lane)

    def execute(wave: Wave) -> None:
        (word,), place = read(wave), which(wave) % wave.lanes
        wave.begin_write(register, 1, 1 << place)
        if word is UNDEFINED:
            wave.blocked[register] |= 1 << place
        else:
            wave.vgpr[place, register] = word & WORD

    return execute


@semantics("v_permlane32_swap_b32", "v_permlane16_swap_b32")
def swap_rows(instruction: Instruction, target: Target) -> Execute:
    """Exchanges the odd rows (of 16 or 32 lanes) of the first register with the even rows of the second."""
    allow_modifiers(instruction)
    one, other = (vgpr_of(text, 1) for text in operands(instruction, 2))
    size = 32 if "32_swap" in instruction.mnemonic else 16

    def execute(wave: Wave) -> None:
        for register in (one, other):
            wave.check(register, 1, wave.everyone)
        even = np.flatnonzero(np.arange(wave.lanes) // size % 2 == 0)
        kept = wave.vgpr[even + size, one].copy()
        wave.vgpr[even + size, one] = wave.vgpr[even, other]
        wave.vgpr[even, other] = kept

    return execute


@semantics("v_permlanex16_b32", "v_permlane16_b32")
def permute_rows(instruction: Instruction, target: Target) -> Execute:
    """Each lane takes the lane of its row, or of the other row of the pair, that four bits of the two words name."""
    destination, text, low, high = operands(instruction, 4)
    allow_modifiers(instruction, "op_sel")
    register, read = vgpr_of(destination, 1), vgpr_of(text, 1)
    words, crosses = [scalar_source(low), scalar_source(high)], "x16" in instruction.mnemonic
    inactive_too = instruction.modifiers.get("op_sel", "[0,0]").startswith("[1")

    def execute(wave: Wave) -> None:
        selectors = words[0](wave) | words[1](wave) << 32
        lane = np.arange(wave.lanes)
        place = np.array([selectors >> 4 * i & 15 for i in range(16)])[lane % 16]
        from_lane = (lane // 16 ^ crosses) * 16 + place
        if not inactive_too and not wave.active[from_lane[wave.active]].all():
            raise Unknown("v_permlane16 from lanes that are switched off")
        for taken in from_lane[wave.active].tolist():
            wave.check(read, 1, 1 << taken)
        wave.write_vgpr(register, wave.vgpr[from_lane, read], wave.exec)

    return execute
