from __future__ import annotations

import pytest
import torch

from mori import target


def test_without_a_gpu_the_default_is_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MORI_TARGET", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    current = target.current()
    assert (current.name, current.arch, current.contract_wave) == ("host", "host", 64)


def test_the_contract_wave_can_be_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MORI_TARGET", "host")
    monkeypatch.setenv("MORI_WAVE_SIZE", "32")
    assert target.current().contract_wave == 32
    assert target.TARGETS["host"].contract_wave == 64
    monkeypatch.setenv("MORI_WAVE_SIZE", "48")
    with pytest.raises(ValueError, match="MORI_WAVE_SIZE='48'.*expected 32 or 64"):
        target.current()


def test_accepts_only_memory_it_can_reach() -> None:
    host = target.TARGETS["host"]
    assert host.accepts(torch.empty(1))
    assert not host.accepts(torch.empty(1, device="meta"))
