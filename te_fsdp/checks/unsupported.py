"""What a sharded model cannot do, or does only with help, found before torch fails without a name.

copies                    deepcopy, pickle, AveragedModel
parameters taken away     a parametrization, pruning, ``del module.weight`` after ``fully_shard``
second derivatives        FSDP2 releases weights that they need; TransformerEngine's kernels have none
units called on their own    the root is chosen as if the model had run first
outputs of any class      FSDP2 finds tensors in those that pytree knows; others are searched here
"""

from __future__ import annotations

import functools
import operator
from typing import TYPE_CHECKING, Any

import torch

from te_fsdp.errors import OrderError, PlacementError, shorten
from te_fsdp.records import iter_param_owners
from te_fsdp.upstream import fsdp2_outputs as _fsdp2_outputs, fsdp2_units, te as _te, torch_dtensor as _torch

if TYPE_CHECKING:
    from torch import nn

    from te_fsdp.sharded_model import ShardedModel


def watch_unsupported(state: ShardedModel) -> None:
    """Find, from now on, what a sharded model cannot do.

    Local operation; call it before :func:`register_forward_hooks`.
    """
    model = state.model
    for place in iter_param_owners(model, remove_duplicate=False):
        state.places.setdefault(
            (id(place.owner), place.name), (place.owner._parameters, place.name, place.label)
        )
    for name, unit in {"": model, **state.modules}.items():
        _refuse_copies(unit, name or type(model).__name__.removeprefix("FSDP"))
    for name, unit in state.modules.items():
        _fsdp2_outputs.before_backward(unit, functools.partial(refuse_second_derivatives, name))
        unit.register_forward_hook(_torch.disable_compile(functools.partial(_after_unit, name)))


# ------------------------------------------------------------------------------------------------------------- copies


def _refuse_copies(module: nn.Module, label: str) -> None:
    """Raise in ``copy.deepcopy`` and pickles of a module. Both look for these methods on the object itself."""
    module.__dict__["__deepcopy__"] = functools.partial(_refuse_copy, label, "deepcopy")
    module.__dict__["__reduce_ex__"] = functools.partial(_refuse_copy, label, "pickle")


def _refuse_copy(label: str, how: str, *_: Any) -> Any:
    if how == "pickle":
        raise OrderError(
            f"{label}: pickle of a model after fully_shard, as torch.save(model) makes it",
            expected="a state dict or a checkpoint",
            got="modules with process groups and hooks",
            fix="te_fsdp.checkpoint.save(path, model, optimizer) on all ranks",
        )
    raise OrderError(
        f"{label}: deepcopy of a model after fully_shard, as torch.optim.swa_utils.AveragedModel makes it",
        expected="a model that is not sharded yet",
        got="units of FSDP2, whose parameter groups and hooks belong to this model",
        fix="average shards: average = [p.detach().clone() for p in model.parameters()] and torch._foreach_lerp_ "
        "(docs/data.md has the loop); for a second model, build and shard one more",
    )


# ---------------------------------------------------------------------------------------------- parameters taken away


def refuse_taken_away(state: ShardedModel) -> None:
    """Raise unless all parameters that were sharded are still registered. Local operation, before FSDP2 gathers."""
    columns = list(zip(*state.places.values(), strict=True))
    if not columns or all(map(operator.contains, columns[0], columns[1])):
        return
    owners = {id(module._parameters) for module in state.model.modules()}
    gone = [label for held, name, label in state.places.values() if name not in held and id(held) in owners]
    if gone:
        raise OrderError(
            f"{shorten(gone, 3)}: taken away after fully_shard",
            expected="the parameters that te_fsdp.fully_shard has sharded",
            got="a weight that is computed, as by parametrizations, weight_norm and pruning, or a deleted one",
            why="The gathered weight would have no place, and the parameters behind the computed one no gradients",
            fix="parametrize or prune the module before te_fsdp.fully_shard",
        )


# ------------------------------------------------------------------------------------------------- second derivatives


def refuse_second_derivatives(unit: str) -> None:
    """Raise in a backward with ``create_graph=True`` that reaches a sharded unit. Local, before it is gathered."""
    if torch.is_grad_enabled() and _torch.in_backward():
        raise OrderError(
            f"{unit or 'the root unit'}: backward with create_graph=True through sharded weights",
            expected="first derivatives",
            got="a graph for second ones, as a gradient penalty or a Hessian needs it",
            why="FSDP2 releases the gathered weights after the first backward, which the second one reads",
            fix="keep what the penalty reaches whole: strategy='no_shard', or te_fsdp.fsdp_no_shard(module); compute "
            "the penalty with torch's own layers, since kernels of TransformerEngine have no second derivatives",
        )


def first_te_module(model: nn.Module) -> str | None:
    """Return the name of a module of TransformerEngine in a model, ``None`` if it has none."""
    return next((name or "the model" for name, module in model.named_modules() if _te.kind_of(module)), None)


def refuse_second_derivatives_of_te(name: str | None) -> None:
    """Raise in a backward with ``create_graph=True`` of a model with a module of TransformerEngine. Local operation."""
    if name is not None and torch.is_grad_enabled() and _torch.in_backward():
        raise OrderError(
            f"{name}: backward with create_graph=True through a module of TransformerEngine",
            expected="first derivatives",
            got="a graph for second ones, as a gradient penalty or a Hessian needs it",
            why="Kernels of TransformerEngine have no second derivatives: the terms through them would be missing",
            fix="use torch's own layers in what the penalty reaches",
        )


# ------------------------------------------------------------------------------------------------- units on their own


def choose_root(state: ShardedModel, unit: nn.Module) -> None:
    """Let FSDP2 take the outermost unit around ``unit`` for its root, before its first forward. Local operation."""
    if _fsdp2_outputs.is_bound_to_root(unit):
        return
    around = [state.model] if fsdp2_units.is_fsdp_module(state.model) else []
    around += reversed(state.modules.values())
    for outer in around:
        if outer is not unit and any(inner is unit for inner in outer.modules()):
            _fsdp2_outputs.choose_root(outer)
            return


# ------------------------------------------------------------------------------------------------------------ outputs


def _after_unit(name: str, unit: nn.Module, args: Any, output: Any) -> None:
    """Let a unit be gathered in the backward of all tensors that it returns, in objects of any class."""
    if not torch.is_grad_enabled() or _torch.in_backward():
        return
    opaque = _fsdp2_outputs.opaque_in(output)
    if not opaque:
        return
    found = list(_fsdp2_outputs.tensors_in(opaque))
    _fsdp2_outputs.gather_in_backward_of(unit, [tensor for tensor in found if tensor.requires_grad])
    others = any(isinstance(leaf, torch.Tensor) for leaf in _torch.flatten(output)[0])
    if found or others or not any(parameter.requires_grad for parameter in unit.parameters()):
        return
    kinds = dict.fromkeys(type(item).__name__ for item in opaque)
    raise PlacementError(
        f"{name or type(unit).__name__.removeprefix('FSDP')}: forward returned {shorten(list(kinds), 3)}",
        expected="tensors, or containers, dataclasses and objects that hold them as attributes",
        got="an object in which no tensor is found",
        why="FSDP2 gathers the weights of a unit for backward by hooks on the tensors that it returns",
        fix="return the tensors, a tuple or a dict of them; or make no unit of this module",
    )
