"""Parts of a model that FSDP2 cannot shard.

``fully_shard`` refuses the model, or replicates the parameters (:func:`find_unshardable`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DataParallel, DistributedDataParallel

from te_fsdp.errors import OrderError, PlacementError, shorten
from te_fsdp.records import ParamOwner, is_replicated
from te_fsdp.sharded_model import sharded_model_of
from te_fsdp.upstream import fsdp2_units, te as _te, te_modules as _te_modules


def check_order(model: nn.Module) -> None:
    """Raise OrderError if FSDP2 or ``fully_shard`` was applied to a part of a model, or to one that contains it.

    Local.
    """
    for name, module in model.named_modules():
        # DDP has hooks on the parameters that FSDP2 would replace, and FSDP1 has flattened them.
        if isinstance(module, (DataParallel, DistributedDataParallel, FullyShardedDataParallel)):
            raise OrderError(
                f"{name or 'model'}: fully_shard of a {type(module).__name__}",
                expected="the wrapped model",
                got="a wrapper that reduces gradients or shards parameters itself",
                fix="use te_fsdp.fully_shard instead; strategy='no_shard' keeps unsharded weights on each rank",
            )
        if fsdp2_units.is_fsdp_module(module):
            raise OrderError(
                f"{name or type(model).__name__}: fully_shard on a module that is already sharded",
                expected="a model without FSDP2",
                got=type(module).__name__,
                why="The tensor-parallel placements must be set before FSDP2 shards the parameters",
                fix="call te_fsdp.fully_shard once, and not torch's fully_shard before it",
            )
    for name, parameter in model.named_parameters():
        if parameter.is_inference():
            raise OrderError(
                f"{name}: fully_shard of a parameter that was created under torch.inference_mode",
                expected="a model that is built outside of inference mode",
                why="torch does not count writes to inference tensors",
                fix="build the model outside, and run it under torch.inference_mode or torch.no_grad()",
            )
        # FSDP2 does not detect models without FSDP2 units, and modules inside of a sharded one.
        state = sharded_model_of(parameter)
        if state is not None:
            raise OrderError(
                f"{name}: fully_shard on a parameter that is already sharded",
                expected="a model that fully_shard was not called on",
                got=f"a parameter of a sharded {type(state.model).__name__}",
                why="Its gradients would be averaged twice",
                fix="call te_fsdp.fully_shard once, on the full model; select parts of it with units= and strategy=",
            )
        if isinstance(parameter, DTensor) and "dp_shard" in (parameter.device_mesh.mesh_dim_names or ()):
            raise OrderError(
                f"{name}: fully_shard on a parameter that is already sharded",
                expected="a plain parameter or a DTensor over ep, tp, or both",
                got=f"placements {tuple(parameter.placements)}",
                fix="build a new model",
            )


def check_accepted(model: nn.Module, units: Iterable[str], replicated: Collection[int] = ()) -> None:
    """Check for parameters that FSDP2 would refuse after it has sharded some units.

    ``replicated``: ids of unsharded parameters.
    """
    for name in units:
        module = model.get_submodule(name)
        if is_container(module):
            raise PlacementError(
                f"{name or 'model'}: fully_shard of a {type(module).__name__}",
                expected="a module with a forward",
                got="a container without a forward",
                why="FSDP2 all-gathers weights in the hooks of forward, which a container never runs",
                fix=f'units="{name}.*" for each of its children'
                if name
                else "shard the module that calls it",
            )
    for name, parameter in model.named_parameters():
        # FSDP2 raises for a scalar when it reaches the unit, and has sharded other units by then.
        if parameter.ndim == 0 and id(parameter) not in replicated:
            raise PlacementError(
                f"{name}: fully_shard of a scalar parameter",
                expected="at least one dim to shard",
                got="shape ()",
                fix="make it a tensor of shape (1,), or call te_fsdp.fsdp_no_shard(parameter)",
            )


def is_container(module: nn.Module) -> bool:
    """Return whether a module is only a container, without a forward."""
    listing = isinstance(module, (torch.nn.ModuleList, torch.nn.ModuleDict))
    return listing and type(module).forward is torch.nn.Module.forward


#: Limit of elements of a unit that are replicated because FSDP2 cannot shard them with the others.
MOST = 1 << 20


def refuse_quantized_ops(model: nn.Module, stays_replicated: Callable[[nn.Module, str], bool]) -> None:
    """Raise ``PlacementError`` for quantized weights of ``te.ops`` modules that would be sharded. Local operation."""
    for name, module in model.named_modules():
        if _te.kind_of(module) == "unknown" and _te_modules.holds_quantized(module):
            if all(stays_replicated(module, attr) for attr, p in module._parameters.items() if p is not None):
                continue
            raise PlacementError(
                f"{name or type(module).__name__}: a quantized weight of te.ops.{type(module).__name__}",
                expected="high-precision weights of te.ops modules that are sharded",
                why="Each rank would quantize its shard with a different scale",
                fix="use te.Linear and similar, te.ops modules built outside of quantized_model_init, or "
                "te_fsdp.fsdp_no_shard(module)",
            )


def refuse_sparse_gradients(model: nn.Module) -> None:
    """Raise ``PlacementError`` for a trained embedding with sparse gradients. Local operation."""
    for name, module in model.named_modules():
        if (
            isinstance(module, (nn.Embedding, nn.EmbeddingBag))
            and module.sparse
            and module.weight.requires_grad
        ):
            raise PlacementError(
                f"{name or type(module).__name__}.weight: {type(module).__name__}(sparse=True)",
                expected="dense gradients",
                got="sparse gradients",
                why="Neither FSDP2 nor the reduction of replicated gradients supports sparse tensors",
                fix="build it with sparse=False, or freeze it",
            )


# [Note: odd parameters] FSDP2 all-gathers and reduces the trained parameters of a unit in one dtype, and cannot reduce
# empty ones (torch 2.11 to 2.14). Examples are TE's ``softmax_offset``, fp32 in a bf16 model, and an fp32 vector of
# the user's. Small parameters stay unsharded, as with ``te_fsdp.fsdp_no_shard``. For large ones ``fully_shard``
# raises.
def find_unshardable(
    units: Mapping[str, list[ParamOwner]], *, one_dtype: bool, with_frozen: bool = False
) -> set[int]:
    """Return the ``id`` of each parameter in ``units`` that FSDP2 cannot shard with its unit. Local operation.

    ``one_dtype``: the trained parameters of a unit must have one dtype; ``with_frozen``: the frozen ones as well.
    Raises PlacementError if parameters that differ in dtype from the rest of their unit are too large to replicate.
    """
    unshardable: set[int] = set()
    for unit, owners in units.items():
        unshardable.update(id(owner.parameter) for owner in owners if not owner.parameter.numel())
        if one_dtype:
            trained: dict[torch.dtype, dict[int, ParamOwner]] = {}
            for owner in owners:
                parameter = owner.parameter
                counts = parameter.requires_grad or (with_frozen and parameter.is_floating_point())
                if counts and parameter.numel() and not is_replicated(owner.module, owner.name):
                    trained.setdefault(parameter.dtype, {})[id(parameter)] = owner
            if len(trained) < 2:
                continue
            sizes = {dtype: sum(p.parameter.numel() for p in ps.values()) for dtype, ps in trained.items()}
            # The name decides between equal sizes, so that all ranks choose the same dtype.
            main = max(sizes, key=lambda dtype: (sizes[dtype], str(dtype)))
            others = [owner for dtype, ps in trained.items() if dtype != main for owner in ps.values()]
            elements = sum(sizes.values()) - sizes[main]
            if elements > MOST:
                labels = [f"{owner.label} ({owner.parameter.dtype})" for owner in others]
                raise PlacementError(
                    f"{shorten(labels, 3)}: dtype of trained parameters of unit {unit or 'of the root'}",
                    expected=f"{main}, the dtype of most of the unit (up to {MOST:,} elements of other "
                    "dtypes are replicated)",
                    got=f"{elements:,} elements of other dtypes",
                    why="FSDP2 all-gathers and reduces a unit in one dtype",
                    fix="units=[...] with the modules that have these parameters, te_fsdp.fsdp_no_shard(parameter), or "
                    "precision=te_fsdp.MixedPrecisionPolicy(param_dtype=...)",
                )
            unshardable |= {id(owner.parameter) for owner in others}
    # Tied parameters of several units raise in `_check_tied`.
    units_of = Counter(key for owners in units.values() for key in {id(owner.parameter) for owner in owners})
    return {key for key in unshardable if units_of[key] == 1}
