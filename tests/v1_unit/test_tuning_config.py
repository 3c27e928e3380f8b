"""Which tuning file is read, and what is taken from it: nothing wrong with a file is more than a warning."""

from __future__ import annotations

import json
import logging
from importlib import resources
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import mori
from mori.ops import tuning_config
from mori.ops.kernel_types import EpDispatchCombineQuantType as QuantType
from mori.ops.tuning_config import (
    CONFIG_STR_TO_DTYPE,
    CONFIG_STR_TO_SHORT_NAME,
    DTYPE_TO_CONFIG_STR,
    TuningConfigManager,
    build_config_filename,
    config_path_for,
    dtype_to_config_str,
    kernel_type_to_config_str,
    quant_type_to_config_str,
)

from .tuning import blocks, combine_rule, rule, write

KernelType = mori.ops.EpDispatchCombineKernelType


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty folder of tuning files, and a manager that has read none."""
    monkeypatch.setattr(tuning_config, "CONFIG_DIR", tmp_path)
    monkeypatch.setattr(TuningConfigManager, "_cache", {})
    monkeypatch.delenv("MORI_EP_TUNING_CONFIG", raising=False)
    return tmp_path


def manager(gpu_model: str | None = None) -> TuningConfigManager:
    return TuningConfigManager.get_instance("host", KernelType.IntraNode, 8, gpu_model)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


# ---- spellings


def test_element_types_have_names():
    expected = {"bf16": "bfloat16", "fp8_e4m3_fnuz": "float8_e4m3fnuz", "fp8_e4m3": "float8_e4m3fn"}
    if hasattr(torch, "float4_e2m1fn_x2"):
        expected["fp4"] = "float4_e2m1fn_x2"
    assert {name: str(dtype).removeprefix("torch.") for name, dtype in CONFIG_STR_TO_DTYPE.items()} == expected
    assert {dtype: name for name, dtype in CONFIG_STR_TO_DTYPE.items()} == DTYPE_TO_CONFIG_STR
    assert dtype_to_config_str(torch.bfloat16) == "bf16"
    with pytest.raises(KeyError, match=r"cannot name torch\.float32; they know bf16"):
        dtype_to_config_str(torch.float32)
    assert CONFIG_STR_TO_SHORT_NAME == {
        "bf16": "bf16",
        "fp8_e4m3_fnuz": "fp8fnuz",
        "fp8_e4m3": "fp8ocp",
        "fp4": "fp4",
    }


@pytest.mark.parametrize("kernel_type", list(KernelType))
def test_kernel_types_are_named_by_member_or_name(kernel_type: KernelType):
    assert kernel_type_to_config_str(kernel_type) == kernel_type.name
    assert kernel_type_to_config_str(kernel_type.name) == kernel_type.name


@pytest.mark.parametrize("unknown", ["intranode", "", "V1", 6, None])
def test_unknown_kernel_types_are_refused(unknown: object):
    with pytest.raises(ValueError, match="unknown kernel_type.*IntraNode.*IntraNodeLL"):
        kernel_type_to_config_str(unknown)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "given, expected",
    [
        ("none", "none"),
        (" None_ ", "none"),
        (QuantType.None_, "none"),
        ("FP8_Direct_Cast ", "fp8_direct_cast"),
        (QuantType.Fp8DirectCast, "fp8_direct_cast"),
        (QuantType.Fp8BlockwiseQuant, "fp8_blockwise"),
        (QuantType.Fp4BlockwiseQuant, "fp4_blockwise"),
    ],
)
def test_quant_types_in_any_spelling(given: object, expected: str):
    assert quant_type_to_config_str(given) == expected  # type: ignore[arg-type]


@pytest.mark.parametrize("unknown", ["fp8", "", 1, None])
def test_unknown_quant_types_are_refused(unknown: object):
    with pytest.raises(ValueError, match="invalid quant_type.*fp4_blockwise"):
        quant_type_to_config_str(unknown)  # type: ignore[arg-type]


# ---- names and places


def test_file_names():
    assert build_config_filename("gfx942", KernelType.InterNodeV1, 16, "mi308x", "combine") == (
        "gfx942_mi308x_InterNodeV1_ep16_combine.json"
    )
    assert build_config_filename("sm_90", "AsyncLL", 8) == "sm_90_AsyncLL_ep8_dispatch.json"
    with pytest.raises(ValueError, match="phase 'combined' is unknown, expected one of dispatch, combine"):
        build_config_filename("sm_90", "AsyncLL", 8, phase="combined")


def test_what_is_shipped_was_measured_and_is_named_for_what_it_holds():
    shipped = resources.files("mori.ops").joinpath("tuning_configs")
    assert "measured" in shipped.joinpath("README.md").read_text()
    for file in shipped.iterdir():
        if file.name.endswith(".json"):
            content = json.loads(file.read_text())
            assert content["rules"], file
            model, phase = content["gpu_model"], content["phase"]
            place = (content["gpu_arch"], content["kernel_type"], content["ep_size"])
            assert file.name == build_config_filename(*place, model, phase)


def test_path_priority(folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO)
    wanted = ("gfx942", KernelType.InterNodeV1, 16, "mi300x")

    def path() -> Path:
        return config_path_for(*wanted)

    exact = folder / "gfx942_mi300x_InterNodeV1_ep16_dispatch.json"
    assert path() == exact  # nothing is there
    for other in (
        "gfx942_mi300x_InterNodeV1LL_ep16_dispatch.json",
        "gfx942_mi300x_InterNodeV1_ep8_dispatch.json",
        "gfx942_mi300x_InterNodeV1_ep16_combine.json",
        "gfx950_mi355x_InterNodeV1_ep16_dispatch.json",
        "gfx9420_mi355x_InterNodeV1_ep16_dispatch.json",
        "gfx942_mi355x_AnotherInterNodeV1_ep16_dispatch.json",
    ):
        (folder / other).touch()
    assert path() == exact
    assert not caplog.records

    for model in ("mi325x", "mi308x"):
        (folder / f"gfx942_{model}_InterNodeV1_ep16_dispatch.json").touch()
    assert path().name == "gfx942_mi308x_InterNodeV1_ep16_dispatch.json"  # the first by name
    [record] = caplog.records
    assert record.levelno == logging.INFO and "mi308x" in record.getMessage() and "mi300x" in record.getMessage()

    exact.touch()
    assert path() == exact
    monkeypatch.setenv("MORI_EP_TUNING_CONFIG", "some/where.json")
    assert path() == config_path_for(*wanted, "combine") == Path("some/where.json")


def test_a_file_without_model_serves_all_models(folder: Path):
    (folder / "sm_90_IntraNode_ep8_dispatch.json").touch()
    for model in (None, "h200"):
        assert config_path_for("sm_90", "IntraNode", 8, model).exists()


def test_a_missing_folder_is_as_good_as_an_empty_one(monkeypatch: pytest.MonkeyPatch, folder: Path):
    monkeypatch.setattr(tuning_config, "CONFIG_DIR", folder / "none")
    assert config_path_for("host", "IntraNode", 8).parent == folder / "none"
    assert manager().dispatch_rules == []


# ---- loading


def test_each_phase_has_its_file(folder: Path):
    write(folder / "host_IntraNode_ep8_dispatch.json", [rule(128, 2), rule(64, 1)])
    write(folder / "host_IntraNode_ep8_combine.json", [combine_rule(128, 4), combine_rule(64, 3)])
    loaded = manager()
    assert blocks(loaded.dispatch_rules) == [1, 2]
    assert blocks(loaded.combine_rules) == [3, 4]
    assert loaded.lookup(loaded.combine_rules, torch.bfloat16, 100, 7168, False, "none", 8).block_num == 4


def test_rules_are_read_once_per_arguments(folder: Path, monkeypatch: pytest.MonkeyPatch):
    path = write(folder / "host_IntraNode_ep8_dispatch.json", [rule(128, 1)])
    first = manager()
    write(path, [rule(128, 2)])
    assert manager() is first
    assert TuningConfigManager.get_instance("host", "IntraNode", 8) is first
    other = manager("mi300x")
    assert other is not first and blocks(other.dispatch_rules) == [2]
    # Another file by the variable is another question.
    monkeypatch.setenv("MORI_EP_TUNING_CONFIG", str(write(folder / "other.json", [rule(128, 3)])))
    assert blocks(manager().dispatch_rules) == [3]


def test_what_is_saved_is_seen_by_the_next_op(folder: Path):
    assert manager().dispatch_rules == []
    path = config_path_for("host", "IntraNode", 8)
    TuningConfigManager.save_tuning_result(path, {"gpu_arch": "host"}, rule(128, 7))
    assert blocks(manager().dispatch_rules) == [7]


def test_the_file_of_the_variable_serves_both_phases(folder: Path, monkeypatch: pytest.MonkeyPatch):
    path = write(folder / "both.json", [rule(64, 1), combine_rule(64, 2), combine_rule(32, 3)])
    monkeypatch.setenv("MORI_EP_TUNING_CONFIG", str(path))
    assert blocks(manager().dispatch_rules) == [1]
    assert blocks(manager().combine_rules) == [3, 2]
    # Rules that suit combine suit dispatch too, unless it has its own.
    path = write(folder / "one.json", [combine_rule(64, 2), combine_rule(32, 3)])
    monkeypatch.setenv("MORI_EP_TUNING_CONFIG", str(path))
    assert blocks(manager().dispatch_rules) == blocks(manager().combine_rules) == [3, 2]


def test_a_missing_file_is_mentioned_for_debugging_only(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.DEBUG)
    assert (manager().dispatch_rules, manager().combine_rules) == ([], [])
    assert [record.levelno for record in caplog.records] == [logging.DEBUG] * 2


def test_a_missing_file_that_somebody_named_is_a_warning(
    folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("MORI_EP_TUNING_CONFIG", str(folder / "typo.json"))
    assert manager().dispatch_rules == []
    assert all("there is no tuning file" in text and "typo.json" in text for text in warnings(caplog))
    assert len(warnings(caplog)) == 2


@pytest.mark.parametrize(
    "content, says",
    [
        (b"", "it is no JSON"),
        (b'{"version": "1.0", "rules": [', "it is no JSON"),
        (b"\xff\xfe\x00", "it is no JSON"),
        (b"[" * 100_000, "it is no JSON"),
        (b"[]", "it is no object"),
        (b'{"version": "1.0"}', "it is no object with an array"),
        (b'{"version": "1.0", "rules": {}}', "it is no object with an array"),
        (b'{"version": "2.0", "rules": []}', "it has version '2.0', this mori reads '1.0'"),
        (b'{"version": 1.0, "rules": []}', "it has version 1.0, "),
        (b'{"rules": []}', "it has version None, "),
    ],
)
def test_an_unusable_file_is_a_warning(folder: Path, caplog: pytest.LogCaptureFixture, content: bytes, says: str):
    path = folder / "host_IntraNode_ep8_dispatch.json"
    path.write_bytes(content)
    assert manager().dispatch_rules == []
    [text] = warnings(caplog)
    assert str(path) in text and "is not used" in text and says in text


def test_a_path_that_cannot_be_read_is_a_warning(folder: Path, caplog: pytest.LogCaptureFixture):
    (folder / "host_IntraNode_ep8_dispatch.json").mkdir()
    assert manager().dispatch_rules == []
    [text] = warnings(caplog)
    assert "is not used" in text and "directory" in text


def test_rules_for_another_arch_are_used_with_a_warning(folder: Path, caplog: pytest.LogCaptureFixture):
    write(folder / "host_IntraNode_ep8_dispatch.json", [rule(128, 1)], gpu_arch="gfx942")
    assert blocks(manager().dispatch_rules) == [1]
    [text] = warnings(caplog)
    assert "gpu_arch 'gfx942', this is 'host'" in text


def test_broken_rules_are_left_out_and_the_others_used(folder: Path, caplog: pytest.LogCaptureFixture):
    lacking, odd = combine_rule(1, 1), combine_rule(2, 2, zero_copy="yes")
    del lacking["warp_per_block"]
    path = write(
        folder / "host_IntraNode_ep8_combine.json", [lacking, combine_rule(3, 3), odd, "rule", combine_rule(1, 4)]
    )
    assert blocks(manager().combine_rules) == [4, 3]
    [text] = warnings(caplog)
    assert text == (
        f"3 of 5 rules of tuning file {path} cannot serve combine and are left out; "
        "the first is rule 0: it lacks warp_per_block"
    )


# ---- the model of the GPU


class FakeGpu:
    def __init__(self, monkeypatch: pytest.MonkeyPatch, devices: Path) -> None:
        monkeypatch.setattr(torch.version, "hip", "7.0")
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: (None, self.properties)[device])
        monkeypatch.setattr(tuning_config, "_PCI_DEVICES", devices)
        self._devices = devices
        self.properties = SimpleNamespace(name="AMD Radeon Graphics")

    def at(self, device_id: str) -> None:
        self.properties.pci_domain_id, self.properties.pci_bus_id, self.properties.pci_device_id = 0, 0xC1, 0
        folder = self._devices / "0000:c1:00.0"
        folder.mkdir(exist_ok=True)
        (folder / "device").write_text(device_id + "\n")

    def model(self) -> str | None:
        tuning_config.detect_gpu_model.cache_clear()
        return tuning_config.detect_gpu_model()


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    yield FakeGpu(monkeypatch, tmp_path)
    tuning_config.detect_gpu_model.cache_clear()


def test_without_an_amd_gpu_there_is_no_model(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.version, "hip", None)
    tuning_config.detect_gpu_model.cache_clear()
    assert tuning_config.detect_gpu_model() is None


@pytest.mark.parametrize(
    "device_id, model",
    [("0x74a1", "mi300x"), ("0x74a5", "mi325x"), ("0x74a2", "mi308x"), ("0x75a0", "mi350x"), ("0x75a3", "mi355x")],
)
def test_the_device_id_names_the_model(gpu: FakeGpu, device_id: str, model: str):
    gpu.at(device_id)
    gpu.properties.name = "AMD Instinct MI210X"
    assert gpu.model() == model
    gpu.at("0x0000")
    assert tuning_config.detect_gpu_model() == model  # looked up once
    assert gpu.model() == "mi210x"


def test_else_the_name_does(gpu: FakeGpu):
    assert gpu.model() is None
    gpu.properties.name = "AMD Instinct MI300X OAM"
    assert gpu.model() == "mi300x"
    gpu.at("garbage")
    assert gpu.model() == "mi300x"
