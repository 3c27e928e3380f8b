"""Which backend an op gets, what others can register, and what is refused before memory is taken."""

from __future__ import annotations

import logging

import pytest
import torch

import mori
from mori.cco import Communicator, get_unique_id
from mori.ops.dispatch_combine_v2 import EpDispatchCombineConfig, EpDispatchCombineOp, backends
from mori.ops.dispatch_combine_v2.dispatch_combine_op import KernelSet
from tests.package.commands import python

FIELDS = {
    "rank": 0,
    "world_size": 1,
    "hidden_dim": 32,
    "max_num_inp_token_per_rank": 4,
    "num_experts_per_rank": 4,
    "num_experts_per_token": 2,
}


def config(**overrides) -> EpDispatchCombineConfig:
    return EpDispatchCombineConfig(**(FIELDS | overrides))


@pytest.fixture
def comm():
    with Communicator.init(1, 0, get_unique_id(), per_rank_vmm=16 << 20) as alone:
        yield alone


@pytest.fixture(autouse=True)
def _only_what_the_package_has(monkeypatch: pytest.MonkeyPatch):
    backends.available()
    monkeypatch.setattr(backends, "_registered", dict(backends._registered))


def test_importing_the_package_loads_neither_a_backend_nor_shmem():
    code = "import json, sys; import mori.ops.dispatch_combine_v2; print(' '.join(sys.modules))"
    result = python("-c", code)
    assert result.returncode == 0, result.stderr
    loaded = result.stdout.split()
    assert "mori.ops.dispatch_combine_v2.dispatch_combine_op" in loaded
    heavy = ("shmem", "_core", "ops.engine", "ops.dispatch_combine", "cco.communicator")
    unwanted = {f"mori.{name}" for name in heavy} | set(backends.MODULES.values()) | {"flydsl"}
    assert not unwanted & set(loaded)


def test_the_default_on_cpus_is_the_native_one(comm, caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.INFO), EpDispatchCombineOp(config(), comm) as op:
        assert op.backend_name == "hip"
        assert type(op).__name__ == "EpDispatchCombineOpHip" and isinstance(op, EpDispatchCombineOp)
        assert op.capabilities == frozenset({"gather", "scales"})
    assert "kernel backend hip" in caplog.text


def test_available_backends():
    assert EpDispatchCombineOp.available_backends() == ["hip"]


@pytest.mark.parametrize("by", ["config", "environment"])
def test_flydsl_says_that_it_is_not_there_and_how_to_choose(comm, by: str, monkeypatch: pytest.MonkeyPatch):
    if by == "environment":
        monkeypatch.setenv("MORI_V2_KERNEL_BACKEND", "flydsl")
    chosen = config(kernel_backend="flydsl" if by == "config" else None)
    with pytest.raises(ImportError, match="no FlyDSL backend yet.*mori-ep.flydsl") as raised:
        EpDispatchCombineOp(chosen, comm)
    assert "kernel_backend" in str(raised.value) and "MORI_V2_KERNEL_BACKEND" in str(raised.value)
    assert isinstance(raised.value.__cause__, ImportError)
    assert comm._resources == []


