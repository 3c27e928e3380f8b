"""Which scalar loads read a kernel's arguments: follows the pointer to them through registers, additions and spills.

Scalar registers are spilled to lanes of vector registers, never to memory.
"""

from __future__ import annotations

import re

from tests.amd.flow import Flow
from tests.amd.sim.program import Instruction, Program

# Where a half of the pointer, or of the pointer plus a constant, is: the place's name, and which half.
Known = frozenset[tuple[str, str]]
READ_ONLY = re.compile(
    r"s_(cmp|cbranch|bitcmp|nop|wait|barrier|set|endpgm|branch|sleep)|(global|ds|flat)_store|buffer_"
)
CONSTANT = re.compile(r"-?(0x)?[0-9a-f]+")


def scalar_loads_of_other_memory(program: Program, flow: Flow) -> set[int]:
    start = argument_register(program)
    at_entry: Known = frozenset({(f"s{start}", "low"), (f"s{start + 1}", "high")})
    known: dict[int, Known] = {0: at_entry}
    pending = [0]
    while pending:
        index = pending.pop()
        behind = after(program.instructions[index], known[index])
        for successor in flow.successors[index]:
            met = known.get(successor, behind) & behind
            if met != known.get(successor):
                known[successor] = met
                pending.append(successor)
    loads = [index for index in known if program.instructions[index].mnemonic.startswith("s_load")]
    return {index for index in loads if not holds_pointer(program.instructions[index].operands[1], known[index])}


def argument_register(program: Program) -> int:
    (kernel,) = program.kernels.values()
    names = [name for name, count in kernel.user_sgprs for _ in range(count)]
    return names.index("kernarg_segment_ptr")


def registers(operand: str) -> list[str]:
    """ "s[8:9]" as s8, s9."""
    several = re.fullmatch(r"([sv])\[(\d+):(\d+)\]", operand)
    if several:
        return [f"{several[1]}{number}" for number in range(int(several[2]), int(several[3]) + 1)]
    return [operand] if re.fullmatch(r"[sv]\d+", operand) else []


def holds_pointer(operand: str, known: Known) -> bool:
    pair = registers(operand)
    return len(pair) == 2 and (pair[0], "low") in known and (pair[1], "high") in known


def after(one: Instruction, known: Known) -> Known:
    operands = one.operands
    if READ_ONLY.match(one.mnemonic) or not operands:
        return known
    # Some write a mask as well; taking more for written than there is cannot hide anything.
    count = 1 if one.mnemonic.startswith(("s_", "v_readlane")) else 2
    written = {name for operand in operands[:count] for name in registers(operand)}
    if one.mnemonic == "v_writelane_b32":
        written = {f"{operands[0]}:{operands[2]}"}
    kept = {(place, half) for place, half in known if place not in written and place.partition(":")[0] not in written}
    return frozenset(kept | gained(one, known))


def gained(one: Instruction, known: Known) -> set[tuple[str, str]]:
    operands = one.operands
    of = {half for place, half in known if len(operands) > 1 and place == operands[1]}
    match one.mnemonic:
        case "s_mov_b32":
            return {(operands[0], half) for half in of}
        case "s_add_u32" | "s_add_co_u32" if CONSTANT.fullmatch(operands[2]):
            return {(operands[0], "low")} if "low" in of else set()
        case "s_addc_u32" | "s_add_co_ci_u32" if operands[2] == "0":
            return {(operands[0], "high")} if "high" in of else set()
        case "v_writelane_b32":
            return {(f"{operands[0]}:{operands[2]}", half) for half in of}
        case "v_readlane_b32":
            lane = f"{operands[1]}:{operands[2]}"
            return {(operands[0], half) for place, half in known if place == lane}
        case "s_mov_b64" | "s_add_nc_u64" if holds_pointer(operands[1], known):
            low, high = registers(operands[0])
            return {(low, "low"), (high, "high")}
    return set()
