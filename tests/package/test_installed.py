"""What a wheel holds, and what its extension needs."""

from __future__ import annotations

import importlib.util
import subprocess
from importlib import resources
from pathlib import Path

from tests.package.commands import ROOT, python


def extension() -> Path:
    spec = importlib.util.find_spec("mori._core")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin)


def test_device_sources_are_package_data() -> None:
    installed = extension().parent / "csrc"
    for folder in ("device", "include/mori", "kernels", "layout"):
        names = {path.name for path in (ROOT / "csrc" / folder).glob("*.hpp")}
        assert names
        assert {path.name for path in (installed / folder).glob("*.hpp")} == names
    # What a GPU's driver loads is compiled from these; host sources stay out.
    entry_points = {path.name for path in (ROOT / "csrc" / "runtime").iterdir() if path.suffix in (".cu", ".hip")}
    assert {path.name for path in (installed / "runtime").iterdir()} == entry_points


def test_data_files_are_there() -> None:
    assert resources.files("mori").joinpath("py.typed").is_file()
    assert resources.files("mori.demo").joinpath("guide_example.txt").is_file()
    assert resources.files("mori.ops").joinpath("tuning_configs", "README.md").is_file()


def test_the_extension_needs_no_torch_and_no_gpu_runtime() -> None:
    dynamic = subprocess.run(["readelf", "-d", extension()], capture_output=True, text=True, check=True).stdout
    needed = {line.split("[")[1].rstrip("]") for line in dynamic.splitlines() if "(NEEDED)" in line}
    assert needed
    allowed = ("libc.", "libm.", "libstdc++.", "libgcc_s.", "libdl.", "libpthread.", "librt.", "ld-linux")
    assert not [library for library in needed if not library.startswith(allowed)]


def test_the_extension_exports_its_entry_point_only() -> None:
    listing = subprocess.run(
        ["nm", "-D", "--defined-only", extension()], capture_output=True, text=True, check=True
    ).stdout
    exported = {line.split()[-1].split("@")[0] for line in listing.splitlines() if " T " in line}
    assert exported == {"PyInit__core"}


def test_info_names_everything() -> None:
    result = python("-m", "mori", "info", MORI_HOST_THREADS="3")
    assert result.returncode == 0, result.stderr
    lines = {line[:15].strip(): line[15:].strip() for line in result.stdout.splitlines()}
    assert lines["target"] == lines["arch"] == "host"
    assert lines["host kernels"] in ("baseline", "avx2", "avx512")
    assert "MORI_HOST_THREADS=3" in lines["environment"]
    assert "not installed" not in lines["torch"]
