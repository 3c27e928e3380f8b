"""`mori compile`: what it compiles, for whom, and that ops find it. Most with a compiler that needs nothing."""

from __future__ import annotations

import stat
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from mori import archs, jit
from mori.cli import app
from mori.cli.compile import ARCHS_TO_COMPILE
from mori.jit import compilers, hip_clang
from mori.ops import ahead_of_time, device_code
from mori.ops.config import check_config
from mori.ops.construction import shape_of
from tests.jit.fake_compiler import FakeCompiler, kernels_in

FIELDS = "world_size=2,hidden_dim=32,num_experts_per_rank=4,num_experts_per_token=2,max_num_inp_token_per_rank=16"
CONFIG = ahead_of_time.parse_config(FIELDS)
SHAPE = shape_of(CONFIG, check_config(CONFIG))
NUMBERS = ("--config", FIELDS)


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["compile", *map(str, arguments)], catch_exceptions=False)


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A source tree in the language of the fake compiler, which is there for both targets."""
    root = tmp_path / "csrc"
    for name in ("device", "kernels", "runtime"):
        (root / name).mkdir(parents=True)
    (root / "device" / "base.hpp").write_text("")
    table = ahead_of_time._TABLE
    (root / table).write_text((jit.source_root() / table).read_text())
    kernels = "".join(f"kernel mori_{name}\n" for name in ahead_of_time.kernel_names())
    for source in device_code._SOURCES.values():
        (root / source).write_text(kernels)
    monkeypatch.setenv("MORI_SOURCE_ROOT", str(root))
    fake = FakeCompiler(tmp_path / "calls")
    rows = [compilers.Row("fake", target, lambda arch: fake, kernels_in, "nothing") for target in ("cuda", "hip")]
    monkeypatch.setattr(compilers, "COMPILERS", rows)
    return root


def test_the_table_is_read_as_the_compiler_reads_it() -> None:
    names = ahead_of_time.kernel_names()
    assert len(names) == len(set(names)) > 20
    assert {"dispatch", "combine_bf16", "combine_fp8_direct_cast", "unpack_fp4"} <= set(names)


FNUZ = {"combine_fp8_fnuz", "combine_packed_fp8_fnuz", "unpack_fp8_fnuz"}
OCP = {"combine_fp8_ocp", "combine_packed_fp8_ocp", "unpack_fp8_ocp"}
FP4 = {"combine_fp4", "combine_packed_fp4", "unpack_fp4"}
QUANTISED = {"combine_fp8_direct_cast", "combine_fp8_blockwise", "combine_fp4_blockwise"}


def names(fields: str, arch: str) -> set[str]:
    return {spec.name.removeprefix("ep_") for spec in ahead_of_time.specs(ahead_of_time.parse_config(fields), arch)}


@pytest.mark.parametrize(
    "arch, without",
    [("sm_90", FNUZ), ("sm_100", FNUZ), ("gfx950", FNUZ), ("gfx1250", FNUZ), ("gfx942", OCP | FP4)],
)
def test_kernels_that_an_arch_has_no_arithmetic_for_are_left_out(arch: str, without: set[str]) -> None:
    assert set(ahead_of_time.kernel_names()) - names(FIELDS, arch) == without | QUANTISED


@pytest.mark.parametrize("quant_type", ["fp8_direct_cast", "fp8_blockwise", "fp4_blockwise"])
def test_an_op_quantises_in_one_way(quant_type: str) -> None:
    fields = f"{FIELDS},quant_type={quant_type}"
    assert names(fields, "gfx950") & QUANTISED == {f"combine_{quant_type}"}
    if quant_type == "fp4_blockwise":
        with pytest.raises(ValueError, match="quant_type fp4_blockwise on gfx942"):
            names(fields, "gfx942")
    else:
        assert names(fields, "gfx942") & QUANTISED == {f"combine_{quant_type}"}


def test_fields_of_a_config_are_read() -> None:
    config = ahead_of_time.parse_config(f"{FIELDS}, kernel_type=AsyncLL, max_total_recv_tokens=20, scale_dim=56")
    assert (config.kernel_type.name, config.max_total_recv_tokens, config.scale_dim) == ("AsyncLL", 20, 56)
    assert (config.hidden_dim, config.max_token_type_size) == (32, 2)


@pytest.mark.parametrize(
    "fields, what",
    [
        ("world_size=2", "lacks hidden_dim, max_num_inp_token_per_rank, num_experts_per_rank, num_experts_per_token"),
        (f"{FIELDS},colour=3", "'colour=3': expected NAME=VALUE with one of world_size, hidden_dim"),
        (f"{FIELDS},block_num=3", "'block_num=3': expected"),
        (f"{FIELDS},scale_dim=many", "'many' is no value of scale_dim"),
        (f"{FIELDS},kernel_type=Fast", "'Fast' is no value of kernel_type"),
    ],
)
def test_a_config_that_cannot_be_read_is_refused(fields: str, what: str) -> None:
    with pytest.raises(ValueError, match=what):
        ahead_of_time.parse_config(fields)


def test_an_arch_without_kernels_is_named() -> None:
    with pytest.raises(ValueError, match="arch 'gfx906': there are kernels for host, sm_90, gfx942"):
        archs.find("gfx906")
    with pytest.raises(ValueError, match="arch 'sm_80'"):
        archs.find("sm_80")


def test_it_fills_a_folder_that_ops_find_their_code_in(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "prebuilt"
    result = run("--arch", "gfx942,sm_90", "--out", out, *NUMBERS, "--jobs", 2)
    assert result.exit_code == 0
    assert result.output.splitlines()[:2] == [
        f"gfx942: {len(names(FIELDS, 'gfx942'))} of {len(names(FIELDS, 'gfx942'))} code objects, 13 different kernels",
        f"sm_90: {len(names(FIELDS, 'sm_90'))} of {len(names(FIELDS, 'sm_90'))} code objects, 16 different kernels",
    ]
    jit.forget()
    monkeypatch.setenv("MORI_JIT_CACHE_DIR", str(out))
    monkeypatch.setenv("MORI_DISABLE_JIT", "1")
    assert b"mori_combine_bf16" in device_code.kernel("combine_bf16", SHAPE, "gfx942")
    assert b"mori_dispatch" in device_code.kernel("dispatch", SHAPE, "sm_90")
    with pytest.raises(jit.CompilationDisabled):
        device_code.kernel("dispatch", replace(SHAPE, max_tokens=17), "gfx942")


def test_others_can_read_the_folder_but_not_write_it(sources: Path, tmp_path: Path) -> None:
    out = tmp_path / "prebuilt"
    assert run("--arch", "gfx942", "--out", out, *NUMBERS, "--kernel", "pack").exit_code == 0
    assert stat.S_IMODE(out.stat().st_mode) == 0o755
    assert {stat.S_IMODE(file.stat().st_mode) for file in out.iterdir()} == {0o644}


def test_without_a_config_it_compiles_what_is_shipped(sources: Path, tmp_path: Path) -> None:
    result = run("--arch", "gfx1250", "--out", tmp_path / "prebuilt", "--kernel", "pack", "--kernel", "dispatch")
    assert result.exit_code == 0
    made = 2 * len(ahead_of_time.SHIPPED)
    assert result.output.startswith(f"gfx1250: {made} of {made} code objects, 2 different kernels\n")


def test_equal_code_is_compiled_once(sources: Path, tmp_path: Path) -> None:
    cast = f"{FIELDS},quant_type=fp8_direct_cast"
    result = run("--arch", "gfx942", "--out", tmp_path / "prebuilt", *NUMBERS, "--config", cast, "--kernel", "pack")
    assert result.output.startswith("gfx942: 1 of 1 code objects, 1 different kernels\n")


def test_every_arch_but_the_host_is_the_default(sources: Path, tmp_path: Path) -> None:
    result = run("--out", tmp_path / "prebuilt", *NUMBERS, "--kernel", "pack")
    assert ARCHS_TO_COMPILE == ("sm_90", "gfx942", "gfx950", "gfx1250")
    assert [line.partition(":")[0] for line in result.output.splitlines()[:4]] == list(ARCHS_TO_COMPILE)


def test_what_fails_is_named_and_counted(sources: Path, tmp_path: Path) -> None:
    (sources / device_code._SOURCES["hip"]).write_text("kernel mori_pack mistake\n")
    result = run("--arch", "gfx950", "--out", tmp_path / "prebuilt", *NUMBERS, "--kernel", "pack")
    assert result.exit_code == 1
    assert "gfx950 ep_pack: fake 1.0 cannot compile" in result.output
    assert "gfx950: 0 of 1 code objects" in result.output


@pytest.mark.parametrize(
    "arguments, what",
    [
        (("--arch", "gfx906"), "arch 'gfx906'"),
        (("--config", "world_size=2"), "lacks hidden_dim"),
        (("--config", FIELDS.replace("world_size=2", "world_size=0")), "world_size is 0: it must be in 1..512"),
        (("--kernel", "scatter"), "no kernel scatter: there are dispatch"),
    ],
)
def test_what_makes_no_sense_is_refused(tmp_path: Path, arguments: tuple[str, ...], what: str) -> None:
    result = run("--out", tmp_path / "prebuilt", *arguments)
    assert result.exit_code == 2
    assert what in " ".join(result.output.replace("│", " ").split())


def test_one_arch_for_all_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MORI_JIT_ARCH", "gfx942")
    result = run("--out", tmp_path / "prebuilt")
    assert result.exit_code == 2 and "MORI_JIT_ARCH=gfx942" in result.output


def test_real_code_is_found_where_there_is_no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "prebuilt"
    options = ("--arch", "gfx942", "--kernel", "unpack_f32", "--compiler", "ziglang")
    assert run("--out", out, *NUMBERS, *options).exit_code == 0
    jit.forget()
    monkeypatch.setenv("MORI_JIT_CACHE_DIR", str(out))
    monkeypatch.setattr(hip_clang.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setenv("PATH", "")
    assert device_code.kernel("unpack_f32", SHAPE, "gfx942")[:4] == b"\x7fELF"
