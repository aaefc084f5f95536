"""Checks that a CUDA graph recording is possible, or still valid."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from te_fsdp.errors import InputError
from te_fsdp.features.main_params import main_parameters_of
from te_fsdp.features.nan_report import NanReport
from te_fsdp.features.replicated_gradients import ReplicatedGradients
from te_fsdp.features.unreduced_gradients import is_marker
from te_fsdp.lifecycle import quantized_of_optimizer
from te_fsdp.sharded_model import ShardedModel
from te_fsdp.upstream import (
    fsdp2_gradients as _fsdp2_gradients,
    te as _te,
    te_modules as _te_modules,
    torch_dtensor as _torch,
)

# --- changes since a recording


def _addresses(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the data addresses of a tensor; for a quantized tensor, those of each buffer."""
    local = _torch.local_of(tensor)
    if _te.is_quantized(local):
        return tuple([buffer.data_ptr() for buffer in _te.value_buffers_of(local)])
    return (local.data_ptr(),)


class ModuleSnapshot:
    """Modules, parameters and buffers on which a recording depends. ``addresses_of`` returns a tensor's addresses."""

    def __init__(
        self, module: nn.Module, addresses_of: Callable[[torch.Tensor], tuple[int, ...]] = _addresses
    ) -> None:
        self._addresses_of = addresses_of
        self._modules = [(m, tuple(m._modules.values()), m.training) for m in module.modules()]
        self._tensors: list[tuple[dict[Any, Any], Any, torch.Tensor, tuple[int, ...], bool]] = []
        for part, _, _ in self._modules:
            self.watch(part._parameters)
            self.watch(part._buffers)

    def watch(self, owner: dict[Any, Any]) -> None:
        """Record the tensors of a dict, with their addresses."""
        for key, tensor in owner.items():
            if isinstance(tensor, torch.Tensor):
                self._tensors.append((owner, key, tensor, self._addresses_of(tensor), tensor.requires_grad))

    def changed(self) -> str:
        """Return a description of the first change since; empty if there is none. Local operation."""
        # The recorded kernels are those of one mode: dropout, for example, runs only in training.
        if any(
            m.training != training or tuple(m._modules.values()) != children
            for m, children, training in self._modules
        ):
            return "a module, or a module's training mode"
        for owner, key, tensor, addresses, trained in self._tensors:
            if owner.get(key) is not tensor or tensor.requires_grad != trained:
                return f"{key} is a different tensor, or its requires_grad has changed"
            if self._addresses_of(tensor) != addresses:
                return f"{key} has a different address"
        return ""


class Snapshot(ModuleSnapshot):
    """State on which a recording depends, taken while weights are sharded. ``None``: without the optimizer's step."""

    def __init__(self, state: ShardedModel, optimizer: Optimizer | None) -> None:
        super().__init__(state.model)
        self._state, self._optimizer = state, optimizer
        for module in state.model.modules():
            self.watch(_te_modules.cached_weights(module))
            # Scales and histories of delayed scaling are not buffers of the module.
            for recipe_state in (_te.delayed_states(module) or {}).values():
                self.watch(vars(recipe_state))
        # Identify states by parameter and name, because state dicts recreate the dicts in between.
        self._states = [
            (parameter, name, tensor, _addresses(tensor))
            for parameter, param_state in (optimizer.state if optimizer is not None else {}).items()
            for name, tensor in param_state.items()
            if isinstance(tensor, torch.Tensor)
        ]
        self._options, self._settings = self._optimizer_options(), self._current_settings()

    def changed(self) -> str:
        """Return a description of the first change since; empty if there is none. Local operation."""
        if change := super().changed():
            return change
        for parameter, name, tensor, addresses in self._states:
            current = self._optimizer.state.get(parameter, {}).get(name)  # type: ignore[union-attr]
            if current is not tensor or _addresses(tensor) != addresses:
                return f"{name} of the optimizer's state is a different tensor"
        if self._optimizer_options() != self._options:
            return "the optimizer's parameters or options"
        if self._current_settings() != self._settings:
            return "a setting of te_fsdp, or hooks of the optimizer"
        return ""

    def _optimizer_options(self) -> list[Any]:
        """Return parameters and options of the optimizer, except learning rates."""
        options: list[Any] = []
        for group in self._optimizer.param_groups if self._optimizer is not None else ():
            options.append([id(parameter) for parameter in group["params"]])
            options += [
                (name, _torch.local_of(value).data_ptr() if isinstance(value, torch.Tensor) else value)
                for name, value in _options(group).items()
            ]
        return options

    def _current_settings(self) -> list[Any]:
        """Return the settings of te_fsdp, and the number of the optimizer's hooks."""
        comm, report = self._state.sync.comm, self._state.components.get(NanReport)
        sent = None if comm is None else (comm.dtype, comm.fp32_sum)
        hooks = len(_torch.step_hooks(self._optimizer)) if self._optimizer is not None else 0
        return [self._state.sync.mode, sent, id(report), None if report is None else report.action, hooks]