def test_the_config_goes_before_the_environment(comm, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MORI_V2_KERNEL_BACKEND", "flydsl")
    with EpDispatchCombineOp(config(kernel_backend="hip"), comm) as op:
        assert op.backend_name == "hip"


def test_an_unknown_name_lists_those_that_are_known(comm):
    with pytest.raises(ValueError, match="unknown kernel backend 'triton': known are flydsl, hip"):
        EpDispatchCombineOp(config(kernel_backend="triton"), comm)
    assert comm._resources == []


def test_a_module_that_registers_nothing(comm, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(backends.MODULES, "empty", "mori.errors")
    with pytest.raises(ImportError, match="registers no kernel backend 'empty'"):
        EpDispatchCombineOp(config(kernel_backend="empty"), comm)
    assert "empty" not in EpDispatchCombineOp.available_backends()


REGIONS = ("disp_out", "out_wts", "out_idx", "out_tok", "recv_to_src_token")


def loopback(**options):
    """A backend for one rank, in torch. Registers as "loopback"."""

    class Loopback(EpDispatchCombineOp, backend="loopback"):
        def _regions(self, cfg):
            rows, topk = cfg.effective_max_recv, cfg.num_experts_per_token
            sizes = (cfg.token_nbytes, 4 * topk, 4 * topk, cfg.combine_token_nbytes, 4)
            return [(f"own_{name}", rows * size) for name, size in zip(REGIONS, sizes, strict=True)]

        def _region(self, name):
            return f"own_{name}"

        def _unsupported(self, cfg):
            return ("topk 7 is unlucky",) if cfg.num_experts_per_token == 7 else ()

        def _build_kernels(self, cfg, arena):
            def dispatch(*, input, indices, weights, scales, dest_map, num_tokens):
                assert scales is None and int(self.total_recv) == 0
                self.recv_tokens()[:num_tokens] = input
                self.recv_weights()[:num_tokens] = weights
                self.recv_indices()[:num_tokens] = indices
                dest_map.view(-1, cfg.num_experts_per_token)[:num_tokens, 0] = torch.arange(num_tokens)
                self.total_recv.fill_(num_tokens)

            def combine(*, input, dest_map, total_recv, num_tokens, want_weights):
                rows = dest_map.view(-1, cfg.num_experts_per_token)[:num_tokens, 0]
                self.combine_out[:num_tokens] = self.combine_in_view()[rows]
                if want_weights:
                    self.combine_out_weights[:num_tokens] = self.recv_weights()[rows]

            defaults = {"self_resets_counters": False, "capabilities": frozenset({"gather"})}
            return KernelSet({(1, 1): dispatch}, {(1, 1): combine}, **(defaults | options))

    return Loopback


@pytest.mark.parametrize("by", ["config", "environment"])
def test_others_can_register_a_backend(comm, by: str, monkeypatch: pytest.MonkeyPatch):
    kind = loopback()
    if by == "environment":
        monkeypatch.setenv("MORI_V2_KERNEL_BACKEND", "loopback")
    assert EpDispatchCombineOp.available_backends() == ["hip", "loopback"]
    with EpDispatchCombineOp(config(kernel_backend="loopback" if by == "config" else None), comm) as op:
        assert type(op) is kind and op.backend_name == "loopback" and op.arena.has("own_disp_out")
        rows = torch.randn(3, 32).bfloat16()
        weights, ids = torch.rand(3, 2), torch.tensor([[0, 1]] * 3, dtype=torch.int32)
        for _ in range(2):
            received, *_, count, handle = op.dispatch(rows, weights, None, ids, return_routing=True)
            assert int(count) == 3 and torch.equal(received[:3], rows)
            out, out_weights = op.combine(rows + 1, weights, routing=handle)
            assert torch.equal(out, rows + 1) and torch.equal(out_weights, weights)
        for absent in (op.check, op.stats, op.local_expert_count):
            with pytest.raises(NotImplementedError, match="the loopback backend does not offer it"):
                absent()
        op.reset()
        assert not op.recv_tokens().any()


def test_naming_the_class_takes_it_whatever_the_config_says(comm):
    with loopback()(config(kernel_backend="hip"), comm) as op:
        assert op.backend_name == "loopback"


def test_reasons_are_listed_before_memory_is_taken(comm):
    loopback()
    with pytest.raises(ValueError) as raised:
        EpDispatchCombineOp(config(num_experts_per_token=7, kernel_backend="loopback"), comm)
    assert str(raised.value) == "loopback backend cannot serve this config:\n  topk 7 is unlucky"
    assert comm._resources == []


def test_reasons_of_a_backend_may_be_a_list(comm):
    class Refusing(EpDispatchCombineOp, backend="refusing"):
        def _unsupported(self, cfg):
            return ["first", "second"]

    with pytest.raises(ValueError, match="^refusing backend cannot serve this config:\n  first\n  second$"):
        EpDispatchCombineOp(config(kernel_backend="refusing"), comm)


def test_kernels_may_refuse_too_and_nothing_is_left(comm):
    loopback(unsupported=("no kernels today",))
    with pytest.raises(ValueError, match="loopback backend cannot serve this config:\n  no kernels today"):
        EpDispatchCombineOp(config(kernel_backend="loopback"), comm)
    assert comm._resources == []


def test_a_failing_build_leaves_nothing(comm, monkeypatch: pytest.MonkeyPatch):
    kind = loopback()
    monkeypatch.setattr(kind, "_build_kernels", lambda *arguments: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        EpDispatchCombineOp(config(kernel_backend="loopback"), comm)
    assert comm._resources == []


FP8 = torch.float8_e4m3fn
REFUSED = {
    "scatter": ({"combine_mode": "scatter"}, "scatter"),
    "quantised": ({"quant_type": "fp8_blockwise", "hidden_dim": 128}, "fp8_blockwise"),
    "direct cast": ({"quant_type": "fp8_direct_cast"}, "fp8_direct_cast"),
    "fp8 combine": ({"data_type": FP8}, "combine"),
    "fp4 combine": ({"data_type": torch.float4_e2m1fn_x2}, "combine"),
    "standard MoE": ({"enable_std_moe": True}, "std_moe"),
    "odd scales": ({"scale_dim": 3, "scale_type_size": 1}, "4"),
    "receive cap": ({"max_total_recv_tokens": 1}, "max_total_recv_tokens"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_native_backend_refuses(comm, name: str):
    fields, says = REFUSED[name]
    with pytest.raises(ValueError, match=f"^hip backend cannot serve this config:\n(.|\n)*{says}"):
        EpDispatchCombineOp(config(kernel_backend="hip", **fields), comm)
    assert comm._resources == []


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"rank": 1, "world_size": 2}, "rank 1 of world_size 2 on a communicator where this is rank 0 of 1"),
        ({"max_num_inp_token_per_rank": 2**24}, "max_num_inp_token_per_rank is 16777216"),
        ({"hidden_dim": 0}, "hidden_dim is 0"),
        ({"num_experts_per_token": 0}, "num_experts_per_token is 0"),
    ],
)
def test_sizes_that_no_op_can_have(comm, fields: dict, says: str):
    with pytest.raises(ValueError, match=says):
        EpDispatchCombineOp(config(**fields), comm)
    assert comm._resources == []


def test_it_is_reached_through_the_package():
    assert mori.ops.dispatch_combine_v2.EpDispatchCombineOp is EpDispatchCombineOp
    from mori.ops.dispatch_combine_v2 import dispatch_combine_op

    assert dispatch_combine_op.WAVE == mori.target.current().contract_wave
    assert dispatch_combine_op._DT[torch.bfloat16] == 2
