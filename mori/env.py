"""The environment variables of mori: one table, one reader.

Nothing else in the package looks at `os.environ` for a `MORI_*` name. `VARIABLES` is what `get` parses with, what
`warn_unknown` compares against and what docs/environment.md is made from (`markdown`).
A variable that is set to the empty string counts as not set.
"""

from __future__ import annotations

import difflib
import os
import re
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

_TRUE = ("1", "true", "on", "yes")
_FALSE = ("0", "false", "off", "no")
_LONGEST_SECONDS = 10**8  # about three years
_LARGEST_COUNT = 2**31 - 1
_MOST_BYTES = 1 << 47  # an address space has no more
_BYTES = re.compile(r"(\d+)\s*([kmgt]?)(i?b)?", re.IGNORECASE)


class Kind(NamedTuple):
    """How the text of a variable becomes a value. `parse` raises ValueError; `accepted` completes "expected ..."."""

    name: str
    accepted: str
    parse: Callable[[str], Any]


class Variable(NamedTuple):
    name: str
    kind: Kind
    default: Any
    meaning: str


def parse_bytes(text: str) -> int:
    """Bytes of "6G", "512MiB", "64kb" or "1048576"; every suffix is a power of 1024. ValueError for anything else."""
    match = _BYTES.fullmatch(text.strip())
    if match is None or (match[3] and not match[2] and match[3].lower() != "b"):
        raise ValueError(f"{text!r} is not a size: expected {BYTES.accepted}")
    return int(match[1]) << 10 * " kmgt".index(match[2].lower() or " ")


def _parse_env_bytes(text: str) -> int:
    size = parse_bytes(text)
    if not 0 < size <= _MOST_BYTES:
        raise ValueError(text)
    return size


def _parse_bool(text: str) -> bool:
    word = text.lower()
    if word not in _TRUE + _FALSE:
        raise ValueError(text)
    return word in _TRUE


def _parse_seconds(text: str) -> float:
    seconds = float(text)
    if not (0 < seconds <= _LONGEST_SECONDS):
        raise ValueError(text)
    return seconds


def _parse_count(text: str) -> int:
    count = int(text)
    if not 0 <= count <= _LARGEST_COUNT:
        raise ValueError(text)
    return count


def _parse_positive(text: str) -> int:
    count = _parse_count(text)
    if count == 0:
        raise ValueError(text)
    return count


def _parse_wave(text: str) -> int:
    if text not in ("32", "64"):
        raise ValueError(text)
    return int(text)


def _parse_geometry(text: str) -> tuple[int, int, int]:
    block, rdma, warp = (_parse_count(part) for part in text.split(","))
    return block, rdma, warp


def choice(*words: str) -> Kind:
    def parse(text: str) -> str:
        if text not in words:
            raise ValueError(text)
        return text

    return Kind("choice", "one of " + ", ".join(words), parse)


BOOL = Kind("bool", "1, true, on, yes or 0, false, off, no", _parse_bool)
COUNT = Kind("int", f"a whole number from 0 to {_LARGEST_COUNT}", _parse_count)
POSITIVE = Kind("int", f"a whole number from 1 to {_LARGEST_COUNT}", _parse_positive)
WAVE = Kind("int", "32 or 64", _parse_wave)
SECONDS = Kind("seconds", f"a positive number of seconds, at most {_LONGEST_SECONDS}", _parse_seconds)
BYTES = Kind("bytes", "bytes, or a number with suffix K, M, G, T (also KB or KiB; powers of 1024)", _parse_env_bytes)
GEOMETRY = Kind("geometry", "three numbers block,rdma,warp", _parse_geometry)
TEXT = Kind("text", "any text", str)

_LATER = " Accepted, no effect yet."
_NEVER = " Accepted for compatibility, no effect here."

