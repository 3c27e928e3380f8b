"""Taking a code object apart: its listing is believed only as far as the bytes bear it out."""

from __future__ import annotations

import functools

import pytest

from tests.amd.sim.errors import Unknown
from tests.amd.sim.message_pack import unpack
from tests.amd.sim.operands import Kind, Operand, parse_operand
from tests.amd.sim.program import Program, parse
from tests.amd.sim.toolchain import Compiled, compile_text

SOURCE = """
extern "C" __attribute__((device, noinline)) int twice(int value) { return value * 2; }
extern "C" __attribute__((global)) void count_up(int* values, unsigned char step, int rounds) {
  __attribute__((shared)) static int held[64];
  for (int i = 0; i < rounds; ++i) held[__builtin_amdgcn_workitem_id_x()] += twice(values[i]) + step;
  values[__builtin_amdgcn_workitem_id_x()] = held[__builtin_amdgcn_workitem_id_x()];
}
"""
BASE = 0x1000_0000


@functools.cache
def compiled(arch: str) -> Compiled:
    return compile_text(SOURCE, arch)


def test_the_kernel_is_described(arch: str) -> None:
    program = Program(compiled(arch), BASE)
    kernel = program.kernels["count_up"]
    assert program.arch == arch
    assert kernel.lanes == (32 if arch == "gfx1250" else 64)
    assert kernel.lds_bytes == 256
    assert [(one.offset, one.bytes) for one in kernel.arguments[:3]] == [(0, 8), (8, 1), (12, 4)]
    assert ("kernarg_segment_ptr", 2) in kernel.user_sgprs
    assert kernel.group_id_sgprs[1:] == (False, False) and not kernel.flushes_denormals
    assert BASE + kernel.entry in program.index_of
    assert program.place(BASE + kernel.entry) == "count_up+0x0"


def test_instructions_fill_the_functions(arch: str) -> None:
    program = Program(compiled(arch), BASE)
    symbols = program.code_object.symbols
    for name in ("count_up", "twice"):
        start = BASE + symbols[name].address
        inside = [one for one in program.instructions if start <= one.address < start + symbols[name].bytes]
        assert inside[0].address == start and inside[-1].next_address == start + symbols[name].bytes
        assert all(a.next_address == b.address for a, b in zip(inside, inside[1:], strict=False))
    branches = [one for one in program.instructions if one.target]
    assert branches and all(one.target in program.index_of for one in branches)


def test_the_address_of_a_function_is_the_linkers(arch: str) -> None:
    """A call goes to the program counter plus what the linker put into the code."""
    program = Program(compiled(arch), BASE)
    at = next(i for i, one in enumerate(program.instructions) if one.mnemonic in ("s_getpc_b64", "s_get_pc_i64"))
    after = program.instructions[at].next_address
    low = next(one for one in program.instructions[at:] if one.mnemonic in ("s_add_u32", "s_add_nc_u64"))
    distance = int(low.operands[2], 16)
    assert (after + distance) % (1 << 32) == BASE + program.code_object.symbols["twice"].address


@pytest.mark.parametrize(
    "old, new, problem",
    [
        ("encoding: [0x00", "encoding: [0x01", "the listing says"),
        ("\ncount_up:", "\ncount_down:", "lacks count_up"),
    ],
)
def test_a_listing_of_other_code_is_refused(arch: str, old: str, new: str, problem: str) -> None:
    original = compiled(arch)
    assert old in original.listing
    with pytest.raises(ValueError, match=problem):
        Program(original._replace(listing=original.listing.replace(old, new, 1)), BASE)


def test_a_branch_to_another_place_is_refused(arch: str) -> None:
    original = compiled(arch)
    lines = original.listing.splitlines(keepends=True)
    branch = next(i for i, line in enumerate(lines) if "fixup_si_sopp_br" in line)
    label = lines[branch].split("value: ")[1].split(",")[0]
    place = next(i for i, line in enumerate(lines) if line.startswith(f"{label}:"))
    behind = next(i for i in range(place, len(lines)) if "encoding: [" in lines[i]) + 1
    moved = [*lines[:place], *lines[place + 1 : behind], lines[place], *lines[behind:]]
    with pytest.raises(ValueError, match="leads to"):
        Program(original._replace(listing="".join(moved)), BASE)


def test_no_elf() -> None:
    with pytest.raises(ValueError, match=r"no 64-bit ELF object: begins with b'hello'"):
        Program(Compiled(b"hello", ""), BASE)


def test_texts_of_instructions() -> None:
    one = parse(
        "v_cndmask_b32_sdwa v2, v104, v0, vcc dst_sel:DWORD dst_unused:UNUSED_PAD src0_sel:DWORD src1_sel:WORD_1"
    )
    assert (one.mnemonic, one.form, one.operands) == ("v_cndmask_b32", "sdwa", ("v2", "v104", "v0", "vcc"))
    assert one.modifiers["src1_sel"] == "WORD_1"
    assert parse("v_mov_b32_dpp v0, v1 quad_perm:[1,0,3,2] row_mask:0xf").modifiers["quad_perm"] == "[1,0,3,2]"
    assert parse("buffer_inv sc0 sc1").modifiers == {"sc0": "", "sc1": ""}
    assert parse("s_getreg_b32 s6, hwreg(HW_REG_IB_STS2, 6, 4)").operands == ("s6", "hwreg(HW_REG_IB_STS2, 6, 4)")
    assert parse("global_load_dword v0, v[2:3], off offset:-16 sc0 sc1").operands == ("v0", "v[2:3]", "off")
    dual = parse("v_dual_mov_b32 v9, v8 :: v_dual_mov_b32 v8, v7")
    assert dual.second is not None and dual.second.operands == ("v8", "v7")
    assert parse("s_endpgm").operands == ()


def test_texts_of_operands() -> None:
    assert parse_operand("v[4:7]") == Operand(Kind.VGPR, 4, 4)
    assert parse_operand("ttmp9") == Operand(Kind.SGPR, 117, 1)
    assert parse_operand("-|v3|").negative and parse_operand("-|v3|").absolute
    assert (
        parse_operand("-16").value == -16 and parse_operand("0x3e8").value == 1000 and parse_operand("-4.0").value == -4
    )
    with pytest.raises(Unknown, match="operand 'a3'"):
        parse_operand("a3")


def test_message_pack() -> None:
    packed = bytes.fromhex("84 a16b 93 01 ff cc80 a16e c0 a174 c3 a162 c402 0102")
    assert unpack(packed) == {"k": [1, -1, 128], "n": None, "t": True, "b": b"\x01\x02"}
    assert unpack(bytes.fromhex("de0001 d901 61 cd0100")) == {"a": 256}
    assert unpack(bytes.fromhex("dc0002 d1ff00 ce00010000")) == [-256, 65536]
    with pytest.raises(ValueError, match="1 bytes follow"):
        unpack(b"\x01\x02")
    with pytest.raises(ValueError, match="type 0xc7"):
        unpack(b"\xc7\x00\x00")