class Buffers:
    """Buffers in a module before a capture, and tensors that are attributes of modules."""

    def __init__(self, module: nn.Module) -> None:
        self._buffers, self._attributes = list[tuple[Any, ...]](), list[tuple[Any, ...]]()
        for part in module.modules():
            for entries, owner in ((self._buffers, part._buffers), (self._attributes, vars(part))):
                entries += [
                    (owner, name, tensor, tensor.detach(), _addresses(tensor))
                    for name, tensor in owner.items()
                    if isinstance(tensor, torch.Tensor)
                ]

    def replaced(self) -> str:
        """Return the name of the first buffer that is a different tensor or has other memory; else empty."""
        for owner, name, tensor, _, addresses in self._buffers:
            if owner.get(name) is not tensor or _addresses(tensor) != addresses:
                return name
        return ""

    def restore(self) -> None:
        """Restore all tensors and their memory, because a failed capture has computed no values. Local operation."""
        for owner, name, tensor, alias, addresses in self._buffers + self._attributes:
            owner[name] = tensor
            if _addresses(tensor) != addresses:
                tensor.data = alias


# [Note: states in a capture] A step creates the states of parameters that it updates for the first time. They were
# frozen in earlier steps, or their states have been cleared. A graph would create them again in each replay. So this
# step runs eagerly, after the graph of the gradients, and the next one is recorded.
class OptimizerStates:
    """Tensors in an optimizer's state and options before the capture of its step."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._states = {parameter: dict(state) for parameter, state in optimizer.state.items()}
        self._options = [_options(group) for group in optimizer.param_groups]

    def changed(self) -> str:
        """Return "created" or "replaced" for tensors that are different now; empty if there are none."""
        pairs = [(self._states.get(parameter, {}), now) for parameter, now in self._optimizer.state.items()]
        pairs += [
            (options, _options(group))
            for options, group in zip(self._options, self._optimizer.param_groups, strict=True)
        ]
        new = [
            name in before
            for before, now in pairs
            for name, value in now.items()
            if isinstance(value, torch.Tensor) and value is not before.get(name)
        ]
        return "" if not new else "replaced" if any(new) else "created"

    def restore(self) -> None:
        """Restore states and options, because a capture computes no values. Local operation."""
        for parameter, state in list(self._optimizer.state.items()):
            state.clear()
            state.update(self._states.get(parameter, {}))
            if not state and parameter not in self._states:
                del self._optimizer.state[parameter]
        for options, group in zip(self._options, self._optimizer.param_groups, strict=True):
            for name in _options(group).keys() - options.keys():
                del group[name]
            group.update(options)


def _options(group: dict[str, Any]) -> dict[str, Any]:
    """Return the options of a parameter group, except learning rates."""
    return {name: value for name, value in group.items() if name not in ("params", "lr")}


# -------------------------------------------------------------------------------------------------------- microbatches


def require_microbatches(leaves: Sequence[Any], microbatches: int) -> None:
    """Raise InputError if a tensor argument does not have one entry for each microbatch. Local operation."""
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor) and leaf.dim() and leaf.shape[0] != microbatches:
            raise InputError(
                "graphed_step: an argument does not have one entry for each microbatch",
                expected=f"tensors whose dim 0 has microbatches={microbatches} entries, or tensors without dims",
                got=f"a tensor of shape {tuple(leaf.shape)}",
                fix="stack the microbatches (torch.stack), or pass the function of the full loop without microbatches=",
            )


def addresses_between_microbatches(state: ShardedModel) -> dict[str, tuple[int, ...]]:
    """Return the addresses of the tensors that a microbatch leaves to the next one: gradients, unsharded weights.

    Local operation. A unit's unsharded and partially reduced gradients have the unit's name and a number.
    """
    labeled = {
        f"the gradient of {name}": _addresses(parameter.grad)
        for name, parameter in state.parameters().items()
        # Markers stand for gradients that are reduced later, and have no storage.
        if parameter.grad is not None and not is_marker(parameter.grad)
    }
    replicated = state.components.get(ReplicatedGradients)
    for number, gradient in enumerate(replicated.waiting() if replicated is not None else ()):
        labeled[f"an unreduced gradient of parameters that are not sharded ({number})"] = _addresses(gradient)
    for name, unit in state.modules.items():
        for number, tensors in enumerate(_fsdp2_gradients.tensors_between_microbatches(unit)):
            label = f"an unreduced gradient or weight of {name or 'the root unit'} ({number})"
            labeled[label] = tuple([address for tensor in tensors for address in _addresses(tensor)])
    return labeled


# --- reasons


def reason_not_recordable(optimizer: Optimizer, leaves: Sequence[Any]) -> str:
    """Return why a step cannot be recorded at all; empty if no reason is known. Local operation."""
    if any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in leaves):
        return "an input requires a gradient, which a recording does not return"
    if main_parameters_of(optimizer) is not None and (why := reason_for_eager_step(optimizer)):
        return f"gradients are averaged in the optimizer's step, which runs eagerly: {why}"
    return ""


def reason_for_eager_step(optimizer: Optimizer) -> str:
    """Return why the optimizer's step cannot be recorded; empty if no reason is known. Local operation."""
    name = type(optimizer).__name__
    # te_fsdp's own hooks support recording.
    foreign = [
        hook
        for hook in _torch.step_hooks(optimizer)
        if not str(getattr(hook, "__module__", "")).startswith("te_fsdp.")
    ]
    if foreign:
        return (
            f"{name} has a hook that a replay would not call ({getattr(foreign[0], '__name__', foreign[0])})"
        )
    if _te.is_fused_adam(optimizer):
        if not optimizer.capturable:  # type: ignore[missing-attribute]
            return "FusedAdam was built without capturable=True"
        quantized = [local for _, _, local in quantized_of_optimizer(optimizer)]
        # With replaced parameters FusedAdam sees main weights only, and te_fsdp quantizes.
        if main_parameters_of(optimizer) is None and any(map(_te.has_delayed_scale, quantized)):
            return (
                "FusedAdam cannot be captured over weights with delayed scaling; torch.optim.AdamW(fused=True, "
                "capturable=True) with te_fsdp.main_weights can"
            )
        return ""
    groups = optimizer.param_groups
    if isinstance(optimizer, torch.optim.SGD):
        # Only its fused form reads the learning rate on the device, if DTensor supports it.
        sharded = any(isinstance(p, DTensor) for group in groups for p in group["params"])
        if sharded and not _torch.dtensor_supports("_fused_sgd_.tensor_lr"):
            return "SGD reads its learning rate on the host, and this torch has no fused SGD for sharded parameters"
        fused = all(group.get("fused") for group in groups)
        return "" if fused else "SGD reads its learning rate on the host unless it is built with fused=True"
    if not all("capturable" in group for group in groups):
        return f"{name} has no option capturable"
    return "" if all(group["capturable"] for group in groups) else f"{name} was built without capturable=True"


