"""Launch sizes of a config: what is given, what tables say, what is left open."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mori import target
from mori.ops.dispatch_combine_v2 import (
    EpDispatchCombineConfig,
    hip_tuning_configs,
    internode_tuning_configs,
    tuning_configs,
)

from .configs import FIELDS, make_config

KEYS = tuning_configs.KEYS
BETWEEN_NODES = (*KEYS[:4], "dispatch_rdma_block_num", "combine_rdma_block_num")


def geometry(config: EpDispatchCombineConfig) -> tuple[Any, ...]:
    return tuple(getattr(config, name) for name in KEYS)


@pytest.fixture(autouse=True)
def no_backend_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MORI_V2_KERNEL_BACKEND", raising=False)


def put_gpu(monkeypatch: pytest.MonkeyPatch, cus: int = 304, version: int = 90402, device: int = 0x74A1) -> None:
    monkeypatch.setattr(tuning_configs, "_topology", lambda: (cus, version, device))


@pytest.mark.parametrize(
    "arch, sizes, is_open",
    [
        ("host", (64, 64, 16, 8, None), True),
        ("sm_90", (64, 64, 16, 8, None), True),
        ("gfx942", (80, 80, 16, 4, None), False),
        ("gfx1250", (80, 80, 16, 4, None), False),
    ],
)
def test_untuned_sizes_are_shown_and_bind_amd_gpus_only(
    arch: str, sizes: tuple[Any, ...], is_open: bool, monkeypatch: pytest.MonkeyPatch
):
    put_gpu(monkeypatch, 0, 0, 0)
    with target.assume(arch):
        config = make_config()
        assert geometry(config) == sizes
        assert config.leaves_grid_open is is_open
        assert config._pinned_geometry == frozenset()


@pytest.mark.parametrize("name, value", [*((key, 12) for key in KEYS[:4]), ("schedule", ((None, 1, 8, 2, 8),))])
def test_one_given_size_leaves_nothing_open(name: str, value: Any):
    with target.assume("sm_90"):
        config = make_config(**{name: value})
        beside = dict(zip(KEYS, (64, 80, 16, 4, None), strict=True)) | {name: value}
        assert geometry(config) == tuple(beside.values())
        assert config._pinned_geometry == (frozenset() if name == "schedule" else {name})
        assert not config.leaves_grid_open
        later = make_config()
        setattr(later, name, value)
        assert not later.leaves_grid_open


def test_between_nodes_the_schedule_goes_and_each_size_has_its_own_default():
    config = make_config(gpu_per_node=4, schedule=((None, 1, 1, 1, 1),), combine_block_num=40)
    assert config.schedule is None
    assert tuple(getattr(config, name) for name in BETWEEN_NODES) == (96, 40, 8, 8, 64, 64)
    assert config._pinned_geometry == {"combine_block_num"}
    assert not config.leaves_grid_open


def test_the_smallest_combine_block_counts():
    config = make_config(schedule=((64, 8, 16, 8, 4), (None, 8, 16, 8, 2)))
    assert config.fewest_combine_warps == 2


def test_the_table_of_the_backend_is_asked(monkeypatch: pytest.MonkeyPatch):
    asked = []
    answer = dict(zip(KEYS, (1, 2, 3, 4, None), strict=True))
    for module in (tuning_configs, hip_tuning_configs):
        monkeypatch.setattr(module, "lookup", lambda *a, _of=module, **k: asked.append((_of, a, k)) or answer)
    fp4 = {"dispatch_data_type": torch.float4_e2m1fn_x2, "combine_data_type": torch.bfloat16}
    assert geometry(make_config(kernel_backend="hip", **fp4)) == (1, 2, 3, 4, None)
    make_config(kernel_backend="flydsl", **fp4)
    monkeypatch.setenv("MORI_V2_KERNEL_BACKEND", "theirs")
    make_config()
    hip = {"dtype": "fp4", "experts_per_rank": 32, "quant_type": "none"}
    assert asked == [
        (hip_tuning_configs, (8, 7168, 8), hip),
        (tuning_configs, (8, 7168, 8), {"dtype": "fp4_disp_bf16_comb"}),
        (tuning_configs, (8, 7168, 8), {"dtype": "bf16"}),
    ]


def test_tuned_takes_the_flydsl_table_by_data_type_and_pins_it(monkeypatch: pytest.MonkeyPatch):
    put_gpu(monkeypatch)
    bucket = ((None, 7, 8, 9, 8),)
    monkeypatch.setitem(tuning_configs._TABLE, "mi300x", {(8, 7168, 8): {"bf16": bucket, "fp8": ((None, 1, 8, 1, 8),)}})
    with target.assume("gfx942"):
        config = EpDispatchCombineConfig.tuned(**FIELDS, kernel_backend="hip", combine_block_num=5)
    assert geometry(config) == (256, 5, 16, 4, bucket)
    assert config._pinned_geometry == set(KEYS[:4])
    assert EpDispatchCombineConfig.tuned(**FIELDS, gpu_per_node=4)._pinned_geometry == frozenset()
    for name in ("world_size", "hidden_dim", "num_experts_per_token"):
        with pytest.raises(KeyError, match=name):
            EpDispatchCombineConfig.tuned(**{key: value for key, value in FIELDS.items() if key != name})


@pytest.mark.parametrize(
    "arch, version, device, key",
    [
        ("gfx942", 90402, 0x74A2, "mi308x"),
        ("gfx950", 90500, 0, "mi355x"),
        ("gfx950", 90500, 0x75A0, "mi355x"),
        ("gfx1250", 120500, 0, "gfx1250"),
        ("gfx942", 0, 0, None),
        ("sm_90", 90402, 0x74A1, "sm_90"),
        ("host", 90402, 0x74A1, "host"),
    ],
)
def test_names_of_devices(arch: str, version: int, device: int, key: str | None, monkeypatch: pytest.MonkeyPatch):
    put_gpu(monkeypatch, 304, version, device)
    with target.assume(arch):
        assert tuning_configs._device_key() == hip_tuning_configs._device_key() == key


def test_the_topology_is_that_of_the_first_gpu(tmp_path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tuning_configs, "_NODES", tmp_path)
    nodes = {"0": "simd_count 0", "2": "simd_count 320\nsimd_per_cu 4\ngfx_target_version 90402\ndevice_id 29858\n"}
    for name, text in (nodes | {"10": "simd_count 4\nsimd_per_cu 4"}).items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "properties").write_text(text)
    assert tuning_configs._topology.__wrapped__() == (80, 90402, 0x74A2)
    monkeypatch.setattr(tuning_configs, "_NODES", tmp_path / "absent")
    assert tuning_configs._topology.__wrapped__() == (0, 0, 0)


def test_flydsl_rules_fall_back_to_fp8_then_to_the_device(monkeypatch: pytest.MonkeyPatch):
    put_gpu(monkeypatch, cus=100)
    fp8, fp4, device = ((None, 1, 1, 1, 1),), ((None, 2, 2, 2, 2),), ((None, 3, 3, 3, 3),)
    with target.assume("gfx942"):
        assert tuple(tuning_configs.lookup(8, 7168, 8).values()) == (100, 100, 16, 4, None)
        monkeypatch.setitem(tuning_configs._TABLE, "mi300x", {(8, 7168, 8): {"fp8": fp8, "fp4": fp4}})
        default = dict(zip(KEYS, (50, 60, 8, 8, device), strict=True))
        monkeypatch.setitem(tuning_configs._DEVICE_DEFAULTS, "mi300x", default)
        assert tuning_configs.lookup(8, 7168, 8, "fp4") == default | {"schedule": fp4}
        assert tuning_configs.lookup(8, 7168, 8, "bf16") == default | {"schedule": fp8}
        assert tuning_configs.lookup(4, 7168, 8) == default
        assert tuning_configs._DEVICE_DEFAULTS["mi300x"] == default


def test_hip_rules_need_both_phases_and_prefer_exact_ones(monkeypatch: pytest.MonkeyPatch):
    any_dtype, fp8, exact = (((None, n, n),) for n in (1, 2, 3))
    shape = (8, 7168, 8)
    dispatch = {(*shape, None): {None: any_dtype, "fp8": fp8}, (*shape, 16): {"fp4": exact}}
    monkeypatch.setitem(hip_tuning_configs._DISPATCH, "sm_90", dispatch)

    def schedule(*arguments: Any) -> Any:
        with target.assume("sm_90"):
            found = hip_tuning_configs.lookup(*shape, *arguments)
        assert tuple(found) == KEYS
        assert tuple(found.values())[:4] == (64, 64, 16, 8)
        return found["schedule"]

    assert schedule() is None
    combine = {(*shape, None): {None: ((None, 9, 9),), "fp8_blockwise": ((None, 8, 8),)}}
    monkeypatch.setitem(hip_tuning_configs._COMBINE, "sm_90", combine)
    assert schedule() == ((None, 1, 1, 9, 9),)
    assert schedule("fp8", 16) == ((None, 2, 2, 9, 9),)
    assert schedule("fp4_disp_bf16_comb", 16) == ((None, 3, 3, 9, 9),)
    assert schedule("bf16", None, "fp8_blockwise") == ((None, 1, 1, 8, 8),)
    assert schedule("bf16", None, "fp4_blockwise") == ((None, 1, 1, 9, 9),)


def test_phases_are_merged_at_the_edges_of_both():
    dispatch, combine = ((8, 1, 2), (64, 3, 4), (None, 5, 6)), ((16, 7, 8), (None, 9, 10))
    assert hip_tuning_configs._merge(dispatch, combine) == (
        (8, 1, 2, 7, 8),
        (16, 3, 4, 7, 8),
        (64, 3, 4, 9, 10),
        (None, 5, 6, 9, 10),
    )


def test_rules_between_nodes_are_cut_to_the_gpu(monkeypatch: pytest.MonkeyPatch):
    rows = ((64, 32, 16, 8, 16, 16, 4), (None, 96, 64, 8, 96, 96, 8))
    monkeypatch.setattr(internode_tuning_configs, "_device_key", lambda: "mi308x")
    monkeypatch.setitem(internode_tuning_configs._TABLE, "mi308x", {(16, 7168, 8): {"fp8": rows}})
    monkeypatch.setattr(internode_tuning_configs.gpu_utils, "_cu_count", lambda: 0)
    lookup = internode_tuning_configs.lookup
    assert lookup(16, 7168, 8, 64) == {"dispatch": (32, 16, 8), "combine": (16, 15, 4)}
    assert lookup(16, 7168, 8, 65, "bf16") == {"dispatch": (80, 64, 8), "combine": (80, 79, 8)}
    assert lookup(8, 7168, 8, 64) is None


def test_a_measured_rule_is_no_open_grid(monkeypatch: pytest.MonkeyPatch):
    for table, kind in ((hip_tuning_configs._DISPATCH, "bf16"), (hip_tuning_configs._COMBINE, None)):
        monkeypatch.setitem(table, "sm_90", {(8, 7168, 8, None): {kind: ((None, 32, 8),)}})
    with target.assume("sm_90"):
        config = make_config()
        assert config.schedule == ((None, 32, 8, 32, 8),)
        assert not config.leaves_grid_open
