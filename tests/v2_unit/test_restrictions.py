"""Every row of the table refuses what it is about, says so with names, values and a remedy, and refuses no more."""

from __future__ import annotations

import dataclasses
import itertools
import re
from typing import Any

import numpy as np
import pytest
import torch

import mori
from mori import archs, target
from mori.errors import UnsupportedDtype
from mori.ops import restrictions
from mori.ops.config import check_config
from mori.ops.dispatch_combine_v2 import EpDispatchCombineConfig
from mori.ops.restriction import Case, Restriction
from mori.ops.restrictions_v2 import FEATURES, INT_FIELDS, ROWS

from .configs import FIELDS, make_config
from .examples import BF16, FNUZ, FP4, FP8, MAKERS, NODES, PAIRS, Pair, legs

ROW = {row.id: row for row in restrictions.TABLE}
EVALUATED = [row.id for row in restrictions.TABLE if row.broken is not None]


def test_every_row_has_a_name_of_its_own_and_an_example():
    assert len(ROW) == len(restrictions.TABLE)
    assert sorted(PAIRS) == sorted(ROW)


def case_of(row: Restriction, pair: Pair, legal: bool) -> Case:
    """What the row is asked about. A config that cannot be made is put together from its fields."""
    arch = pair.legal_arch or pair.arch if legal else pair.arch
    changes, facts = (pair.legal, pair.facts[1]) if legal else (pair.refused, pair.facts[0])
    with target.assume(arch):
        if legal or row.stage != "config":
            config = MAKERS[row.api]()
            config = dataclasses.replace(config, **changes) if row.api != "v2" else make_changed(changes)
        else:
            config = unchecked(changes)
    given = {"backend": row.backends[0] if row.backends else None} | facts
    return Case(config, archs.find(arch), **given)


def make_changed(changes: dict[str, Any]) -> EpDispatchCombineConfig:
    """As a program would make it; fields that only an op refuses are set afterwards where the config would stumble."""
    try:
        return make_config(**changes)
    except (TypeError, ValueError, ZeroDivisionError):
        config = make_config()
        for name, value in changes.items():
            setattr(config, name, value)
        return config


def unchecked(changes: dict[str, Any]) -> EpDispatchCombineConfig:
    config = object.__new__(EpDispatchCombineConfig)
    defaults = {field.name: field.default for field in dataclasses.fields(EpDispatchCombineConfig)}
    vars(config).update(defaults | FIELDS | {"gpu_per_node": 8} | changes)
    return config


@pytest.mark.parametrize("name", EVALUATED)
def test_the_row_refuses_its_example_and_not_the_next_legal_thing(name: str):
    row, pair = ROW[name], PAIRS[name]
    refused = case_of(row, pair, legal=False)
    assert row.refuses(refused)
    text = row.explain(refused)
    for field in row.fields:
        value = getattr(refused, field, None) or getattr(refused.config, field)
        assert str(value) in text, f"{text!r} does not say what {field} is"
        if field in getattr(refused.config, "__dict__", ()):  # other names stand for several fields
            assert field in text, f"{text!r} does not name {field}"
    assert len(row.remedy.split()) >= 2
    assert "{" not in text
    assert not row.refuses(case_of(row, pair, legal=True))


@pytest.mark.parametrize("name", [name for name in EVALUATED if ROW[name].stage == "config"])
def test_configs_raise_what_the_row_says(name: str):
    row, pair = ROW[name], PAIRS[name]
    with target.assume(pair.arch), pytest.raises(row.error, match="^EpDispatchCombineConfig: ") as caught:
        make_config(**pair.refused)
    assert type(caught.value) is row.error
    with target.assume(pair.legal_arch or pair.arch):
        make_config(**pair.legal)


