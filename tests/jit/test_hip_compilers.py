"""Compilers of AMD code: clang of ziglang as it is, hipcc and hipRTC by stand-ins. Nothing here needs a GPU or ROCm."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from mori import jit
from mori.jit import compilers, elf, hip_clang, hiprtc
from mori.jit.job import resolve
from mori.jit.toolchain import EXACT_ARITHMETIC_HIP
from tests.package.commands import compile_cxx

ARCHS = ("gfx942", "gfx950", "gfx1250")
SCALE = """
template <class T> concept Number = sizeof(T) <= 8;
template <Number T> __attribute__((device)) T twice(T x) { return x + x; }
extern "C" __attribute__((global)) void scale(float* x, float y) {
  x[__builtin_amdgcn_workitem_id_x()] = twice(x[__builtin_amdgcn_workitem_id_x()] * FACTOR + y);
}
"""
EMPTY = 'extern "C" __attribute__((global)) void empty() {}\n'


def scale(arch: str = "gfx942", **changes: object) -> jit.Spec:
    fields = {"kernels": ("scale",), "constants": {"FACTOR": "3.0f"}, **changes}
    return jit.Spec("scale", SCALE, target="hip", arch=arch, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("arch", ARCHS)
def test_ziglang_compiles_and_the_next_process_finds_it(arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    binary = jit.compile(scale(arch), compiler="ziglang")
    assert elf.amd_kernels(binary) == {"scale"}
    jit.forget()
    monkeypatch.setattr(hip_clang.HipClang, "compile", None)
    assert jit.compile(scale(arch), compiler="ziglang") == binary


def test_what_is_compiled_twice_is_the_same() -> None:
    job = resolve(scale())
    compiler = hip_clang.find_ziglang("gfx942")
    assert compiler.compile(job) == compiler.compile(job)


def test_a_mistake_is_reported_with_its_line() -> None:
    with pytest.raises(jit.CompileError) as caught:
        jit.compile(scale(constants={}), compiler="ziglang")
    error = caught.value
    assert "FACTOR" in error.log and "scale.hip:5" in error.log
    assert set(EXACT_ARITHMETIC_HIP) < set(error.command) and "--offload-arch=gfx942" in error.command
    assert error.compiler.startswith("ziglang 0.")


def test_nothing_is_found_beside_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a header would be in no cache key."""
    (tmp_path / "stray.hpp").write_text(EMPTY)
    monkeypatch.chdir(tmp_path)
    source = '#include "stray.hpp"\n'
    with pytest.raises(jit.CompileError, match="stray.hpp"):
        jit.compile(jit.Spec("k", source, target="hip", arch="gfx942"), compiler="ziglang")
    spec = jit.Spec("k", source, kernels=("empty",), include_dirs=(tmp_path,), target="hip", arch="gfx942")
    assert jit.compile(spec, compiler="ziglang")


def test_an_arch_that_nobody_knows_is_no_compiler() -> None:
    with pytest.raises(jit.CompilerNotFound, match=r"(?s)hip code of gfx999.*ziglang: .* does not know gfx999"):
        jit.compile(jit.Spec("k", "", target="hip", arch="gfx999"), compiler="ziglang")


@pytest.mark.parametrize("arch, what", [("sm_90", "no arch of target hip"), ("gfx", "expected one like gfx942")])
def test_an_arch_of_another_target_is_refused(arch: str, what: str) -> None:
    with pytest.raises(ValueError, match=what):
        jit.Spec("k", "", target="hip", arch=arch)


def test_nothing_is_contracted() -> None:
    """y + x * 3 is a multiplication and an addition."""
    code = jit.compile(scale("gfx942"), compiler="ziglang")
    contracted = jit.compile(scale("gfx942", flags=("-ffp-contract=fast",)), compiler="ziglang")
    assert code != contracted


def test_without_the_package_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hip_clang.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        jit.CompilerNotFound, match=r"ziglang: the package is not installed\. Install the package ziglang"
    ):
        jit.compile(scale(), compiler="ziglang")