# --- arguments


class Signature(NamedTuple):
    """Properties of a call's arguments on which a recording depends: everything except tensor values."""

    structure: Any  #: Structure of tuples, lists and dicts
    #: Shape, dtype and requires_grad of tensors; other values themselves, objects with their attributes.
    leaves: list[Any]

    @classmethod
    def of(cls, leaves: list[Any], structure: Any, context: tuple[Any, ...] = ()) -> Signature:
        """Return the signature of flattened arguments, and of values that a forward reads in addition."""
        kinds = [
            ("tensor", leaf.shape, leaf.dtype, leaf.requires_grad)
            if isinstance(leaf, torch.Tensor)
            else _with_contents(leaf)
            for leaf in leaves
        ]
        return cls(structure, [*kinds, *context])

    def fits(self, other: Signature) -> bool:
        """Return whether a recording for one signature is valid for the other."""
        return (
            self.structure == other.structure
            and len(self.leaves) == len(other.leaves)
            and all(map(_same, self.leaves, other.leaves))
        )


class _Object(NamedTuple):
    """An argument whose code may change it in place, with its contents."""

    value: Any
    contents: Signature


def _with_contents(value: Any, depth: int = 3) -> Any:
    """Return an object with its attributes and entries; other values themselves.

    A recording reads the tensors that an object had in the capture. Tensors in it are therefore compared by identity.
    """
    attributes = getattr(value, "__dict__", None)
    if not depth or not isinstance(attributes, dict) or isinstance(value, (type, nn.Module)):
        return value
    entries = dict(value) if isinstance(value, Mapping) else list(value) if isinstance(value, list) else None
    leaves, structure = _torch.flatten((attributes, entries))
    return _Object(value, Signature(structure, [_with_contents(leaf, depth - 1) for leaf in leaves]))


def _same(value: Any, other: Any) -> bool:
    """Return whether two values are equal. Objects without a comparison count as different."""
    if isinstance(value, _Object) and isinstance(other, _Object):
        return _same(value.value, other.value) and value.contents.fits(other.contents)
    if value is other or isinstance(value, torch.Tensor):
        return value is other
    try:
        return type(value) is type(other) and bool(value == other)
    except (RuntimeError, ValueError, TypeError):  # arrays, and dataclasses with tensors
        return False
