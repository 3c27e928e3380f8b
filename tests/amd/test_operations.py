"""What each operation of the target becomes, as far as memory is concerned: what the kernels rest on."""

from __future__ import annotations

import functools
import re
from pathlib import Path

import pytest

from mori import jit
from tests.amd.build import ARCHS, build
from tests.amd.sim.program import Program

SOURCE = Path(__file__).with_name("operations.hip")
OF_MEMORY = re.compile(r"(global|flat|buffer|scratch|ds)_|s_barrier|s_waitcnt .*vmcnt|s_wait_(load|store)cnt")
ADDRESS = ("offset", "scale_offset")  # modifiers that say where

FENCE_GFX9 = ["buffer_wbl2 sc0 sc1", "s_waitcnt vmcnt(0)"]
FENCE_GFX12 = ["global_wb scope:SCOPE_SYS", "s_wait_storecnt 0x0"]
BARRIER_GFX12 = ["s_barrier_signal", "s_barrier_wait"]
SYSTEM = "scope:SCOPE_SYS"
GFX9 = {
    "load_system": ["global_load_dwordx2 sc0 sc1", "s_waitcnt vmcnt(0)", "global_store_dwordx2"],
    "store_system": ["global_store_dwordx2 sc0 sc1"],
    "add_device": ["global_atomic_add sc0", "s_waitcnt vmcnt(0)", "global_store_dword"],
    "count_device": ["global_atomic_add_x2"],
    "exchange_zero": [
        *FENCE_GFX9,
        "global_atomic_cmpswap_x2 sc0 sc1",
        "s_waitcnt vmcnt(0)",
        "buffer_inv sc0 sc1",
        "global_store_dword",
    ],
    "publish": ["global_store_byte", *FENCE_GFX9, "s_barrier", *FENCE_GFX9, "global_store_dwordx2 sc0 sc1"],
    "publish_nothing": [*FENCE_GFX9, "global_store_dwordx2 sc0 sc1"],
    "take": [
        "global_load_dwordx2 sc0 sc1",
        "s_waitcnt vmcnt(0)",
        "buffer_inv sc0 sc1",
        "s_barrier",
        "buffer_inv sc0 sc1",
        "global_load_ubyte",
        "s_waitcnt vmcnt(0)",
        "global_store_byte",
    ],
    "move_vector": ["global_load_dwordx4 nt", "s_waitcnt vmcnt(0)", "global_store_dwordx4 nt"],
    "move_bytes": ["global_load_dwordx2", "s_waitcnt vmcnt(0)", "global_store_dwordx2"],
    "move_few_bytes": ["global_load_dword", "s_waitcnt vmcnt(0)", "global_store_dword"],
}
GFX12 = {
    "load_system": [f"global_load_b64 {SYSTEM}", "s_wait_loadcnt 0x0", "global_store_b64"],
    "store_system": [f"global_store_b64 {SYSTEM}"],
    "add_device": [
        "global_atomic_add_u32 th:TH_ATOMIC_RETURN scope:SCOPE_DEV",
        "s_wait_loadcnt 0x0",
        "global_store_b32",
    ],
    "count_device": ["global_atomic_add_u64 scope:SCOPE_DEV"],
    "exchange_zero": [
        *FENCE_GFX12,
        f"global_atomic_cmpswap_b64 th:TH_ATOMIC_RETURN {SYSTEM}",
        "s_wait_loadcnt 0x0",
        f"global_inv {SYSTEM}",
        "global_store_b32",
    ],
    "publish": ["global_store_b8", *FENCE_GFX12, *BARRIER_GFX12, *FENCE_GFX12, f"global_store_b64 {SYSTEM}"],
    "publish_nothing": [*FENCE_GFX12, f"global_store_b64 {SYSTEM}"],
    "take": [
        f"global_load_b64 {SYSTEM}",
        "s_wait_loadcnt 0x0",
        f"global_inv {SYSTEM}",
        "s_wait_loadcnt 0x0",
        *BARRIER_GFX12,
        f"global_inv {SYSTEM}",
        "global_load_u8",
        "s_wait_loadcnt 0x0",
        "global_store_b8",
    ],
    "move_vector": ["global_load_b128 th:TH_LOAD_NT", "s_wait_loadcnt 0x0", "global_store_b128 th:TH_STORE_NT"],
    "move_bytes": ["global_load_b64", "s_wait_loadcnt 0x0", "global_store_b64"],
    "move_few_bytes": ["global_load_b32", "s_wait_loadcnt 0x0", "global_store_b32"],
}
EXPECTED = {"gfx942": GFX9, "gfx950": GFX9, "gfx1250": GFX12}


@functools.cache
def operations(arch: str) -> Program:
    spec = jit.Spec("operations", SOURCE, kernels=tuple(EXPECTED[arch]), include_dirs=(".",), target="hip", arch=arch)
    return build(spec).program


def memory_instructions(program: Program, kernel: str) -> list[str]:
    """Name and modifiers of each, without registers and offsets; of a wait, what it waits for of memory for all."""
    found = []
    start = program.index_of[program.kernels[kernel].entry]
    for one in program.instructions[start:]:
        if one.mnemonic == "s_endpgm":
            return found
        if not OF_MEMORY.match(one.text):
            continue
        if one.mnemonic.startswith("s_wait"):
            found.append(re.sub(r" lgkmcnt\(\d+\)", "", one.text))
        else:
            modifiers = [":".join(filter(None, pair)) for pair in one.modifiers.items() if pair[0] not in ADDRESS]
            found.append(" ".join([one.mnemonic, *modifiers]))
    raise AssertionError(f"{kernel} does not end")


@pytest.mark.parametrize("operation", GFX9)
@pytest.mark.parametrize("arch", ARCHS)
def test_an_operation_is_these_instructions(arch: str, operation: str) -> None:
    assert memory_instructions(operations(arch), operation) == EXPECTED[arch][operation]


def test_every_operation_is_compared() -> None:
    written = re.findall(r"^OPERATION\((\w+),", SOURCE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert written == list(GFX9) == list(GFX12)
