"""Optimizers whose step would fail, or be wrong, on sharded parameters: refused before anything has changed.

    Adafactor, Rprop          operations that DTensor refuses, after others have changed weights
    Muon of torch             a matrix of which a rank has no rows
    SGD, Adagrad, fused=True  one operator for all parameters that DTensor has no rule for
    LBFGS                     one vector of all gradients: DTensor puts it together of equal parts of rows alone
    FusedSGD of TE            a kernel that gets DTensors, which have no memory of their own

docs/optimizers.md has the table of those that are exact.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from te_fsdp import _te, _torch
from te_fsdp.errors import PlacementError
from te_fsdp.parameters import label_of

if TYPE_CHECKING:
    from torch.optim import Optimizer

#: Optimizers of torch with operations that DTensor refuses, after others have changed weights (torch 2.11 to 2.15).
_UNFIT = ("Adafactor", "Rprop")
#: The operator of a class's fused form, of those that DTensor may not know (torch 2.11 to 2.15 know Adam's).
_FUSED: dict[type, str] = {torch.optim.SGD: "_fused_sgd_", torch.optim.Adagrad: "_fused_adagrad_"}


class _Refusal(NamedTuple):
    got: str
    why: str
    fix: str


def refuse_unfit(optimizer: Optimizer, held: list[torch.Tensor]) -> None:
    """Raise for an optimizer whose step would fail, half way or with an error of DTensor's own. Local operation.

    Args:
        optimizer: Any optimizer.
        held: Those of its parameters that are looked at.

    Raises:
        PlacementError: It is one of those.
    """
    sharded = [p for p in held if isinstance(p, DTensor)]
    if not sharded:
        return
    for look in (_by_operations, _by_empty_shards, _by_fused_operator, _by_flat_vector):
        refusal = look(optimizer, sharded)
        if refusal is not None:
            raise PlacementError(
                f"{type(optimizer).__name__} of sharded parameters",
                expected="parameters that it can update",
                **refusal._asdict(),
            )


def _by_operations(optimizer: Optimizer, sharded: list[DTensor]) -> _Refusal | None:
    got = f"{len(sharded)} sharded ones"
    if type(optimizer) in [getattr(torch.optim, unfit) for unfit in _UNFIT]:
        fix = "an optimizer that works element by element, such as torch.optim.AdamW"
        return _Refusal(got, "It uses operations that torch's DTensor refuses", fix)
    if _te.is_fused_sgd(optimizer):
        why = "TransformerEngine hands them to a kernel as DTensors, which have no memory of their own"
        return _Refusal(got, why, "torch.optim.SGD(..., foreach=True)")
    return None


def _by_empty_shards(optimizer: Optimizer, sharded: list[DTensor]) -> _Refusal | None:
    muon = getattr(torch.optim, "Muon", None)
    if muon is None or type(optimizer) is not muon or not any(map(_has_empty_shards, sharded)):
        return None
    fix = "te_fsdp.Muon(model, params, ...), which takes any shards"
    return _Refusal("some of which a rank has no rows", "torch's DTensor cannot update them", fix)


def _by_fused_operator(optimizer: Optimizer, sharded: list[DTensor]) -> _Refusal | None:
    operator = next((name for kind, name in _FUSED.items() if isinstance(optimizer, kind)), None)
    ids = set(map(id, sharded))
    for group in optimizer.param_groups if operator is not None else ():
        if not group.get("fused") or not any(id(p) in ids for p in group["params"]):
            continue
        by_tensor = isinstance(group.get("lr"), torch.Tensor)
        if not _torch.has_rule(f"{operator}.{'tensor_lr' if by_tensor else 'default'}"):
            name = type(optimizer).__name__
            return _Refusal(
                f"{len(sharded)} sharded ones, and fused=True",
                f"This torch's DTensor has no rule for {operator}",
                f"{name}(..., foreach=True), which takes a few kernels as well; Adam and AdamW take fused=True",
            )
    return None


def _by_flat_vector(optimizer: Optimizer, sharded: list[DTensor]) -> _Refusal | None:
    if not isinstance(optimizer, torch.optim.LBFGS):
        return None
    fix = "sizes that dp_shard divides and no tp, parameters that are all trained; or torch.optim.AdamW"
    for parameter in sharded:
        if not _has_equal_rows(parameter):
            label = label_of(parameter)
            return _Refusal(
                f"{label}, which ranks do not hold equal parts of rows of",
                "It puts all gradients into one vector, which DTensor does with such parts alone",
                fix,
            )
        if not parameter.requires_grad:
            label = label_of(parameter)
            why = "It takes zeros for a gradient that is not there, as a tensor that DTensor takes with no others"
            return _Refusal(f"{label}, which is not trained", why, fix)
    return None


def _has_equal_rows(parameter: DTensor) -> bool:
    """Whether each rank holds as many whole rows as any other, or all: the same on all ranks."""
    mesh = parameter.device_mesh
    cut = [
        (mesh.size(axis), _torch.shard_dim_of(placement))
        for axis, placement in enumerate(parameter.placements)
        if _torch.shard_dim_of(placement) is not None and mesh.size(axis) > 1
    ]
    return not cut or (len(cut) == 1 and cut[0][1] == 0 and parameter.shape[0] % cut[0][0] == 0)


def _has_empty_shards(parameter: DTensor) -> bool:
    """Whether some rank holds nothing of it: the same on all ranks."""
    lengths = list(parameter.shape)
    # Later axes cut first.
    for axis in reversed(range(parameter.device_mesh.ndim)):
        dim = _torch.shard_dim_of(parameter.placements[axis])
        if dim is not None:
            ranks = parameter.device_mesh.size(axis)
            lengths[dim], whole = -(-lengths[dim] // ranks), lengths[dim]
            if lengths[dim] * (ranks - 1) >= whole and ranks > 1:
                return True
    return False
