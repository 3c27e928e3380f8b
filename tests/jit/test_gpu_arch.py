"""What programs written for other releases ask mori.jit about AMD GPUs, on machines with and without one."""

from __future__ import annotations

import ctypes
import importlib
import sys
from types import SimpleNamespace

import pytest
import torch

from mori.jit.config import SUPPORTED_GPU_ARCHS, detect_gpu_arch, is_gfx125x


@pytest.fixture(autouse=True)
def no_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MORI_GPU_ARCHS", raising=False)


def have_gpu(monkeypatch: pytest.MonkeyPatch, arch: str) -> None:
    monkeypatch.setattr(torch.version, "hip", "7.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(gcnArchName=arch))


@pytest.mark.parametrize("arch", ["gfx942", "gfx950", "gfx1250"])
def test_the_gpu_says_which_it_is(monkeypatch: pytest.MonkeyPatch, arch: str) -> None:
    assert arch in SUPPORTED_GPU_ARCHS
    for text in (arch, arch + ":sramecc+:xnack-"):
        have_gpu(monkeypatch, text)
        assert detect_gpu_arch() == arch


@pytest.mark.parametrize(
    "text, arch",
    [("gfx950", "gfx950"), ("gfx942;gfx950", "gfx942"), ("gfx1250, gfx942", "gfx1250"), ("gfx942:xnack-", "gfx942")],
)
def test_the_variable_wins_over_the_gpu(monkeypatch: pytest.MonkeyPatch, text: str, arch: str) -> None:
    have_gpu(monkeypatch, "gfx906")
    monkeypatch.setenv("MORI_GPU_ARCHS", text)
    assert detect_gpu_arch() == arch


def test_unsupported_archs_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    have_gpu(monkeypatch, "gfx906:xnack-")
    with pytest.raises(RuntimeError, match="the current GPU is 'gfx906'; supported AMD archs: gfx942, gfx950, gfx1250"):
        detect_gpu_arch()
    monkeypatch.setenv("MORI_GPU_ARCHS", "sm_90")
    with pytest.raises(RuntimeError, match="MORI_GPU_ARCHS=sm_90 is 'sm_90'; supported"):
        detect_gpu_arch()


def test_without_an_amd_gpu_there_is_no_arch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", None)
    with pytest.raises(RuntimeError, match=r"no AMD GPU: torch \S+ is built without ROCm\. MORI_GPU_ARCHS names"):
        detect_gpu_arch()
    have_gpu(monkeypatch, "gfx942")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match=r"no AMD GPU: torch \S+ sees no GPU"):
        detect_gpu_arch()


def test_the_family_of_gfx1250(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", None)
    assert is_gfx125x() is False
    monkeypatch.setenv("MORI_GPU_ARCHS", "gfx1250")
    assert is_gfx125x() is True
    monkeypatch.setenv("MORI_GPU_ARCHS", "gfx942")
    assert is_gfx125x() is False


def test_without_hip_its_driver_cannot_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(name: str) -> object:
        tried.append(name)
        raise OSError(name)

    tried: list[str] = []
    monkeypatch.setattr(ctypes, "CDLL", load)
    monkeypatch.delitem(sys.modules, "mori.jit.hip_driver", raising=False)
    for attempt in range(2):
        with pytest.raises(ImportError, match=r"there is no HIP runtime: the loader finds none of libamdhip64\.so,"):
            importlib.import_module("mori.jit.hip_driver")
        assert len(tried) == 3 * (attempt + 1)


def test_with_hip_its_driver_is_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(name: str) -> object:
        if name != "libamdhip64.so.6":
            raise OSError(name)
        return library

    library = object()
    monkeypatch.setattr(ctypes, "CDLL", load)
    monkeypatch.delitem(sys.modules, "mori.jit.hip_driver", raising=False)
    try:
        assert importlib.import_module("mori.jit.hip_driver")._hip is library
    finally:
        sys.modules.pop("mori.jit.hip_driver", None)
