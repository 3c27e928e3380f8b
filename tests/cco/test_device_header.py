"""The device header: teams of any topology, versions, and that the compilers of GPUs take it."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest

from mori import _core, jit
from mori.cco.device.kernels import _library
from tests.cco.members import SOURCE
from tests.package.commands import ROOT

ARCHS = {"sm_90": "cuda", "gfx942": "hip", "gfx950": "hip", "gfx1250": "hip"}
COOPS = ("ccoCoopThread", "ccoCoopWarp", "ccoCoopBlock")
EXAMPLES = {"barrier": "count_rounds", "lsa_put": "put", "lsa_allreduce": "all_reduce"}
INCLUDES = ("include", ".")
TOPOLOGIES = [(1, 1), (2, 2), (8, 8), (4, 1), (4, 2), (12, 4), (16, 8)]


@pytest.fixture(scope="module")
def teams(kernel_folder: Path) -> ctypes.CDLL:
    source = Path(__file__).with_name("teams.cpp")
    spec = jit.Spec("teams", source, ("team_of",), INCLUDES, flags=("-Wall", "-Werror"), target="host", arch="host")
    return _library(jit.compile(spec))


@pytest.mark.parametrize("world, lsa", TOPOLOGIES)
def test_teams(teams: ctypes.CDLL, world: int, lsa: int) -> None:
    for rank in range(world):
        node, place = divmod(rank, lsa)
        neighbours = list(range(node * lsa, (node + 1) * lsa))
        expected = {
            0: (rank, list(range(world))),
            1: (place, neighbours),
            2: (-1, [other for other in range(world) if other not in neighbours]),
            3: (-1, [other * lsa + place for other in range(world // lsa) if other != node]),
        }
        for which, (position, members) in expected.items():
            found = (ctypes.c_int32 * (world + 2))()
            teams.team_of(world, lsa, rank, which, found)
            assert (found[0], found[1], found[2 : 2 + found[0]]) == (len(members), position, members)


def test_a_descriptor_of_another_version_is_told_apart(teams: ctypes.CDLL) -> None:
    teams.is_compatible.restype = ctypes.c_bool
    version, size = _core.CCO_VERSION, _core.CCO_DEVICE_COMMUNICATOR_BYTES
    assert teams.is_compatible(version, size)
    assert not teams.is_compatible(version + 1, size)
    assert not teams.is_compatible(version, size + 8)


def compile_for(arch: str, name: str, source: str | Path, **constants: int | str) -> bytes:
    spec = jit.Spec(name, source, (name,), INCLUDES, constants, target=ARCHS[arch], arch=arch)
    try:
        return jit.compile(spec)
    except jit.CompilerNotFound as reason:
        pytest.skip(str(reason))


@pytest.mark.parametrize("arch", ["sm_90", "gfx942"])
def test_a_header_of_another_release_does_not_compile(arch: str, kernel_folder: Path) -> None:
    source = "#include <mori/cco.hpp>\nstruct Nothing {};\nCCO_KERNEL(nothing, Nothing) { (void)arguments; }\n"
    assert compile_for(arch, "nothing", source, MORI_CCO_LIBRARY_VERSION=_core.CCO_VERSION)
    with pytest.raises(jit.CompileError) as caught:
        compile_for(arch, "nothing", source, MORI_CCO_LIBRARY_VERSION=_core.CCO_VERSION + 1)
    assert "is not of the release of mori that is imported" in caught.value.log


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("coop", COOPS)
def test_barriers_compile_for_every_group(arch: str, coop: str, kernel_folder: Path) -> None:
    assert compile_for(arch, "barriers", SOURCE, COOP=coop)[:4] == b"\x7fELF"


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("example", EXAMPLES)
def test_examples_compile_for_every_gpu(arch: str, example: str, kernel_folder: Path) -> None:
    assert compile_for(arch, EXAMPLES[example], ROOT / "examples" / "cco" / f"{example}.cpp")[:4] == b"\x7fELF"
