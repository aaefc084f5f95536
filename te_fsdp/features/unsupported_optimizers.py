"""Optimizers that cannot update sharded or quantized parameters."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from te_fsdp.errors import PlacementError, PrecisionError
from te_fsdp.records import KEEPS_MAIN_WEIGHTS, label_of
from te_fsdp.upstream import te as _te, torch_dtensor as _torch

#: Optimizers of torch with operations that DTensor refuses, after others have changed weights (torch 2.11 to 2.15).
_UNFIT = ("Adafactor", "Rprop")
#: The operator of a class's fused form that DTensor may have no rule for (torch 2.11 to 2.15 have Adam's).
_FUSED: dict[type, str] = {torch.optim.SGD: "_fused_sgd_", torch.optim.Adagrad: "_fused_adagrad_"}


def refuse_unsupported_optimizer(optimizer: Optimizer, params: list[torch.Tensor]) -> None:
    """Raise for an optimizer whose step would fail, or be wrong, on the sharded parameters of ``params``. Local."""
    # docs/optimizers.md has the table of exact optimizers.
    sharded = [p for p in params if isinstance(p, DTensor)]
    kind, got = type(optimizer), f"{len(sharded)} sharded ones"

    def refused(got: str, why: str, fix: str) -> PlacementError:
        what = f"{kind.__name__} of sharded parameters"
        return PlacementError(what, expected="parameters that it can update", got=got, why=why, fix=fix)

    if not sharded:
        return
    if kind in [getattr(torch.optim, unfit) for unfit in _UNFIT]:
        fix = "use an elementwise optimizer, such as torch.optim.AdamW"
        raise refused(got, "It uses operations that torch's DTensor refuses", fix)
    if _te.is_fused_sgd(optimizer):
        why = "TransformerEngine passes DTensors to a kernel, which have no storage"
        raise refused(got, why, "torch.optim.SGD(..., foreach=True)")
    if kind is getattr(torch.optim, "Muon", None) and any(map(_has_empty_shards, sharded)):
        fix = "use te_fsdp.Muon(model, params, ...), which takes any shards"
        got += ", some of them without rows on a rank"
        raise refused(got, "torch's DTensor cannot update them", fix)
    # LBFGS builds a vector of all gradients, which needs equal row shards.
    for parameter in sharded if isinstance(optimizer, torch.optim.LBFGS) else ():
        fix = "use sizes that dp_shard divides, no tp and only trained parameters, or torch.optim.AdamW"
        mesh, dims = parameter.device_mesh, enumerate(map(_torch.shard_dim_of, parameter.placements))
        cut = [(mesh.size(axis), dim) for axis, dim in dims if dim is not None and mesh.size(axis) > 1]
        # Whether each rank has the same number of full rows, or all rows: the same on all ranks.
        if cut and not (len(cut) == 1 and cut[0][1] == 0 and parameter.shape[0] % cut[0][0] == 0):
            got = f"{label_of(parameter)}, without equal shards of rows on all ranks"
            raise refused(
                got, "It concatenates all gradients, which DTensor supports only for such shards", fix
            )
        if not parameter.requires_grad:
            why = "It uses plain zeros for a missing gradient, which torch does not mix with DTensors"
            raise refused(f"{label_of(parameter)}, which is not trained", why, fix)
    # One operator for all parameters. DTensor may have no rule for it.
    operator = next((name for fused, name in _FUSED.items() if isinstance(optimizer, fused)), None)
    ids = set(map(id, sharded))
    for group in optimizer.param_groups if operator is not None else ():
        if not group.get("fused") or not any(id(p) in ids for p in group["params"]):
            continue
        by_tensor = isinstance(group.get("lr"), torch.Tensor)
        if not _torch.dtensor_supports(f"{operator}.{'tensor_lr' if by_tensor else 'default'}"):
            raise refused(
                f"{got}, and fused=True",
                f"This torch's DTensor has no rule for {operator}",
                f"{kind.__name__}(..., foreach=True), which also needs only a few kernels; Adam and AdamW support "
                "fused=True",
            )


def _has_empty_shards(parameter: DTensor) -> bool:
    """Return whether a rank has an empty shard: the same on all ranks."""
    lengths = list(parameter.shape)
    # Later axes shard first.
    for axis in reversed(range(parameter.device_mesh.ndim)):
        dim = _torch.shard_dim_of(parameter.placements[axis])
        if dim is not None:
            ranks = parameter.device_mesh.size(axis)
            lengths[dim], length = -(-lengths[dim] // ranks), lengths[dim]
            if lengths[dim] * (ranks - 1) >= length and ranks > 1:
                return True
    return False


# [Note: main weights of quantized weights] torch's optimizers would update quantized weights by dequantizing
# and requantizing in each operation, which silently loses most small updates. They need fp32 main weights.
# TE's FusedAdam without main weights raises or does not update delayed-scaling weights. With main weights it
# writes a shard's amax to their histories and does not update cached transposes of the Hopper layout (TE
# 2.20.2).
def check_optimizer_of_quantized(optimizer: Optimizer, label: str) -> None:
    """Raise PrecisionError if an optimizer would update a quantized weight without fp32 main weights.

    Local operation. All ranks have the same optimizer and raise the same error.
    """
    if hasattr(optimizer, KEEPS_MAIN_WEIGHTS):
        return
    got, fix = "none", "call te_fsdp.main_weights(model, optimizer) once, before the first step"
    if _te.is_fused_adam(optimizer):
        fused: Any = optimizer
        options = fused.master_weights, fused.master_weight_dtype, fused.store_param_remainders
        if options[0] and options[1] == torch.float32 and not options[2]:
            return
        got = "master_weights={}, master_weight_dtype={}, store_param_remainders={}".format(*options)
        fix = (
            "FusedAdam(..., master_weights=True), with default master_weight_dtype and store_param_remainders"
        )
    raise PrecisionError(
        f"{label}: {type(optimizer).__name__} on a quantized weight",
        expected="fp32 main weights, from which the quantized weight is quantized",
        got=got,
        why="Updates smaller than the spacing of quantized values would be lost",
        fix=fix,
    )
