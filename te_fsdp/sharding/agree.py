"""Checks across ranks: replicas that must be equal are compared by checksum before FSDP2 silently mixes them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from te_fsdp import _te, _torch
from te_fsdp.binding import binding_of
from te_fsdp.errors import InitError, message

if TYPE_CHECKING:
    from torch import nn

    from te_fsdp.mesh import Meshes

__all__ = ["check_replicas"]

# Odd multiplier of a linear congruential generator (Knuth): makes the checksum depend on positions.
_MULTIPLIER = 6364136223846793005


def check_replicas(model: nn.Module, meshes: Meshes) -> None:
    """Raise on all ranks unless parameters on the device are equal wherever they must be.

    Before FSDP2 cuts them, all data-parallel ranks hold the same tp-local tensors, and all tp ranks the same
    replicated parameters. FSDP2 takes each rank's part from that rank, so that differing initialisations
    would be mixed in silence.

    Collective over the world: two max all-reduces of two integers per parameter.

    Raises:
        InitError: Names the parameters that differ.
    """
    names, sums, replicated = [], [], []
    for prefix, module in model.named_modules():
        binding = binding_of(module)
        for name, parameter in module._parameters.items():
            local = None if parameter is None else _torch.local_of(parameter)
            if local is None or local.is_meta:
                continue
            names.append(f"{prefix}.{name}" if prefix else name)
            sums.append(_checksum(local))
            rule = binding.rules.get(name) if binding is not None else None
            replicated.append(rule is None or rule.shard_dim is None)
    if not names:
        return
    mine = torch.stack(sums)
    extremes = torch.stack([mine, -mine])
    for axis in ("dp_replicate", "dp_shard"):
        if meshes.size(axis) > 1:
            dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=meshes.device_mesh.get_group(axis))
    differs = extremes[0] != -extremes[1]
    if meshes.size("tp") > 1:
        over_tp = extremes.clone()
        group = meshes.device_mesh.get_group("tp")
        dist.all_reduce(over_tp, op=dist.ReduceOp.MAX, group=group)
        mask = torch.tensor(replicated, device=mine.device)
        differs |= mask & (over_tp[0] != -over_tp[1])
        # A difference seen by one tp rank alone must reach the others: all raise, or none.
        seen = differs.to(torch.int64)
        dist.all_reduce(seen, op=dist.ReduceOp.MAX, group=group)
        differs = seen.bool()
    bad = [name for name, flag in zip(names, differs.tolist(), strict=True) if flag]
    if bad:
        more = f" and {len(bad) - 5} more" if len(bad) > 5 else ""
        raise InitError(
            message(
                f"{', '.join(bad[:5])}{more}: values differ between ranks that must hold the same",
                expected="equal parameters on all data-parallel ranks, and equal replicated ones on all tp ranks",
                got=f"{len(bad)} of {len(names)} parameters differ",
                why="FSDP2 would cut each shard from another initialisation",
                fix="seed all ranks alike before building the model, or build it on meta and call te_fsdp.materialize",
            )
        )


def _checksum(tensor: torch.Tensor) -> torch.Tensor:
    """Position-dependent checksum of a tensor's bytes, int64 on its device, wrapping on overflow.

    Halved, so that its negative exists too.
    """
    # Of quantized tensors the values: padding of their scale buffers is left as the kernel finds it.
    tensor = tensor.dequantize() if _te.is_quantized(tensor) else tensor
    data = tensor.detach().contiguous().view(-1)
    if data.numel() == 0:
        return torch.zeros((), dtype=torch.int64, device=tensor.device)
    words = data.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[data.element_size()])
    weights = torch.arange(1, words.numel() + 1, dtype=torch.int64, device=tensor.device) * _MULTIPLIER
    return (words.to(torch.int64) * weights).sum() // 2