@pytest.mark.parametrize("name", [n for n in EVALUATED if ROW[n].api == "v1" and ROW[n].stage == "construction"])
def test_v1_ops_raise_what_the_row_says(name: str):
    row, pair = ROW[name], PAIRS[name]
    config = dataclasses.replace(MAKERS["v1"](), **pair.refused)
    with pytest.raises(row.error) as caught:
        check_config(config, pair.arch)
    assert str(caught.value) == "EpDispatchCombineConfig: " + row.explain(Case(config, archs.find(pair.arch)))
    check_config(dataclasses.replace(MAKERS["v1"](), **pair.legal), pair.legal_arch or pair.arch)


@pytest.mark.parametrize("name", [n for n in EVALUATED if ROW[n].stage == "construction" and ROW[n].api == "v2"])
def test_the_gate_of_v2_ops_gives_the_reason(name: str):
    row, pair = ROW[name], PAIRS[name]
    case = case_of(row, pair, legal=False)
    backend = case.backend or "hip"
    reasons = restrictions.unsupported(case.config, backend, pair.arch, case.communicator)
    assert row.explain(case._replace(backend=backend)) in reasons


@pytest.mark.parametrize("name", [name for name, row in ROW.items() if row.broken is None])
def test_rows_that_other_code_checks(name: str):
    row, pair = ROW[name], PAIRS[name]
    assert row.where
    raises, passes = pair.calls
    with pytest.raises(row.error, match=f"{re.escape(row.message)}.*{re.escape(row.remedy)}"):
        raises()
    passes()


def test_what_hip_serves_by_the_table_of_the_guide():
    served = [{}, {"data_type": torch.float32}, legs(FP8, BF16), legs(FNUZ, BF16), legs(FP4, torch.float32)]
    for changes, arch in itertools.product(served, ("gfx942", "gfx950", "gfx1250", "sm_90", "host")):
        with target.assume(arch):
            assert restrictions.unsupported(make_config(**changes), "hip", arch) == ()


def test_between_nodes_the_config_is_legal_and_the_op_is_not_there():
    config = make_config(**NODES)
    (reason,) = restrictions.unsupported(config, "hip", "gfx942")
    assert "not built in this version" in reason
    assert restrictions.unsupported(config, "theirs", "gfx942") == ()


def test_all_reasons_are_given_and_a_config_that_became_illegal_gives_its_own_only():
    config = make_config(combine_mode="scatter", enable_std_moe=True, scale_dim=1, scale_type_size=1)
    assert len(restrictions.unsupported(config, "hip", "host")) == 3
    config.combine_mode = "push"
    (reason,) = restrictions.unsupported(config, "hip", "host")
    assert "combine_mode is 'push'" in reason


@pytest.mark.parametrize(
    "schedule",
    [
        ((None, 1, 1, 1),),
        ((None, 1, 1, 1, 8), (8, 1, 1, 1, 8)),
        ((8, 1, 1, 1, 8.0),),
        (5,),
        ((8, 1, 1, 1, 8),) * 2,
        5,
        True,
        "x",
    ],
)
def test_what_is_no_schedule(schedule: Any):
    with pytest.raises(ValueError, match=re.escape(f"schedule is {schedule!r}: use (most tokens")):
        make_config(schedule=schedule)


@pytest.mark.parametrize("schedule", [(), [[8, 1, 1, 1, 8], [None, 1, 1, 1, 8]], ((8, 1, 1, 1, 8),)])
def test_what_is_a_schedule(schedule: Any):
    assert make_config(schedule=schedule).schedule == schedule


@pytest.mark.parametrize("field", INT_FIELDS)
def test_what_is_no_number_is_refused_by_name(field: str):
    for value in ("x", [], True, 1.5, torch.float32, *(None,) * INT_FIELDS[field]):
        with pytest.raises(ValueError, match=f"^EpDispatchCombineConfig: {re.escape(f'{field} is {value!r}')}: "):
            make_config(**{field: value})


@pytest.mark.parametrize("dtype", [[], "bfloat16", 2, torch.float16])
def test_what_is_no_dtype_of_rows_is_refused(dtype: Any):
    with pytest.raises(UnsupportedDtype, match=re.escape(f"rows of {dtype} in dispatch")):
        make_config(data_type=dtype)