# By area, in the order in which the docs list them. A default of None means "decided at run time".
AREAS: dict[str, tuple[Variable, ...]] = {
    "Target and host execution": (
        Variable(
            "MORI_TARGET",
            choice("host", "cuda", "hip"),
            None,
            "Where kernels run. Default: by the installed torch and the visible devices.",
        ),
        Variable(
            "MORI_SHARE_GPU",
            BOOL,
            False,
            "Let several ranks use one GPU, for trying things out: their kernels take turns, milliseconds at a time.",
        ),
        Variable("MORI_HOST_THREADS", COUNT, 0, "Threads per rank of the host target; 0 = cores / ranks on the node."),
        Variable(
            "MORI_HOST_ISA",
            choice("auto", "baseline", "avx2", "avx512"),
            "auto",
            "SIMD variant of the host kernels; auto takes the widest that the CPU has.",
        ),
        Variable(
            "MORI_WAVE_SIZE",
            WAVE,
            None,
            "Wave width that roundings of the API refer to. Default: 64, 32 on NVIDIA; kernels do not change.",
        ),
    ),
    "Deadlines": (
        Variable("MORI_TIMEOUT_S", SECONDS, 300.0, "How long a kernel waits for a peer that is alive but slow."),
        Variable("MORI_BOOTSTRAP_TIMEOUT", SECONDS, 300.0, "Deadline of each collective set-up step."),
    ),
    "Bootstrap": (
        Variable(
            "MORI_SOCKET_IFNAME",
            TEXT,
            None,
            "Network interface on which ranks meet. Default: the first with a non-loopback address, else 127.0.0.1.",
        ),
        Variable(
            "MORI_NODE_ID",
            TEXT,
            None,
            "Added to the boot id to tell nodes apart; different values make two nodes of one machine.",
        ),
    ),
    "Symmetric heap": (
        Variable(
            "MORI_SHMEM_HEAP_SIZE",
            BYTES,
            4 << 30,
            "Bytes reserved per rank, read once at init; memory is used only as far as ops need it.",
        ),
        Variable(
            "MORI_SHMEM_MODE",
            choice("static_heap", "vmm_heap", "isolation"),
            "static_heap",
            "All three name the same heap: one reservation that grows inside collective calls.",
        ),
        Variable(
            "MORI_SHMEM_HEAP_TYPE",
            choice("uncached", "normal"),
            "uncached",
            "Caching of device memory on AMD GPUs, which is always off." + _NEVER,
        ),
        Variable("MORI_SHMEM_VMM_CHUNK_SIZE", BYTES, None, "Growth step of the heap." + _NEVER),
    ),
    "EP ops": (
        Variable(
            "MORI_EP_LAUNCH_CONFIG_MODE",
            choice("MANUAL", "AUTO"),
            "MANUAL",
            "MANUAL: launch sizes from the call, else the config. AUTO: tuned rules, else the built-in table.",
        ),
        Variable(
            "MORI_EP_TUNING_CONFIG",
            TEXT,
            None,
            "AUTO mode: the tuning file of both phases, instead of the one in mori/ops/tuning_configs.",
        ),
        Variable("MORI_EP_DISABLE_VIEW_CACHE", BOOL, False, "Make new output tensors in every call."),
        Variable(
            "MORI_EP_VALIDATE",
            BOOL,
            False,
            "Turn expert ids that are out of range, other than -1, into an error that names token and column.",
        ),
        Variable(
            "MORI_EP_LENIENT_INDICES",
            BOOL,
            False,
            "Ignore the indices given to combine instead of checking their row count.",
        ),
        Variable(
            "MORI_EP_SYNC_ERRORS",
            BOOL,
            False,
            "Every eager GPU call synchronises and raises its own faults; host calls always do.",
        ),
        Variable(
            "MORI_EP_PATH",
            choice("direct", "staged", "auto"),
            None,
            "For tests: how dispatch moves rows; auto stages calls of few tokens. Default: direct.",
        ),
        Variable(
            "MORI_FP8_COMBINE_SCALE_DIM",
            POSITIVE,
            56,
            "Scales per token of the blockwise combines, read when an op is built; equal on all ranks.",
        ),
        Variable("MORI_EP_COMM", choice("shmem", "cco"), "shmem", "Which communicator v1 ops use." + _NEVER),
        Variable("MORI_EP_TOKOFF_EXT", BOOL, False, "Slot counters outside the arena." + _NEVER),
        Variable(
            "MORI_V2_KERNEL_BACKEND",
            TEXT,
            None,
            "Kernel backend of EPv2 ops whose config names none: hip, flydsl or a registered one. Default: by arch.",
        ),
        Variable("MORI_V2_LIB_DIR", TEXT, None, "Where to look for op libraries." + _NEVER),
        Variable("MORI_EP_DISP_GEOM", GEOMETRY, None, "Fixed EPv2 dispatch geometry between nodes." + _LATER),
        Variable("MORI_EP_COMB_GEOM", GEOMETRY, None, "Fixed EPv2 combine geometry between nodes." + _LATER),
        Variable("ENABLE_PROFILER", BOOL, False, "Kernels that tests can delay; traces are not read yet."),
        Variable("ENABLE_STANDARD_MOE_ADAPT", BOOL, True, "OFF makes the standard-MoE methods raise."),
    ),
    "Device code": (
        Variable("MORI_JIT_CACHE_DIR", TEXT, None, "Folder of compiled device code. Default: ~/.cache/mori."),
        Variable("MORI_JIT_ARCH", TEXT, None, "Arch to compile for instead of the one found."),
        Variable("MORI_GPU_ARCHS", TEXT, None, "AMD archs (a,b or a;b); mori.jit.config reports the first."),
        Variable(
            "MORI_PRECOMPILE",
            BOOL,
            False,
            "Compile at import. Kernels are made for the shape of an op: warmup_jit_kernels compiles ahead." + _NEVER,
        ),
        Variable("MORI_JIT_HIPCC", TEXT, None, "Path of hipcc."),
        Variable("MORI_JIT_EXTRA_FLAGS", TEXT, None, "Further compiler flags, split as by a shell."),
        Variable("MORI_JIT_VERBOSE", BOOL, False, "Print compiler options and where code came from."),
        Variable("MORI_JIT_KEEP_FAILED", BOOL, False, "Keep the files of a failed compilation."),
        Variable("MORI_DISABLE_JIT", BOOL, False, "Never compile; use what the cache holds."),
        Variable("MORI_SOURCE_ROOT", TEXT, None, "Folder of the device sources."),
    ),
    "Between nodes": (
        Variable("MORI_RDMA_DEVICES", TEXT, None, "NICs to use (a,b) or to leave out (^a,b)." + _LATER),
        Variable("MORI_RDMA_SL", COUNT, None, "RDMA service level." + _LATER),
        Variable("MORI_RDMA_TC", COUNT, None, "RDMA traffic class." + _LATER),
        Variable("MORI_IB_GID_INDEX", COUNT, None, "GID index of the NIC port." + _LATER),
        Variable("MORI_NUM_QP_PER_PE", COUNT, 4, "Queue pairs per peer: what shmem reports, and no more."),
        Variable("MORI_IGNORE_CPU_AFFINITY", BOOL, False, "Choose NICs without regard to NUMA." + _LATER),
        Variable("MORI_DISABLE_P2P", BOOL, False, "No direct access between GPUs of a node." + _LATER),
        Variable("MORI_ENABLE_RAIL_ONLY", BOOL, False, "Connect equal local ranks only." + _LATER),
        Variable("MORI_ENABLE_SDMA", BOOL, False, "SDMA engines are not supported." + _NEVER),
        Variable("MORI_SDMA_NUM_CHANNELS", COUNT, None, "SDMA channels." + _NEVER),
        Variable("MORI_DEVICE_NIC", TEXT, None, "NIC family of device-driven RDMA." + _NEVER),
        Variable("MORI_DEVICE_IONIC_CCQE", BOOL, False, "Completion format of one NIC family." + _NEVER),
        Variable("MORI_VPOD_ID", TEXT, None, "Fabric partition." + _NEVER),
        Variable("MORI_CCO_FABRIC_DISABLE", BOOL, False, "No fabric handles." + _NEVER),
        Variable("MORI_CCO_FABRIC_CROSSNODE_LSA", BOOL, False, "Load/store between nodes." + _NEVER),
        Variable("MORI_CCO_FABRIC_LENIENT", BOOL, False, "Fall back when fabric handles fail." + _NEVER),
        Variable("MORI_CCO_LOG_TRANSPORT", BOOL, False, "Log the transport chosen per peer." + _LATER),
        Variable("MORI_CCO_BC", TEXT, None, "Device bitcode for DSLs." + _NEVER),
        Variable("MORI_CCO_GDA_CONN", TEXT, None, "Connection type in examples." + _LATER),
    ),
    "Benchmarks and logging": (
        Variable("MORI_TUNING_SCOPE", choice("quick", "full"), "quick", "How many launch sizes the tuner tries."),
        Variable("MORI_PERF_OUT", TEXT, None, "File to which bench_dispatch_combine.py adds a JSON line per phase."),
        Variable("MORI_EP_ROUNDS", COUNT, None, "Rounds of a benchmark." + _LATER),
        Variable("MORI_EP_ROUND_SERIES", BOOL, False, "Print every round of a benchmark." + _LATER),
        Variable("MORI_SMI_MONITOR", BOOL, False, "Record GPU telemetry in benchmarks." + _NEVER),
        Variable("GPU_PER_NODE", COUNT, None, "Ranks per node in benchmarks and examples." + _LATER),
        Variable("MORI_APP_LOG_LEVEL", TEXT, None, "Log level; also MORI_<module>_LOG_LEVEL." + _LATER),
    ),
    "Read by torch.distributed": (
        Variable("MASTER_ADDR", TEXT, None, "Address where the process group meets."),
        Variable("MASTER_PORT", COUNT, None, "Port where the process group meets."),
        Variable("GLOO_SOCKET_IFNAME", TEXT, None, "Network interface of the gloo backend."),
    ),
}

