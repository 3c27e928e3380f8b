"""The kernarg segment: a kernel's arguments, then what the compiler asks the launch to add."""

from __future__ import annotations

import struct

from tests.amd.sim.code_object import Kernel

FORMATS = {1: "<B", 2: "<H", 4: "<I", 8: "<Q"}


def kernarg_segment(kernel: Kernel, arguments: bytes, blocks: int, threads: int, dynamic_lds_bytes: int) -> bytes:
    """For a grid of one dimension. `arguments` are laid out as the kernel's own are."""
    hidden = {
        "hidden_block_count_x": blocks,
        "hidden_block_count_y": 1,
        "hidden_block_count_z": 1,
        "hidden_group_size_x": threads,
        "hidden_group_size_y": 1,
        "hidden_group_size_z": 1,
        "hidden_grid_dims": 1,
        "hidden_dynamic_lds_size": dynamic_lds_bytes,
        # Offsets and rests of the grid, and services of the runtime, of which there are none.
        **dict.fromkeys([f"hidden_{what}_{axis}" for what in ("remainder", "global_offset") for axis in "xyz"], 0),
    }
    if len(arguments) != kernel.argument_bytes:
        raise ValueError(f"{kernel.name} takes {kernel.argument_bytes} bytes of arguments, got {len(arguments)}")
    segment = bytearray(kernel.kernarg_bytes)
    segment[: len(arguments)] = arguments
    for one in kernel.arguments:
        if one.kind in hidden:
            struct.pack_into(FORMATS[one.bytes], segment, one.offset, hidden[one.kind])
    return bytes(segment)
