"""Which target a process gets with a torch that pretends to be built with ROCm."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from mori import target


def have(monkeypatch: pytest.MonkeyPatch, arch: str | None, release: str | None = "7.1") -> None:
    """torch with ROCm `release`, seeing one GPU of `arch` (None: none)."""
    monkeypatch.delenv("MORI_TARGET", raising=False)
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", release)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: arch is not None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(gcnArchName=arch))


@pytest.mark.parametrize("arch, wave", [("gfx942", 64), ("gfx950", 64), ("gfx1250", 32)])
def test_a_visible_gpu_is_the_default(monkeypatch: pytest.MonkeyPatch, arch: str, wave: int) -> None:
    have(monkeypatch, f"{arch}:sramecc+:xnack-")
    current = target.current()
    assert (current.name, current.arch, current.contract_wave) == ("hip", arch, wave)
    assert (current.device_type, current.is_device) == ("cuda", True)  # torch's word for AMD GPUs as well


def test_the_variable_overrides_it(monkeypatch: pytest.MonkeyPatch) -> None:
    have(monkeypatch, "gfx942")
    monkeypatch.setenv("MORI_TARGET", "host")
    assert target.current().name == "host"


@pytest.mark.parametrize(
    "arch, release, reason",
    [("gfx942", None, "built without ROCm"), (None, "7.1", "sees no GPU .*HIP_VISIBLE_DEVICES")],
)
def test_asking_for_what_cannot_be_says_why(
    monkeypatch: pytest.MonkeyPatch, arch: str | None, release: str | None, reason: str
) -> None:
    have(monkeypatch, arch, release)
    assert target.current().name == "host"
    monkeypatch.setenv("MORI_TARGET", "hip")
    with pytest.raises(RuntimeError, match=f"MORI_TARGET=hip, but torch .* {reason}"):
        target.current()


def test_a_gpu_without_kernels_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    have(monkeypatch, "gfx90a:sramecc+:xnack-")
    with pytest.raises(NotImplementedError, match=r"GPU 0 \(a GPU\) is gfx90a; .*gfx942, gfx950, gfx1250"):
        target.current()