VARIABLES: dict[str, Variable] = {variable.name: variable for area in AREAS.values() for variable in area}

_warned = False


def get(name: str) -> Any:
    """Typed value of a variable of the table, its default when unset or empty.

    ValueError when the text does not parse: it names the variable, the text and the accepted form.
    """
    variable = VARIABLES[name]
    text = os.environ.get(name, "").strip()
    if not text:
        return variable.default
    try:
        return variable.kind.parse(text)
    except ValueError:
        raise ValueError(f"{name}={text!r} is not valid: expected {variable.kind.accepted}") from None


def put(name: str, value: str) -> None:
    """Set a variable of the table for this process and those it starts. ValueError if the value is malformed."""
    VARIABLES[name].kind.parse(value)
    os.environ[name] = value


def warn_unknown() -> None:
    """Warn, once per process, about each MORI_* variable that is set but not in the table, with the nearest match."""
    global _warned
    if _warned:
        return
    _warned = True
    for name in sorted(os.environ):
        if not name.startswith("MORI_") or name in VARIABLES or name.endswith("_LOG_LEVEL"):
            continue
        near = difflib.get_close_matches(name, VARIABLES, n=1, cutoff=0.6)
        hint = f"; did you mean {near[0]}?" if near else "; docs/environment.md lists those that exist"
        warnings.warn(f"environment variable {name} is not known to mori and has no effect{hint}", stacklevel=2)


def _show(variable: Variable) -> str:
    default = variable.default
    if default is None:
        return "not set"
    if variable.kind is BYTES:
        return f"{default >> 30}G"
    if isinstance(default, bool):
        return "on" if default else "off"
    return f"{default:g}" if isinstance(default, float) else str(default)


def markdown() -> str:
    """The text of docs/environment.md."""
    lines = [
        "# Environment variables",
        "",
        "<!-- Made from the table in mori/env.py; after a change there, write it again:",
        """python -c "from mori import env; print(env.markdown(), end='')" > docs/environment.md -->""",
        "",
        "Values are read when they are first needed. An empty value counts as not set; a malformed one raises",
        "`ValueError` with the accepted form; an unknown `MORI_*` name gives one warning with the nearest match.",
    ]
    for area, variables in AREAS.items():
        lines += ["", f"## {area}", "", "| variable | value | default | meaning |", "|---|---|---|---|"]
        lines += [f"| `{v.name}` | {v.kind.accepted} | {_show(v)} | {v.meaning} |" for v in variables]
    return "\n".join(lines) + "\n"
