"""Which target a process gets, with a torch that pretends to have GPUs."""

from __future__ import annotations

import pytest
import torch

from mori import target


class FakeCuda:
    """torch as if it were built with CUDA `release` and saw one GPU of `capability` (None: none)."""

    def __init__(self, patch: pytest.MonkeyPatch, release: str | None, capability: tuple[int, int] | None) -> None:
        patch.delenv("MORI_TARGET", raising=False)
        patch.setattr(torch.version, "cuda", release)
        patch.setattr(torch.cuda, "is_available", lambda: capability is not None)
        patch.setattr(torch.cuda, "get_device_capability", lambda: capability)
        patch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
        patch.setattr(torch.cuda, "current_device", lambda: 0)


def test_a_visible_gpu_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeCuda(monkeypatch, "13.0", (9, 0))
    current = target.current()
    assert (current.name, current.arch, current.device_type, current.contract_wave) == ("cuda", "sm_90", "cuda", 32)
    assert current.is_device


def test_the_arch_is_that_of_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeCuda(monkeypatch, "13.0", (10, 3))
    assert target.current().arch == "sm_103"


@pytest.mark.parametrize("release, capability", [(None, (9, 0)), ("13.0", None)])
def test_without_one_it_is_the_host(
    monkeypatch: pytest.MonkeyPatch, release: str | None, capability: tuple[int, int] | None
) -> None:
    FakeCuda(monkeypatch, release, capability)
    assert target.current().name == "host"
    assert not target.current().is_device


def test_the_variable_overrides_a_visible_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeCuda(monkeypatch, "13.0", (9, 0))
    monkeypatch.setenv("MORI_TARGET", "host")
    assert target.current().name == "host"


@pytest.mark.parametrize(
    "release, capability, reason", [(None, (9, 0), "built without CUDA"), ("13.0", None, "sees no GPU")]
)
def test_asking_for_what_cannot_be_says_why(
    monkeypatch: pytest.MonkeyPatch, release: str | None, capability: tuple[int, int] | None, reason: str
) -> None:
    FakeCuda(monkeypatch, release, capability)
    monkeypatch.setenv("MORI_TARGET", "cuda")
    with pytest.raises(RuntimeError, match=f"MORI_TARGET=cuda, but torch .* {reason}.*MORI_TARGET"):
        target.current()


def test_an_older_gpu_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeCuda(monkeypatch, "13.0", (8, 0))
    with pytest.raises(NotImplementedError, match=r"GPU 0 \(a GPU\) has compute capability 8\.0.*needs 9\.0"):
        target.current()
