"""Checks across ranks: an error of one rank is raised on all, and replicas that must be equal are compared."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from te_fsdp import _te, _torch, errors
from te_fsdp.errors import InitError, MeshError, TeFsdpError, message

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

    from te_fsdp.mesh import Meshes
    from te_fsdp.modules.plan import Planned

__all__ = ["check_replicas", "check_same_model", "raised_on_all_ranks"]

# Odd multiplier of a linear congruential generator (Knuth): makes the checksum depend on positions.
_MULTIPLIER = 6364136223846793005


@contextlib.contextmanager
def raised_on_all_ranks(mesh: DeviceMesh | None, where: str) -> Iterator[None]:
    """Whatever one rank raises in the context is raised on all ranks of ``mesh`` when it ends, so that none waits.

    Collective over ``mesh`` (one small object gather per axis) when the context ends. The context itself may hold
    collectives only if every rank reaches them, failing or not.

    Args:
        mesh: The ranks concerned; ``None`` for this rank alone.
        where: Name of the operation, for the message on the ranks that did not fail themselves.

    Raises:
        TeFsdpError: On ranks without an error of their own: the class and text of the first failing rank's error.
    """
    mine: Exception | None = None
    try:
        yield
    except Exception as error:  # passed on below, on every rank
        mine = error
    seen: list[tuple[int, Exception]] = [] if mine is None else [(dist_rank(), mine)]
    if mesh is not None:
        told = [(rank, type(error).__name__, str(error)) for rank, error in seen]
        for axis in range(mesh.ndim):
            told = _gather(told, mesh, axis)
        if mine is None and told:
            rank, kind, text = min(told)
            known = getattr(errors, kind, TeFsdpError) if kind in errors.__all__ else TeFsdpError
            raise known(f"{where} failed on rank {rank}: {kind}: {text}")
    if mine is not None:
        raise mine


def dist_rank() -> int:
    """This rank's number in the world, 0 without torch.distributed."""
    return dist.get_rank() if dist.is_initialized() else 0


def _gather(items: list[tuple[int, str, str]], mesh: DeviceMesh, axis: int) -> list[tuple[int, str, str]]:
    """Everybody's items along one axis, each once."""
    if mesh.size(axis) == 1:
        return items
    boxes: list[list[tuple[int, str, str]] | None] = [None] * mesh.size(axis)
    dist.all_gather_object(boxes, items, group=mesh.get_group(axis))
    return list({item[0]: item for box in boxes for item in box or []}.values())


def check_same_model(model: nn.Module, mesh: DeviceMesh) -> None:
    """Raise on all ranks unless all have built the same model: names, tp-local shapes, dtypes, devices.

    Ranks with different models would wait for each other in collectives that never match.

    Collective over ``mesh``: one max all-reduce of two integers per axis.

    Raises:
        MeshError: The models differ.
    """
    described = [
        (name, tuple(_torch.local_of(p).shape), str(p.dtype), p.requires_grad, p.is_meta)
        for name, p in model.named_parameters()
    ]
    digest = int.from_bytes(hashlib.blake2b(repr(described).encode(), digest_size=7).digest(), "big")
    kind = mesh.device_type
    device = (
        torch.device(kind, torch.get_device_module(kind).current_device())
        if kind != "cpu"
        else torch.device(kind)
    )
    seen = torch.tensor([digest, -digest], dtype=torch.int64, device=device)
    for axis in range(mesh.ndim):
        if mesh.size(axis) > 1:
            dist.all_reduce(seen, op=dist.ReduceOp.MAX, group=mesh.get_group(axis))
    if int(seen[0]) != -int(seen[1]):
        raise MeshError(
            message(
                f"{type(model).__name__}: the ranks of the mesh hold different models",
                expected="the same names, shapes, dtypes and devices everywhere",
                got=f"here {len(described)} parameters, the first {described[0][:3] if described else None}",
                fix="build the model from the same configuration on all ranks",
            )
        )


def check_replicas(model: nn.Module, planned: Iterable[Planned], meshes: Meshes) -> None:
    """Raise on all ranks unless parameters on the device are equal wherever they must be.

    Before FSDP2 cuts them, all data-parallel ranks hold the same tp-local tensors, and all tp ranks the same
    replicated parameters. FSDP2 takes each rank's part from that rank, so that differing initialisations
    would be mixed in silence.

    Collective over the world: two max all-reduces of two integers per parameter.

    Raises:
        InitError: Names the parameters that differ.
    """
    names, sums, replicated = [], [], []
    rules = {id(item.module): item.rules for item in planned}
    for prefix, module in model.named_modules():
        for name, parameter in module._parameters.items():
            local = None if parameter is None else _torch.local_of(parameter)
            if local is None or local.is_meta:
                continue
            names.append(f"{prefix}.{name}" if prefix else name)
            sums.append(_checksum(local))
            rule = rules.get(id(module), {}).get(name)
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
