"""What moves values between registers and lanes without computing."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.amd.sim.errors import Refused, Unknown
from tests.amd.sim.operands import (
    Kind,
    Type,
    known_bits,
    known_bits_destination,
    lane_mask_source,
    parse_operand,
    scalar_source,
    vector_source,
    vgpr_of,
)
from tests.amd.sim.program import Instruction
from tests.amd.sim.sdwa import SDWA_MODIFIERS
from tests.amd.sim.table import Execute, Target, allow_modifiers, operands, semantics
from tests.amd.sim.vector import Steps, Words, commitment, pass_taint, register_steps, source
from tests.amd.sim.wave import UNDEFINED, Wave, lanes_of


def _kind(text: str, words: int) -> Type:
    """Negative or absolute operands are floats."""
    operand = parse_operand(text)
    if operand.negative or operand.absolute:
        return Type.F32 if words == 1 else Type.F64
    return Type.U32 if words == 1 else Type.U64


def _bind_move(instruction: Instruction, target: Target) -> Steps:
    allow_modifiers(instruction, *(instruction.modifiers if instruction.form not in ("", "e32", "e64") else ()))
    destination, text = operands(instruction, 2)
    words = 2 if instruction.mnemonic.endswith("64") else 1
    read = source(instruction, text, "u32" if words == 1 else "u64", 0)
    return Steps(read, commitment(instruction, destination, _kind(destination, words), Words.APART))


register_steps("v_mov_b32 v_mov_b64", _bind_move)


def _bind_select(instruction: Instruction, target: Target) -> Steps:
    """The second source where the mask has a bit, else the first; the mask may be left out, it is VCC then."""
    allow_modifiers(instruction, *(SDWA_MODIFIERS if instruction.form == "sdwa" else ()))
    destination, *texts = instruction.operands
    mask = lane_mask_source(texts.pop() if len(texts) == 3 else "vcc" if target.lanes == 64 else "vcc_lo")
    kind = Type.F32 if Type.F32 in [_kind(text, 1) for text in texts] else Type.U32
    first, second = (source(instruction, text, kind.label, i) for i, text in enumerate(texts))

    def evaluate(wave: Wave) -> Any:
        """Only the lanes that are chosen from a source matter."""
        chosen, unknown = mask(wave)
        zero, (tainted_zero, _) = first(wave), wave.take_taint()
        one, (tainted_one, _) = second(wave), wave.take_taint()
        wave.tainted_low = tainted_zero & ~chosen | tainted_one & chosen | unknown & wave.exec
        return np.where(lanes_of(chosen, wave.lanes), one, zero)

    return Steps(evaluate, commitment(instruction, destination, kind))


register_steps("v_cndmask_b32", _bind_select)


@semantics("v_swap_b32")
def swap(instruction: Instruction, target: Target) -> Execute:
    allow_modifiers(instruction)
    one, other = operands(instruction, 2)
    return _moves_together([(one, other), (other, one)])


@semantics("v_pk_mov_b32")
def packed_move(instruction: Instruction, target: Target) -> Execute:
    """The low word from one half of the first source, the high word from one half of the second."""
    allow_modifiers(instruction, "op_sel", "op_sel_hi")
    destination, *texts = operands(instruction, 3)
    choice = [int(digit) for digit in instruction.modifiers.get("op_sel", "[0,1]").strip("[]").split(",")]
    start = vgpr_of(destination, 2)
    words = []
    for text, high in zip(texts, choice, strict=True):
        operand = parse_operand(text)
        if operand.kind not in (Kind.VGPR, Kind.SGPR):
            raise Unknown(f"constant in {instruction.text}")
        words.append(f"{'v' if operand.kind is Kind.VGPR else 's'}{operand.index + high}")
    return _moves_together([(f"v{start + i}", word) for i, word in enumerate(words)])


def _moves_together(pairs: list[tuple[str, str]]) -> Execute:
    """Destinations and sources; all are read before any is written."""
    reads = [vector_source(text, Type.U32) for _, text in pairs]
    registers = [vgpr_of(destination, 1) for destination, _ in pairs]

    def execute(wave: Wave) -> None:
        values = [(np.array(read(wave)), wave.take_taint()) for read in reads]
        for register, (value, taint) in zip(registers, values, strict=True):
            wave.write_vgpr(register, value, wave.exec)
            wave.tainted_low, wave.tainted_high = taint
            pass_taint(wave, register, Type.U32, wave.exec)

    return execute


# Between a lane and a scalar register. These look at lanes whether they are switched on or not.


def _lane_word(wave: Wave, register: int, lane: int) -> tuple[int, int]:
    if not wave.blocked[register] >> lane & 1:
        return int(wave.vgpr[lane, register]), 0
    if register in wave.awaited:
        raise Refused(wave.missing(register, 1 << lane))
    return UNDEFINED


@semantics("v_readlane_b32")
def read_lane(instruction: Instruction, target: Target) -> Execute:
    destination, text, lane = operands(instruction, 3)
    write, register, which = known_bits_destination(destination), vgpr_of(text, 1), scalar_source(lane)
    return lambda wave: write(wave, *_lane_word(wave, register, which(wave) % wave.lanes))


@semantics("v_readfirstlane_b32")
def read_first_lane(instruction: Instruction, target: Target) -> Execute:
    destination, text = operands(instruction, 2)
    write, register = known_bits_destination(destination), vgpr_of(text, 1)

    def execute(wave: Wave) -> None:
        lane = (wave.exec & -wave.exec).bit_length() - 1 if wave.exec else 0
        write(wave, *_lane_word(wave, register, lane))

    return execute


@semantics("v_writelane_b32")
def write_lane(instruction: Instruction, target: Target) -> Execute:
    """A word with undefined bits becomes an undefined lane."""
    destination, text, lane = operands(instruction, 3)
    register, read, which = vgpr_of(destination, 1), known_bits(text), scalar_source(lane)

    def execute(wave: Wave) -> None:
        (word, unknown), place = read(wave), which(wave) % wave.lanes
        wave.begin_write(register, 1, 1 << place)
        wave.vgpr[place, register] = word
        if unknown:
            wave.blocked[register] |= 1 << place

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
