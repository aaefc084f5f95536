"""Negative controls: rules that are left out. The comparison of the matrix must detect each."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from parity.runs import _spoiled
from torch import nn


@contextmanager
def break_rule(broken: str) -> Iterator[None]:
    """Break a rule while a model is bound: "partial_grad" drops the sum over tp of replicated parameters' gradients."""
    with _spoiled(broken if broken == "partial_grad" else ""):
        yield


def break_model(broken: str, module: nn.Module, meshes: Any) -> None:
    """Break a sharded model: "reduction" loses that of the gradients over dp_shard, "scale" doubles one of a rank's."""
    if broken == "reduction":
        module.set_custom_reduce_scatter(LocalReduceScatter())
    elif broken == "scale" and meshes.device_mesh.get_local_rank("dp_shard") == 0:
        from te_fsdp.upstream import te as _te, torch_dtensor as _torch

        local = next(p for p in map(_torch.local_of, module.parameters()) if _te.is_quantized(p))
        buffers = local.get_metadata().items()
        scale = next(value for name, value in buffers if "scale_inv" in name and value is not None)
        with torch.no_grad():
            if scale.dtype == torch.uint8:  # the exponent follows after as many bits of mantissa
                scale.add_({"mxfp8": 1, "nvfp4": 8}[_te.format_of(local).name])
            else:
                scale.mul_(2)


class LocalReduceScatter:
    """Instead of a reduce-scatter: each rank keeps its own part of its own gradient."""

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: Any,
        op: Any,
        async_op: bool = False,
    ) -> None:
        output_tensor.copy_(input_tensor.chunk(group.size())[group.rank()])
