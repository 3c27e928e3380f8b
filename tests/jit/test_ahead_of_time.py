"""`mori compile`: what it compiles, for whom, and that ops find it. Most with a compiler that needs nothing."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from mori import archs, jit
from mori.cli import app
from mori.cli.compile import ARCHS_TO_COMPILE
from mori.jit import compilers, hip_clang
from mori.ops import ahead_of_time, device_code
from tests.jit.fake_compiler import FakeCompiler, kernels_in

NUMBERS = ("--world-size", "2", "--experts-per-rank", "4", "--topk", "2", "--max-tokens", "16")
SHAPES = ahead_of_time.shapes(2, 4, 2, 16)


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


@pytest.mark.parametrize(
    "arch, without",
    [
        ("sm_90", {"combine_fp8_fnuz", "combine_packed_fp8_fnuz", "unpack_fp8_fnuz"}),
        ("sm_100", {"combine_fp8_fnuz", "combine_packed_fp8_fnuz", "unpack_fp8_fnuz"}),
        ("gfx950", {"combine_fp8_fnuz", "combine_packed_fp8_fnuz", "unpack_fp8_fnuz"}),
        ("gfx1250", {"combine_fp8_fnuz", "combine_packed_fp8_fnuz", "unpack_fp8_fnuz"}),
        (
            "gfx942",
            {"combine_fp8_ocp", "combine_packed_fp8_ocp", "unpack_fp8_ocp"}
            | {"combine_fp4", "combine_packed_fp4", "unpack_fp4", "combine_fp4_blockwise"},
        ),
    ],
)
def test_kernels_that_an_arch_has_no_arithmetic_for_are_left_out(arch: str, without: set[str]) -> None:
    made = {spec.name.removeprefix("ep_") for spec in ahead_of_time.specs(SHAPES, arch)}
    assert set(ahead_of_time.kernel_names()) - made == without


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
    kernels = len(ahead_of_time.kernel_names())
    assert (
        f"gfx942: {2 * (kernels - 7)} of {2 * (kernels - 7)} code objects of {kernels - 7} kernels; not"
        in result.output
    )
    assert f"sm_90: {2 * (kernels - 3)} of {2 * (kernels - 3)} code objects" in result.output
    jit.forget()
    monkeypatch.setenv("MORI_JIT_CACHE_DIR", str(out))
    monkeypatch.setenv("MORI_DISABLE_JIT", "1")
    for shape in SHAPES:
        assert b"mori_combine_bf16" in device_code.kernel("combine_bf16", shape, "gfx942")
        assert b"mori_dispatch" in device_code.kernel("dispatch", shape, "sm_90")
    with pytest.raises(jit.CompilationDisabled):
        device_code.kernel("dispatch", SHAPES[0]._replace(max_tokens=17), "gfx942")


def test_others_can_read_the_folder_but_not_write_it(sources: Path, tmp_path: Path) -> None:
    out = tmp_path / "prebuilt"
    assert run("--arch", "gfx942", "--out", out, *NUMBERS, "--kernel", "pack").exit_code == 0
    assert stat.S_IMODE(out.stat().st_mode) == 0o755
    assert {stat.S_IMODE(file.stat().st_mode) for file in out.iterdir()} == {0o644}


def test_without_numbers_it_compiles_what_is_shipped(sources: Path, tmp_path: Path) -> None:
    result = run("--arch", "gfx1250", "--out", tmp_path / "prebuilt", "--kernel", "pack", "--kernel", "dispatch")
    assert result.exit_code == 0
    made = 2 * len(ahead_of_time.SHIPPED)
    assert f"gfx1250: {made} of {made} code objects of 2 kernels\n" in result.output


def test_every_arch_but_the_host_is_the_default(sources: Path, tmp_path: Path) -> None:
    result = run("--out", tmp_path / "prebuilt", *NUMBERS, "--kernel", "pack")
    assert ARCHS_TO_COMPILE == ("sm_90", "gfx942", "gfx950", "gfx1250")
    assert [line.partition(":")[0] for line in result.output.splitlines()[:4]] == list(ARCHS_TO_COMPILE)


def test_what_fails_is_named_and_counted(sources: Path, tmp_path: Path) -> None:
    (sources / device_code._SOURCES["hip"]).write_text("kernel mori_pack mistake\n")
    result = run("--arch", "gfx950", "--out", tmp_path / "prebuilt", *NUMBERS, "--kernel", "pack")
    assert result.exit_code == 1
    assert "gfx950 ep_pack: fake 1.0 cannot compile" in result.output
    assert "gfx950: 0 of 2 code objects" in result.output


@pytest.mark.parametrize(
    "arguments, what",
    [
        (("--arch", "gfx906"), "arch 'gfx906'"),
        (("--world-size", "2"), "belong together"),
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
    assert device_code.kernel("unpack_f32", SHAPES[0], "gfx942")[:4] == b"\x7fELF"