class TestHipcc:
    """A script that answers like hipcc and hands everything else to ziglang's clang."""

    @pytest.fixture(autouse=True)
    def hipcc(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        script = tmp_path / "hipcc"
        lld = tmp_path / "lld"
        lld.write_text(f'#!/bin/sh\nshift 2\nexec {sys.executable} -m ziglang ld.lld "$@"\n')
        script.write_text(
            "#!/bin/sh\n"
            'if [ "$1" = --version ]; then echo "HIP version: 7.0.1"; echo "AMD clang version 20.0.0"; exit; fi\n'
            f'exec {sys.executable} -m ziglang clang -nogpuinc -nogpulib -B{tmp_path} "$@"\n'
        )
        script.chmod(0o755)
        lld.chmod(0o755)
        monkeypatch.setenv("MORI_JIT_HIPCC", str(script))
        return script

    def test_it_compiles(self) -> None:
        assert elf.amd_kernels(jit.compile(scale("gfx950"), compiler="hipcc")) == {"scale"}

    def test_its_versions_are_part_of_the_key(self) -> None:
        assert hip_clang.find_hipcc("gfx942").identity == "hipcc HIP version: 7.0.1 clang version 20.0.0"

    def test_its_variables_are_part_of_the_key(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HIPCC_COMPILE_FLAGS_APPEND", "-g")
        assert hip_clang.find_hipcc("gfx942").identity.endswith("clang version 20.0.0 HIPCC_COMPILE_FLAGS_APPEND=-g")

    def test_a_path_that_leads_nowhere_is_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("MORI_JIT_HIPCC", "/nowhere/hipcc")
        with pytest.raises(jit.CompilerNotFound, match=r"no program /nowhere/hipcc \(MORI_JIT_HIPCC\)"):
            jit.compile(scale(), compiler="hipcc")


@pytest.fixture(scope="module")
def fake_hiprtc(tmp_path_factory: pytest.TempPathFactory) -> Path:
    library = tmp_path_factory.mktemp("rocm") / "libhiprtc.so"
    source = Path(__file__).with_name("fake_hiprtc.cpp").read_text()
    done = compile_cxx(source, "-shared", "-fPIC", "-o", str(library))
    assert done.returncode == 0, done.stderr
    return library


class TestHipRtc:
    @pytest.fixture(autouse=True)
    def only_library(self, fake_hiprtc: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        job = resolve(jit.Spec("empty", EMPTY, target="hip", arch="gfx942"))
        (tmp_path / "code").write_bytes(hip_clang.find_ziglang("gfx942").compile(job))
        monkeypatch.setenv("FAKE_HIPRTC_CODE", str(tmp_path / "code"))
        monkeypatch.setenv("FAKE_HIPRTC_NOTES", str(tmp_path / "notes"))
        monkeypatch.setattr(hiprtc, "_candidates", lambda: iter([str(fake_hiprtc)]))

    def test_it_compiles_a_file_whose_headers_are_found(self, tmp_path: Path) -> None:
        (tmp_path / "beside.hpp").write_text("")
        (tmp_path / "k.hip").write_text('#include "beside.hpp"\n' + EMPTY)
        spec = jit.Spec("k", tmp_path / "k.hip", kernels=("empty",), target="hip", arch="gfx942")
        assert elf.amd_kernels(jit.compile(spec, compiler="hiprtc")) == {"empty"}
        notes = (tmp_path / "notes").read_text().splitlines()
        assert "name k.hip" in notes and f"option -I{tmp_path}" in notes
        assert {f"option {flag}" for flag in EXACT_ARITHMETIC_HIP} < set(notes)

    def test_it_is_the_first_choice(self) -> None:
        row, compiler = compilers.choose("hip", "gfx942")
        assert row.name == "hiprtc" and compiler.identity.startswith("hiprtc 9.1 (")

    def test_a_mistake_is_reported(self) -> None:
        with pytest.raises(jit.CompileError, match="(?s)HIPRTC_ERROR_COMPILATION.*line 1: a mistake"):
            jit.compile(jit.Spec("k", "mistake", target="hip", arch="gfx942"), compiler="hiprtc")

    def test_an_arch_that_it_does_not_know_is_for_the_next(self) -> None:
        assert compilers.choose("hip", "gfx950")[0].name == "ziglang"

    def test_a_file_that_is_no_library_is_passed_over(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "libhiprtc.so").write_text("no library")
        monkeypatch.setattr(hiprtc, "_candidates", lambda: iter([str(tmp_path / "libhiprtc.so")]))
        with pytest.raises(jit.CompilerNotFound, match=r"hiprtc: .*libhiprtc\.so"):
            jit.compile(scale(), compiler="hiprtc")


def test_a_cubin_is_no_code_object_for_amd(tmp_path: Path) -> None:
    source, output = tmp_path / "empty.cpp", tmp_path / "empty.o"
    source.write_text("void empty() {}\n")
    subprocess.run(["g++", "-c", source, "-o", output], check=True)
    with pytest.raises(ValueError, match="no code object for AMD GPUs: an ELF object for machine"):
        elf.amd_kernels(output.read_bytes())
