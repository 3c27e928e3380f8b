"""Launch sizes: call over config in MANUAL mode, the table in AUTO mode."""

from __future__ import annotations

import pytest

from mori.ops.launch import AUTO_LAUNCH, launch_mode, resolve_launch

from .test_config import KernelType, make_config

CONFIG = make_config(block_num=80, rdma_block_num=3, warp_num_per_block=16)


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        ((), (80, 3, 16)),
        ((-1, -1, -1), (80, 3, 16)),
        ((0, 0, 0), (80, 3, 16)),
        ((128,), (128, 3, 16)),
        ((-1, 7), (80, 7, 16)),
        ((-1, -1, 4), (80, 3, 4)),
        ((1, 2, 3), (1, 2, 3)),
    ],
)
def test_manual_takes_each_number_from_the_call_else_from_the_config(call: tuple[int, ...], expected: tuple[int, ...]):
    assert resolve_launch(CONFIG, None, *call) == expected


@pytest.mark.parametrize("call", [(), (1, 2, 3)])
def test_auto_ignores_call_and_config(call: tuple[int, ...]):
    two_level = {KernelType.InterNodeV1, KernelType.InterNodeV1LL}
    for kernel_type in KernelType:
        expected = (96, 64, 8) if kernel_type in two_level else (128, 0, 16)
        assert resolve_launch(CONFIG, AUTO_LAUNCH[kernel_type], *call) == expected


def test_mode_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("MORI_EP_LAUNCH_CONFIG_MODE", raising=False)
    assert launch_mode() == "MANUAL"
    monkeypatch.setenv("MORI_EP_LAUNCH_CONFIG_MODE", "AUTO")
    assert launch_mode() == "AUTO"
    monkeypatch.setenv("MORI_EP_LAUNCH_CONFIG_MODE", "auto")
    with pytest.raises(ValueError, match=r"MORI_EP_LAUNCH_CONFIG_MODE='auto'.*MANUAL, AUTO"):
        launch_mode()
