"""The names that programs import from the native module of other releases: enums, the native config, the clock rate."""

from __future__ import annotations

from dataclasses import dataclass, fields

from mori.ops.config import EpDispatchCombineConfig as _PythonConfig
from mori.ops.config import Limits, receive_rows_per_rank
from mori.ops.kernel_types import EpDispatchCombineKernelType, EpDispatchCombineQuantType

__all__ = [
    "AsyncLL",
    "EpDispatchCombineConfig",
    "EpDispatchCombineKernelType",
    "EpDispatchCombineQuantType",
    "Fp4BlockwiseQuant",
    "Fp8BlockwiseQuant",
    "Fp8DirectCast",
    "InterNode",
    "InterNodeV1",
    "InterNodeV1LL",
    "IntraNode",
    "IntraNodeLL",
    "None_",
    "get_cur_device_wall_clock_freq_mhz",
]

IntraNode = EpDispatchCombineKernelType.IntraNode
InterNode = EpDispatchCombineKernelType.InterNode
InterNodeV1 = EpDispatchCombineKernelType.InterNodeV1
InterNodeV1LL = EpDispatchCombineKernelType.InterNodeV1LL
AsyncLL = EpDispatchCombineKernelType.AsyncLL
IntraNodeLL = EpDispatchCombineKernelType.IntraNodeLL
None_ = EpDispatchCombineQuantType.None_
Fp8DirectCast = EpDispatchCombineQuantType.Fp8DirectCast
Fp8BlockwiseQuant = EpDispatchCombineQuantType.Fp8BlockwiseQuant
Fp4BlockwiseQuant = EpDispatchCombineQuantType.Fp4BlockwiseQuant

_PACKED_VERSION = 1


@dataclass
class EpDispatchCombineConfig:
    """The config as native code sees it: integers and enums, every one optional. Fields are in packed order.

    Not the config that ops are built from: that is `mori.ops.EpDispatchCombineConfig`.
    """

    rank: int = 0
    world_size: int = 0
    hidden_dim: int = 0
    scale_dim: int = 0
    scale_type_size: int = 0
    max_token_type_size: int = 0
    max_num_inp_token_per_rank: int = 0
    num_experts_per_rank: int = 0
    num_experts_per_token: int = 0
    max_total_recv_tokens: int = 0
    warp_num_per_block: int = 0
    block_num: int = 0
    use_external_inp_buf: bool = True
    kernel_type: EpDispatchCombineKernelType = IntraNode
    gpu_per_node: int = 8
    rdma_block_num: int = 0
    num_qp_per_pe: int = 1
    quant_type: EpDispatchCombineQuantType = None_
    enable_sdma: bool = False

    def to_packed_array(self) -> list[int]:
        """The format version, then every field as an int."""
        return [_PACKED_VERSION, *(int(getattr(self, each.name)) for each in fields(self))]

    def max_num_tokens_to_send_per_rank(self) -> int:
        """M."""
        return self.max_num_inp_token_per_rank

    def max_num_tokens_to_send(self) -> int:
        """W * M."""
        return self.world_size * self.max_num_inp_token_per_rank

    def max_num_tokens_to_recv_per_rank(self) -> int:
        """M, or the receive cap divided by W, rounded up, if that is less."""
        return receive_rows_per_rank(self.world_size, self.max_num_inp_token_per_rank, self.max_total_recv_tokens)

    def max_num_tokens_to_recv(self) -> int:
        """R = W * `max_num_tokens_to_recv_per_rank()`."""
        return self.world_size * self.max_num_tokens_to_recv_per_rank()


def native_config(config: _PythonConfig, limits: Limits) -> EpDispatchCombineConfig:
    """The native form of a checked config."""
    values = {each.name: getattr(config, each.name) for each in fields(config) if each.name != "data_type"}
    values.update(kernel_type=limits.kernel_type, quant_type=limits.quant_type, gpu_per_node=limits.gpu_per_node)
    return EpDispatchCombineConfig(**values)


def get_cur_device_wall_clock_freq_mhz() -> float:
    """Ticks per microsecond of the clock that traces are stamped with: on CPUs the nanosecond clock of the system."""
    return 1000.0