def test_integers_of_other_libraries_become_pythons_own():
    config = make_config(world_size=np.int64(8), hidden_dim=np.int32(256), num_qp_per_pe=np.uint8(2))
    assert [type(each) for each in (config.world_size, config.hidden_dim, config.num_qp_per_pe)] == [int] * 3
    assert config == make_config(hidden_dim=256)
    config.max_num_inp_token_per_rank = np.int64(5)
    assert type(config.detached().max_num_inp_token_per_rank) is int
    assert restrictions.unsupported(config, "hip", "host") == ()


def test_numbers_that_are_none_are_reasons_before_others():
    config = make_config(combine_mode="scatter", gpu_per_node=4)
    config.num_experts_per_token = None
    assert restrictions.unsupported(config, "hip", "host") == ("num_experts_per_token is None: it must be an int",)


def test_the_wave_is_that_of_the_arch_that_is_asked_about(monkeypatch: pytest.MonkeyPatch):
    with target.assume("gfx950"):
        config = make_config(world_size=129, combine_warp_num_per_block=4)
    assert restrictions.unsupported(config, "hip", "gfx950") == ()
    (reason,) = restrictions.unsupported(config, "hip", "gfx1250")
    assert "exceeds the 128 threads" in reason
    monkeypatch.setenv("MORI_WAVE_SIZE", "64")
    assert restrictions.unsupported(config, "hip", "gfx1250") == ()


@pytest.mark.parametrize("feature", FEATURES)
def test_methods_that_a_backend_lacks(feature: str):
    case = Case(make_config(), archs.find("host"), "hip", feature=feature)
    with pytest.raises(NotImplementedError, match=f"feature {feature}: the hip backend"):
        restrictions.require("v2", "call", case)
    restrictions.require("v2", "call", case._replace(backend="flydsl"))


def test_errors_of_the_config_come_in_the_order_of_the_contract():
    """A config with several faults raises the first by this order."""
    faults = {
        "v2-gpu-per-node": {"gpu_per_node": 3},
        "v2-num-qp-per-pe": {"num_qp_per_pe": 0},
        "v2-leg-dtypes": {"combine_data_type": FP8},
        "v2-quant-type": {"quant_type": "fp9"},
        "v2-internode-kernel": {"internode_kernel": ""},
        "v2-combine-mode": {"combine_mode": ""},
        "v2-row-bytes": {"hidden_dim": 7},
        "v2-max-token-type-size": {"max_token_type_size": 1},
    }
    assert [row.id for row in ROWS if row.id in faults] == list(faults)
    for first, second in itertools.combinations(faults, 2):
        with pytest.raises(ValueError, match="^EpDispatchCombineConfig: ") as caught:
            make_config(**(faults[second] | faults[first]))
        case = Case(unchecked(faults[first] | faults[second]), archs.find("host"))
        assert str(caught.value).endswith(ROW[first].explain(case))


def test_wrong_payload_is_both_errors_that_programs_catch():
    for error in (KeyError, TypeError):
        with pytest.raises(error, match="torch.int8"):
            make_config(data_type=torch.int8)


NOT_BUILT = {
    "MORI-IO": (lambda: __import__("mori.io"), ImportError, "out of scope"),
    "MORI-UMBP": (lambda: mori.umbp, AttributeError, "out of scope"),
    "JAX binding": (lambda: mori.jax, AttributeError, "no JAX binding"),
    "Triton binding": (lambda: mori.ir, AttributeError, "no Triton binding"),
}


@pytest.mark.parametrize("what", NOT_BUILT)
def test_what_is_not_built_says_so(what: str):
    assert what in {row.what for row in restrictions.NOT_BUILT}
    ask, error, words = NOT_BUILT[what]
    with pytest.raises(error, match=words):
        ask()
