"""The real compilers, where they are installed; none of this needs a GPU."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from mori import jit
from mori.jit import compilers, elf, nvcc, nvrtc
from mori.jit.job import resolve
from mori.jit.toolchain import Unavailable

SCALE = """
template <class T> concept Number = sizeof(T) <= 8;
template <Number T> __device__ T twice(T x) { return x + x; }
extern "C" __global__ void scale(float* x, float y) { x[threadIdx.x] = twice(x[threadIdx.x] * FACTOR + y); }
"""


@pytest.fixture(params=["nvrtc", "nvcc"])
def compiler(request: pytest.FixtureRequest) -> str:
    (row,) = (row for row in compilers.COMPILERS if row.name == request.param)
    try:
        row.find("sm_90")
    except Unavailable as reason:
        pytest.skip(f"{row.name}: {reason}")
    return row.name


def test_it_compiles_and_the_next_process_finds_it(compiler: str, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = jit.Spec("scale", SCALE, kernels=("scale",), constants={"FACTOR": "3.0f"})
    binary = jit.compile(spec, compiler=compiler)
    assert elf.cuda_kernels(binary) == {"scale"}
    jit.forget()
    monkeypatch.setattr(nvrtc.Nvrtc, "compile", None)
    monkeypatch.setattr(nvcc.Nvcc, "compile", None)
    assert jit.compile(spec, compiler=compiler) == binary


def test_a_mistake_is_reported_with_its_line(compiler: str) -> None:
    with pytest.raises(jit.CompileError) as caught:
        jit.compile(jit.Spec("scale", SCALE), compiler=compiler)
    error = caught.value
    assert "FACTOR" in error.log and "scale.cu(4)" in error.log
    assert "--fmad=false" in error.command and "--gpu-architecture=sm_90" in error.command
    assert error.compiler.startswith(compiler)


def test_nothing_is_found_beside_the_process(compiler: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a header would be in no cache key."""
    (tmp_path / "stray.hpp").write_text("")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(jit.CompileError, match="stray.hpp"):
        jit.compile(jit.Spec("k", '#include "stray.hpp"\n'), compiler=compiler)
    folder = tmp_path / "deep"
    folder.mkdir()
    (folder / "k.cu").write_text('#include "../stray.hpp"\n')
    assert jit.compile(jit.Spec("k", folder / "k.cu"), compiler=compiler)
    assert jit.compile(jit.Spec("k", '#include "stray.hpp"\n', include_dirs=(tmp_path,)), compiler=compiler)


def test_an_unknown_arch_is_no_compiler(compiler: str) -> None:
    with pytest.raises(jit.CompilerNotFound, match=f"(?s)sm_20.*{compiler} [0-9.]+.*does not know sm_20.*Install"):
        jit.compile(jit.Spec("k", "", arch="sm_20"), compiler=compiler)


# Some ten seconds each; the two share their front end, so for every change one will do.
@pytest.mark.parametrize("compiler", ["nvrtc", pytest.param("nvcc", marks=pytest.mark.full)], indirect=True)
def test_the_kernels_of_the_package_compile(compiler: str) -> None:
    source = Path("runtime", "cuda_kernels.cu")
    if not (jit.source_root() / source).is_file():
        pytest.skip(f"no {source} below {jit.source_root()}")
    spec = jit.Spec("ep", source, kernels=("mori_dispatch",), constants={"MORI_KERNEL": "dispatch"})
    assert elf.cuda_kernels(jit.compile(spec, compiler=compiler)) == {"mori_dispatch"}
    assert len(resolve(spec).include_dirs) == 1


@pytest.mark.parametrize("version, standard", [((13, 0), "c++20"), ((12, 0), "c++20"), ((11, 8), "c++17")])
def test_old_releases_get_an_older_standard(version: tuple[int, int], standard: str) -> None:
    compiler = nvrtc.Nvrtc.__new__(nvrtc.Nvrtc)
    compiler.version = version
    assert f"-std={standard}" in compiler.options(resolve(jit.Spec("k", "")))


def test_the_library_of_torchs_release_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for file in ("cu13/lib/libnvrtc.so.13", "cuda_nvrtc/lib/libnvrtc.so.12"):
        (tmp_path / "nvidia" / file).parent.mkdir(parents=True)
        (tmp_path / "nvidia" / file).touch()
    monkeypatch.syspath_prepend(tmp_path)
    for cuda, first in (("12.8", "libnvrtc.so.12"), ("13.0", "libnvrtc.so.13"), (None, "libnvrtc.so.13")):
        monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(version=SimpleNamespace(cuda=cuda)))
        candidates = [path for path in nvrtc._candidates() if path.startswith(str(tmp_path))]
        assert [Path(path).name for path in candidates][0] == first and len(candidates) == 2


def test_the_release_of_torch_is_read_without_importing_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise AssertionError('imported')")
    version = tmp_path / "torch" / "version.py"
    monkeypatch.syspath_prepend(tmp_path)
    for text, major in (("cuda: Optional[str] = '13.0'\n", 13), ("cuda = None\n", None), ("", None)):
        version.write_text(text)
        assert nvrtc.torch_cuda_major() == major
