"""v1 and v2 ops as one interface, with results in terms that both share: ranks, tokens and rows, no flat indices."""

from __future__ import annotations

from typing import Any

import torch

from .configuration import Configuration, Inputs

POISON = 0xA5
# Regions of the engine's layout that results come from, or pass through.
_V1_REGIONS = (
    "dispatch_rows",
    "dispatch_weights",
    "dispatch_scales",
    "dispatch_indices",
    "dispatch_source",
    "combine_in_rows",
    "combine_in_weights",
    "combine_rows",
    "combine_weights",
    "sender_map",
)
_V2_REGIONS = (
    "disp_out",
    "out_wts",
    "out_scales",
    "out_idx",
    "recv_to_src_token",
    "out_tok",
    "combine_in_weights",
    "combine_out",
    "combine_out_weights",
    "token_dest_map",
)


def pairs(flat: torch.Tensor, stride: int, world_size: int) -> torch.Tensor:
    """Flat indices as (rank, position); (-1, -1) where there is none."""
    decoded = torch.stack([flat // stride, flat % stride], dim=-1)
    return torch.where((flat >= world_size * stride)[..., None], torch.full_like(decoded, -1), decoded)


def to_device(tensor: torch.Tensor | None, device: torch.device) -> torch.Tensor | None:
    """As bytes: not every element type can be copied as what it is."""
    if tensor is None or tensor.device == device:
        return tensor
    return tensor.view(torch.uint8).to(device).view(tensor.dtype) if tensor.numel() else tensor.to(device)


def v1_config(configuration: Configuration, rank: int) -> Any:
    from mori.ops import EpDispatchCombineConfig

    return EpDispatchCombineConfig(
        data_type=configuration.dtype,
        rank=rank,
        world_size=configuration.world_size,
        hidden_dim=configuration.hidden,
        scale_dim=configuration.scale_dim,
        scale_type_size=4 if configuration.scale_dim else 0,
        max_token_type_size=max(configuration.dtype.itemsize, configuration.combine_dtype.itemsize),
        max_num_inp_token_per_rank=configuration.max_tokens,
        num_experts_per_rank=configuration.experts_per_rank,
        num_experts_per_token=configuration.topk,
    )


def v2_config(configuration: Configuration, rank: int, backend: str) -> Any:
    from mori.ops.dispatch_combine_v2 import EpDispatchCombineConfig

    return EpDispatchCombineConfig(
        rank=rank,
        world_size=configuration.world_size,
        hidden_dim=configuration.hidden,
        max_num_inp_token_per_rank=configuration.max_tokens,
        num_experts_per_rank=configuration.experts_per_rank,
        num_experts_per_token=configuration.topk,
        dispatch_data_type=configuration.dtype,
        combine_data_type=configuration.combine_dtype,
        scale_dim=configuration.scale_dim,
        scale_type_size=4 if configuration.scale_dim else 0,
        kernel_backend=backend,
    )


class V1Op:
    """On the communicator of mori.shmem. `backend` is the native one, whatever its name."""

    def __init__(self, configuration: Configuration, rank: int, communicator: Any, backend: str) -> None:
        from mori.ops import EpDispatchCombineOp

        self.configuration = configuration
        self.op: Any = EpDispatchCombineOp(v1_config(configuration, rank))
        self.device = self.op._device
        self._handle: Any = None

    def poison(self) -> None:
        plan = self.op._plan
        for name in _V1_REGIONS:
            size = plan._regions.region(name).bytes
            if size:
                plan.view(name, (size,), torch.uint8).fill_(POISON)

    def dispatch(self, inputs: Inputs) -> dict[str, torch.Tensor | None]:
        config = self.configuration
        given = [to_device(each, self.device) for each in (inputs.rows, inputs.weights, inputs.scales, inputs.ids)]
        self._ids, self._handle = given[3], None
        rows, self._weights, scales, ids, count, *handle = self.op.dispatch(*given, return_routing=config.handles)
        source = self.op._views.get("dispatch_source", (config.capacity,), torch.int32)
        if handle:
            self._handle = handle[0]
            destination = self._handle.disp_dest_tok_id_map[: config.max_tokens * config.topk]
        else:
            destination = self.op._views.get("sender_map", (config.max_tokens * config.topk,), torch.int32)
        return {
            "count": count,
            "rows": rows,
            "weights": self._weights,
            "scales": None if scales is None else scales.view(torch.int32),
            "ids": ids,
            "source": pairs(source, config.capacity, config.world_size),
            "destination": pairs(destination, config.capacity, config.world_size).view(-1, config.topk, 2),
        }

    def combine(self, rows: torch.Tensor, external: bool, weights: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
        rows = to_device(rows, self.device)  # type: ignore[assignment]
        if not external:
            buffer = self.op.get_registered_combine_input_buffer(rows.dtype, hidden_dim=rows.shape[1])
            buffer[: len(rows)].copy_(rows)
            rows = buffer
        given = self._weights if weights else None
        found: tuple[torch.Tensor, torch.Tensor | None] = self.op.combine(
            rows, given, self._ids, use_external_inp_buf=int(external), routing=self._handle
        )
        return found

    def close(self) -> None:
        self.op.check()


class V2Op:
    """On `communicator`."""

    def __init__(self, configuration: Configuration, rank: int, communicator: Any, backend: str) -> None:
        from mori.ops.dispatch_combine_v2 import EpDispatchCombineOp

        self.configuration = configuration
        self.op: Any = EpDispatchCombineOp(v2_config(configuration, rank, backend), communicator)
        self.device = self.op.dev

    def poison(self) -> None:
        arena = self.op.arena
        for name in _V2_REGIONS:
            region = self.op._region(name)
            if arena.has(region):
                arena.view(region, (arena.size(region),), torch.uint8).fill_(POISON)

    def dispatch(self, inputs: Inputs) -> dict[str, torch.Tensor | None]:
        config, op = self.configuration, self.op
        given = [to_device(each, self.device) for each in (inputs.rows, inputs.weights, inputs.scales, inputs.ids)]
        rows, weights, scales, ids, count, self._handle = op.dispatch(*given, return_routing=True)
        source = pairs(self._handle.disp_tok_id_to_src_tok_id_local, config.max_tokens, config.world_size)
        destination = pairs(self._handle.disp_dest_tok_id_map, op.cfg.effective_max_recv, config.world_size)
        return {
            "count": count,
            "rows": rows,
            "weights": weights,
            "scales": scales,
            "ids": ids,
            "source": source,
            "destination": destination.view(-1, config.topk, 2),
        }

    def combine(self, rows: torch.Tensor, external: bool, weights: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
        rows = to_device(rows, self.device)  # type: ignore[assignment]
        if not external:
            view = self.op.combine_in_view()
            view[: len(rows)].copy_(rows)
            rows = view
        found: tuple[torch.Tensor, torch.Tensor | None] = self.op.combine(
            rows, True if weights else None, routing=self._handle
        )
        return found

    def close(self) -> None:
        self.op.check()
        self.op.close()


APIS: dict[str, type[V1Op] | type[V2Op]] = {"v1": V1Op, "v2": V2Op}
