"""Launch sizes: call over config in MANUAL mode; tuned rules, else the table, in AUTO mode."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from mori import target
from mori.ops import launch as launching
from mori.ops import tuning_config
from mori.ops.config import Limits, check_config
from mori.ops.kernel_types import EpDispatchCombineQuantType, normalize_quant_type
from mori.ops.launch import AUTO_LAUNCH, LaunchChooser

from .test_config import KernelType, make_config
from .tuning import blocks, combine_rule, rule, write

BF16 = torch.bfloat16


def limits_of(config: Any) -> Limits:
    """The limits of a config, also of one whose kernel or quant type this version cannot build."""
    plain = make_config(**(vars(config) | {"kernel_type": KernelType.IntraNode, "quant_type": "none"}))
    quant_type: EpDispatchCombineQuantType = normalize_quant_type(config.quant_type)
    return check_config(plain)._replace(kernel_type=config.kernel_type, quant_type=quant_type)


def chooser(**changes: Any) -> LaunchChooser:
    config = make_config(**({"block_num": 80, "rdma_block_num": 3, "warp_num_per_block": 16} | changes))
    return LaunchChooser(config, limits_of(config))


def rows(tokens: int, hidden: int = 7168, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.empty(tokens, hidden, dtype=dtype, device="meta")


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setattr(tuning_config, "CONFIG_DIR", tmp_path)
    monkeypatch.setattr(tuning_config.TuningConfigManager, "_cache", {})
    monkeypatch.delenv("MORI_EP_TUNING_CONFIG", raising=False)
    monkeypatch.delenv("MORI_EP_LAUNCH_CONFIG_MODE", raising=False)
    return tmp_path


@pytest.fixture
def auto(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MORI_EP_LAUNCH_CONFIG_MODE", "AUTO")


# ---- MANUAL


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
@pytest.mark.parametrize("kernel_type", list(KernelType))
def test_manual_takes_each_number_from_the_call_else_from_the_config(
    kernel_type: KernelType, call: tuple[int, ...], expected: tuple[int, ...]
):
    manual = chooser(kernel_type=kernel_type)
    assert manual.dispatch(rows(5), *call) == expected
    assert manual.combine(rows(5), 5, True, *call) == expected
    assert manual.untuned(*call) == manual.at_capacity(True, *call) == manual.at_capacity(False, *call) == expected


def test_manual_follows_the_config_and_reads_no_rules(folder: Path):
    write(folder / "host_IntraNode_ep8_dispatch.json", [rule()])
    config = make_config(block_num=80)
    manual = LaunchChooser(config, check_config(config))
    assert (manual.mode, manual.auto, manual.dispatch_rules, manual.combine_rules) == ("MANUAL", None, None, None)
    assert manual.dispatch(rows(5)).block_num == 80
    config.block_num = 40
    assert manual.dispatch(rows(5)).block_num == 40


# ---- AUTO


@pytest.mark.parametrize("call", [(), (1, 2, 3)])
@pytest.mark.parametrize("kernel_type", list(KernelType))
def test_auto_without_rules_is_the_table_whatever_the_call_says(
    auto: None, kernel_type: KernelType, call: tuple[int, ...]
):
    two_level = kernel_type in (KernelType.InterNodeV1, KernelType.InterNodeV1LL)
    expected = (96, 64, 8) if two_level else (128, 0, 16)
    chosen = chooser(kernel_type=kernel_type)
    assert chosen.auto == AUTO_LAUNCH[kernel_type] == expected
    assert (chosen.mode, chosen.dispatch_rules, chosen.combine_rules) == ("AUTO", [], [])
    assert chosen.dispatch(rows(5), *call) == chosen.combine(rows(5), 5, False, *call) == expected
    assert chosen.untuned(*call) == chosen.at_capacity(True, *call) == chosen.at_capacity(False, *call) == expected


@pytest.mark.parametrize("kernel_type", list(KernelType))
def test_auto_reads_the_rules_of_its_kernel_type(auto: None, folder: Path, kernel_type: KernelType):
    for place, each in enumerate(KernelType):
        write(folder / f"host_{each.name}_ep8_dispatch.json", [rule(block_num=place)])
        write(folder / f"host_{each.name}_ep8_combine.json", [combine_rule(block_num=10 + place)])
        write(folder / f"host_{each.name}_ep4_dispatch.json", [rule(block_num=99)])
    chosen = chooser(kernel_type=kernel_type)
    place = list(KernelType).index(kernel_type)
    assert (blocks(chosen.dispatch_rules), blocks(chosen.combine_rules)) == ([place], [10 + place])
    assert chosen.dispatch(rows(5), 1, 2, 3) == (place, 0, 8)  # all three, whatever the call says
    assert chosen.combine(rows(5), 5, False, 1, 2, 3) == (10 + place, 0, 8)
    assert chosen.untuned(1, 2, 3) == AUTO_LAUNCH[kernel_type]


def test_dispatch_is_looked_up_by_the_input_of_the_call(auto: None, folder: Path):
    rules = [
        rule(64, 1),
        rule(512, 2),
        rule(512, 3, hidden_dim=4096),
        rule(512, 4, dtype="fp8_e4m3"),
        rule(512, 5, topk=8),
        rule(1024, 6, topk=4),
    ]
    write(folder / "host_IntraNode_ep8_dispatch.json", rules)
    six = chooser(num_experts_per_token=6)
    assert six.dispatch(rows(10)).block_num == 1
    assert six.dispatch(rows(100)).block_num == 2
    assert six.dispatch(rows(100, 4096)).block_num == 3
    assert six.dispatch(rows(100, dtype=torch.float8_e4m3fn)).block_num == 4
    assert chooser(num_experts_per_token=8).dispatch(rows(10)).block_num == 5
    assert chooser(num_experts_per_token=4).dispatch(rows(10)).block_num == 6
    assert six.dispatch(rows(0)).block_num == 1
    # A type that rules cannot name gets the table.
    assert six.dispatch(rows(10, dtype=torch.float32)) == AUTO_LAUNCH[KernelType.IntraNode]


def test_combine_is_looked_up_by_tokens_zero_copy_and_quant_type_too(auto: None, folder: Path):
    quantised = {"quant_type": "fp8_direct_cast"}
    rules = [
        combine_rule(64, 1),
        combine_rule(512, 2),
        combine_rule(64, 3, zero_copy=True),
        combine_rule(64, 4, **quantised),
    ]
    write(folder / "host_IntraNode_ep8_combine.json", rules)
    plain, cast = chooser(), chooser(quant_type="FP8_direct_cast")
    # The rows of the input are those that were received; the count that matters is that of the tokens.
    assert plain.combine(rows(4096), 64, False).block_num == 1
    assert plain.combine(rows(4096), 65, False).block_num == 2
    assert plain.combine(rows(4096), 65, True).block_num == 3
    assert cast.combine(rows(4096), 64, False).block_num == 4
    assert cast.combine(rows(4096), 64, True) == AUTO_LAUNCH[KernelType.IntraNode]


def test_launch_config_of_the_largest_call(auto: None, folder: Path):
    write(folder / "host_IntraNode_ep8_dispatch.json", [rule(64, 1), rule(4096, 2)])
    write(folder / "host_IntraNode_ep8_combine.json", [combine_rule(9, 3), combine_rule(9, 4, zero_copy=True)])
    sizes = {"max_num_inp_token_per_rank": 65, "hidden_dim": 7168, "data_type": BF16}
    assert chooser(**sizes).at_capacity(True, 1, 2, 3).block_num == 2
    assert chooser(**sizes | {"max_num_inp_token_per_rank": 64}).at_capacity(True).block_num == 1
    assert chooser(**sizes).at_capacity(False).block_num == 3
    assert chooser(**sizes, use_external_inp_buf=False).at_capacity(False).block_num == 4
    assert chooser(**sizes | {"data_type": torch.float32}).at_capacity(True) == AUTO_LAUNCH[KernelType.IntraNode]


def test_answers_are_looked_up_once_and_not_kept_without_bound(
    auto: None, folder: Path, monkeypatch: pytest.MonkeyPatch
):
    write(folder / "host_IntraNode_ep8_dispatch.json", [rule(64, 1), rule(512, 2)])
    monkeypatch.setattr(launching, "_CAPACITY", 3)
    asked = []

    def counting(rules: Any, dtype: Any, tokens: int, *more: Any, **options: Any) -> Any:
        asked.append(tokens)
        return tuning_config.lookup(rules, dtype, tokens, *more, **options)

    monkeypatch.setattr(launching, "lookup", counting)
    chosen = chooser()
    for tokens in (1, 1, 65, 1, 65, 70, 1, 80, 1):
        assert chosen.dispatch(rows(tokens)).block_num == (1 if tokens <= 64 else 2)
    assert asked == [1, 65, 70, 80, 1]


# ---- what can go wrong


def test_rules_of_an_unusable_file_are_a_warning(auto: None, folder: Path, caplog: pytest.LogCaptureFixture):
    (folder / "host_IntraNode_ep8_dispatch.json").write_text("{")
    assert chooser().dispatch(rows(5)) == (128, 0, 16)
    assert "is not used" in caplog.text


def test_whatever_fails_is_a_warning(auto: None, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch):
    def lost() -> Any:
        raise RuntimeError("the GPU fell off the bus")

    config = make_config()
    limits = limits_of(config)
    monkeypatch.setattr(target, "current", lost)
    chosen = LaunchChooser(config, limits)
    assert (chosen.dispatch_rules, chosen.combine_rules) == (None, None)
    assert chosen.dispatch(rows(5), 1, 2, 3) == chosen.combine(rows(5), 5, True) == chosen.at_capacity(True)
    [record] = caplog.records
    assert record.levelno == logging.WARNING and "fell off the bus" in record.getMessage()


def test_the_arch_is_that_of_the_target(auto: None, folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(target, "current", lambda: target.TARGETS["cuda"])
    write(folder / "sm_90_IntraNode_ep8_dispatch.json", [rule(64, 7)], gpu_arch="sm_90")
    write(folder / "host_IntraNode_ep8_dispatch.json", [rule(64, 1)])
    assert chooser().dispatch(rows(5)).block_num == 7


@pytest.mark.parametrize("mode", ["auto", "Manual", "TUNED"])
def test_another_mode_is_refused(monkeypatch: pytest.MonkeyPatch, mode: str):
    monkeypatch.setenv("MORI_EP_LAUNCH_CONFIG_MODE", mode)
    with pytest.raises(ValueError, match=rf"MORI_EP_LAUNCH_CONFIG_MODE='{mode}'.*MANUAL, AUTO"):
        chooser()
