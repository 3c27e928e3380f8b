"""Scalar moves, EXEC, branches, and what a wave says to the machine: barrier, sleep, end, clock, hardware registers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.amd.sim.errors import Refused, Unknown
from tests.amd.sim.operands import known_bits, known_bits_destination, scalar_destination, scalar_source
from tests.amd.sim.program import Instruction
from tests.amd.sim.scalar_alu import logic_of_known_bits
from tests.amd.sim.table import Execute, Target, allow_modifiers, operands, semantics
from tests.amd.sim.wave import VCC, Wave

# Bits of hardware registers that have a value here: no clusters of blocks, one die.
HARDWARE_REGISTERS = {"HW_REG_IB_STS2": 0, "HW_REG_XCC_ID": 0}
# Modes that this simulator need not know: hints to the scheduler of a real wave, or denormals as they are at the start.
MODES = {"HW_REG_WAVE_MODE", "HW_REG_WAVE_SCHED_MODE"}

LONGEST_SLEEP = 4  # turns: nobody gains from more of them


def _bits(instruction: Instruction) -> int:
    return 64 if instruction.mnemonic.endswith("64") else 32


@semantics("s_mov_b32", "s_mov_b64")
def move(instruction: Instruction, target: Target) -> Execute:
    allow_modifiers(instruction)
    destination, source = operands(instruction, 2)
    read, write = known_bits(source, _bits(instruction)), known_bits_destination(destination, _bits(instruction))
    return lambda wave: write(wave, *read(wave))


@semantics("s_cmov_b32", "s_cmov_b64")
def conditional_move(instruction: Instruction, target: Target) -> Execute:
    plain = move(instruction, target)

    def execute(wave: Wave) -> None:
        if wave.read_scc():
            plain(wave)

    return execute


@semantics("s_cselect_b32", "s_cselect_b64")
def select(instruction: Instruction, target: Target) -> Execute:
    allow_modifiers(instruction)
    destination, *sources = operands(instruction, 3)
    chosen, other = (known_bits(text, _bits(instruction)) for text in sources)
    write = known_bits_destination(destination, _bits(instruction))
    return lambda wave: write(wave, *(chosen if wave.read_scc() else other)(wave))


def _exec_operation(name: str, function: Callable[[int, int], int], saves: bool) -> None:
    """EXEC becomes a function of the source and EXEC; the destination gets the old EXEC, or the new one."""

    def bind(instruction: Instruction, target: Target) -> Execute:
        allow_modifiers(instruction)
        destination, source = operands(instruction, 2)
        read, write = known_bits(source, _bits(instruction)), scalar_destination(destination, _bits(instruction))

        def execute(wave: Wave) -> None:
            old = wave.exec
            new, unknown = logic_of_known_bits(function, [read(wave), (old, 0)])
            if unknown & wave.everyone:
                raise Refused(f"an undefined value for EXEC, from {source}")
            write(wave, old if saves else new)
            wave.set_exec(new & wave.everyone)
            wave.scc = int(wave.exec != 0)

        return execute

    semantics(f"{name}_b32", f"{name}_b64")(bind)


for _name in ("s_and_saveexec", "s_or_saveexec", "s_xor_saveexec"):
    _operation: Any = {"and": int.__and__, "or": int.__or__, "xor": int.__xor__}[_name.split("_")[1]]
    _exec_operation(_name, _operation, True)
for _name in ("s_andn2_saveexec", "s_and_not1_saveexec"):
    _exec_operation(_name, lambda source, old: source & ~old, True)
for _name in ("s_orn2_saveexec", "s_or_not1_saveexec"):
    _exec_operation(_name, lambda source, old: source | ~old, True)
for _name in ("s_andn1_saveexec", "s_and_not0_saveexec"):
    _exec_operation(_name, lambda source, old: ~source & old, True)
for _name in ("s_andn2_wrexec", "s_and_not1_wrexec"):
    _exec_operation(_name, lambda source, old: source & ~old, False)
for _name in ("s_andn1_wrexec", "s_and_not0_wrexec"):
    _exec_operation(_name, lambda source, old: ~source & old, False)


def _branch(name: str, taken: Callable[[Wave], bool]) -> None:
    def bind(instruction: Instruction, target: Target) -> Execute:
        goal = instruction.target

        def execute(wave: Wave) -> None:
            if taken(wave):
                wave.jump(goal)

        return execute

    semantics(name)(bind)


def _vcc(wave: Wave) -> int:
    return wave.read_sgpr_pair(VCC) if wave.lanes == 64 else wave.read_sgpr(VCC)


_branch("s_branch", lambda wave: True)
_branch("s_cbranch_scc0", lambda wave: wave.read_scc() == 0)
_branch("s_cbranch_scc1", lambda wave: wave.read_scc() != 0)
_branch("s_cbranch_vccz", lambda wave: _vcc(wave) == 0)
_branch("s_cbranch_vccnz", lambda wave: _vcc(wave) != 0)
_branch("s_cbranch_execz", lambda wave: wave.exec == 0)
_branch("s_cbranch_execnz", lambda wave: wave.exec != 0)


@semantics("s_getpc_b64", "s_get_pc_i64")
def get_pc(instruction: Instruction, target: Target) -> Execute:
    write = scalar_destination(operands(instruction, 1)[0], 64)
    after = instruction.next_address
    return lambda wave: write(wave, after)


@semantics("s_setpc_b64", "s_set_pc_i64")
def set_pc(instruction: Instruction, target: Target) -> Execute:
    read = scalar_source(operands(instruction, 1)[0], 64)
    return lambda wave: wave.jump(read(wave))


@semantics("s_swappc_b64", "s_swap_pc_i64")
def swap_pc(instruction: Instruction, target: Target) -> Execute:
    destination, source = operands(instruction, 2)
    write, read, after = scalar_destination(destination, 64), scalar_source(source, 64), instruction.next_address

    def execute(wave: Wave) -> None:
        goal = read(wave)
        write(wave, after)
        wave.jump(goal)

    return execute


@semantics("s_endpgm")
def end(instruction: Instruction, target: Target) -> Execute:
    return lambda wave: wave.finish()


@semantics("s_barrier")
def barrier(instruction: Instruction, target: Target) -> Execute:
    def execute(wave: Wave) -> None:
        wave.block.barrier.signal(wave)
        wave.await_barrier()

    return execute


@semantics("s_barrier_signal")
def barrier_signal(instruction: Instruction, target: Target) -> Execute:
    _only_block_barrier(instruction)
    return lambda wave: wave.block.barrier.signal(wave)


@semantics("s_barrier_wait")
def barrier_wait(instruction: Instruction, target: Target) -> Execute:
    _only_block_barrier(instruction)
    return lambda wave: wave.await_barrier()


def _only_block_barrier(instruction: Instruction) -> None:
    if operands(instruction, 1) != ("-1",):
        raise Unknown(f"barrier {instruction.operands[0]}")


@semantics("s_sleep")
def sleep(instruction: Instruction, target: Target) -> Execute:
    turns = min(int(operands(instruction, 1)[0], 0), LONGEST_SLEEP)
    return lambda wave: wave.sleep(turns)


@semantics(
    *("s_nop", "v_nop", "s_delay_alu", "s_clause", "s_wait_alu", "s_wait_idle", "s_setprio", "s_inst_prefetch"),
    "s_set_inst_prefetch_distance",
)
def nothing(instruction: Instruction, target: Target) -> Execute:
    return lambda wave: None


@semantics("s_getreg_b32")
def get_hardware_register(instruction: Instruction, target: Target) -> Execute:
    destination, source = operands(instruction, 2)
    name, *_ = source.removeprefix("hwreg(").removesuffix(")").split(",")
    if name not in HARDWARE_REGISTERS:
        raise Unknown(f"hardware register {source}")
    write = scalar_destination(destination)
    return lambda wave: write(wave, HARDWARE_REGISTERS[name])


@semantics("s_setreg_b32", "s_setreg_imm32_b32")
def set_hardware_register(instruction: Instruction, target: Target) -> Execute:
    name, offset, _ = operands(instruction, 2)[0].removeprefix("hwreg(").removesuffix(")").split(", ")
    if name not in MODES or int(offset) < 25:
        raise Unknown(f"setting {instruction.operands[0]}")
    return lambda wave: None


@semantics("s_trap")
def trap(instruction: Instruction, target: Target) -> Execute:
    def execute(wave: Wave) -> None:
        raise Refused(f"trap {instruction.operands[0]}")

    return execute


@semantics("s_sendmsg")
def send_message(instruction: Instruction, target: Target) -> Execute:
    if operands(instruction, 1)[0] != "sendmsg(MSG_DEALLOC_VGPRS)":
        raise Unknown(f"message {instruction.operands[0]}")
    return lambda wave: None
