"""Checks of a sharded model's backwards."""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from te_fsdp.collectives.rendezvous import is_capturing
from te_fsdp.errors import OrderError, shorten
from te_fsdp.features.unreduced_gradients import UnreducedGradients
from te_fsdp.sharded_model import ShardedModel
from te_fsdp.upstream import (
    fsdp2_gradients as _fsdp2_gradients,
    fsdp2_state as _fsdp2,
    te as _te,
    te_modules as _te_modules,
    torch_autograd as _torch_autograd,
    torch_dtensor as _torch,
)
from te_fsdp.upstream.torch_autograd import graph_nodes, second_backward, second_derivatives


def check_backward_start(state: ShardedModel, trained: Sequence[torch.Tensor]) -> None:
    """Check gradients and weights at the start of each backward of these outputs. Local operation."""
    # A weak reference, because the hooks of an output that the user keeps must not keep the model alive.
    of, versions = weakref.ref(state), _versions(state)

    def check(earlier: list[int], gradient: torch.Tensor) -> None:
        """Check at the start of a backward. ``earlier`` are the backwards of this tensor so far."""
        state = of()
        if state is None:
            return
        # Only after an earlier backward, because the graph of a first one is never consumed.
        if earlier and _te_modules.is_graph_consumed(_torch_autograd.current_node()):
            name = next((name for name, module in state.model.named_modules() if _te.kind_of(module)), "")
            raise second_backward(name or type(state.model).__name__)
        earlier.append(_torch.backward_id())
        component: Any = state.components.by_class[UnreducedGradients]
        if component.checked == _torch.backward_id():
            return  # checked for another output; an optimizer may have stepped in backward since
        component.checked = _torch.backward_id()
        if component.progress is not None:
            component.progress.count(state)
        _check_adds_gradients(state)
        now = _versions(state)
        if now != versions and not is_capturing():
            _raise_written(state, versions, now)

    for tensor in trained:
        tensor.register_hook(functools.partial(check, []))


def _trained_params(state: ShardedModel) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
    """Return each trained parameter with its unsharded parameter, or with ``None`` if the unit is not unsharded."""
    component: Any = state.components.by_class[UnreducedGradients]
    pairs = _fsdp2_gradients.sharded_unsharded_pairs(component.groups)
    return pairs + [(parameter, None) for parameter in _trained_replicas(state)]


def _trained_replicas(state: ShardedModel) -> list[torch.Tensor]:
    """Return the trained parameters that FSDP2 does not manage."""
    reduced = itertools.chain(*[parameters() for parameters in state.components.reduced_parameters])
    return [parameter for parameter in reduced if parameter.requires_grad]


def _versions(state: ShardedModel) -> tuple[list[int], list[int]]:
    """Return the versions of the sharded and of the unsharded parameters of :func:`_trained_params`."""
    watched = _trained_params(state)
    if not watched:
        return [], []
    sharded, unsharded = zip(*watched, strict=True)
    return _torch.versions_of(sharded), _torch.versions_of(unsharded)


def _check_adds_gradients(state: ShardedModel) -> None:
    """Raise :class:`OrderError` if ``torch.autograd.grad`` runs for parameters, since its results are not reduced."""
    component: Any = state.components.by_class[UnreducedGradients]
    # The leaf that the previous backward added to usually answers for all.
    if component.added is not None and _fsdp2_gradients.leaf_in_backward(component.added) == "adds":
        return
    # The parameter may be frozen by now, or not be a part of this backward.
    component.added = None
    # Without data parallelism the gradient of this rank is the complete one.
    if state.meshes.size("dp_replicate") * state.meshes.size("dp_shard") == 1:
        return
    replicated = [(p, p) for p in _trained_replicas(state)]
    for parameter, leaf in itertools.chain(_fsdp2_gradients.leaves_of(component.groups), replicated):
        does = _fsdp2_gradients.leaf_in_backward(leaf)
        if does == "adds":
            component.added = leaf
            return
        # A leaf that this backward does not reach does neither, so the next one decides.
        if does == "returns":
            raise OrderError(
                f"torch.autograd.grad for {component.names()[id(parameter)]}",
                expected="loss.backward(), whose gradients are reduced over the data-parallel ranks",
                got="torch.autograd.grad for parameters, which returns the gradient of this rank's batch only",
                why="The result would differ between ranks",
                fix="call loss.backward() and read .grad; te_fsdp.clip_grad_norm_(model, math.inf) returns the norm",
            )


def _raise_written(state: ShardedModel, *versions: tuple[list[int], list[int]]) -> None:
    """Raise :class:`OrderError` for trained parameters that were written to since the forward."""
    (sharded, unsharded), (sharded_now, unsharded_now) = versions
    watched = _trained_params(state)
    if len(watched) != len(sharded):
        return  # the user froze or unfroze parameters
    # A version is -1 while a unit is not unsharded. FSDP2 may have unsharded or resharded it since the forward.
    written = [
        parameter
        for (parameter, _), old, new, old_full, new_full in zip(
            watched, sharded, sharded_now, unsharded, unsharded_now, strict=True
        )
        if old != new or (old_full != new_full and -1 not in (old_full, new_full))
    ]
    if written:
        component: Any = state.components.by_class[UnreducedGradients]
        names_by_id = component.names()
        names = [names_by_id[id(parameter)] for parameter in written]
        raise OrderError(
            f"{shorten(names, 3)}: written to between forward and backward",
            expected="a backward with the weights of its forward",
            got=f"{len(names)} parameter(s) changed by step() or by user code since the forward",
            why="The gradients would belong to different weights, or the write would be lost",
            fix="run backward before step() and before writes to weights, or repeat the forward after them",
        )


def refuse_split_backward(state: ShardedModel) -> None:
    """Refuse, at the first backward of a pipeline's stage, a schedule that splits backward. Local operation."""
    # Zero-bubble schedules compute gradients of a stage's inputs first, and those of its weights in a second
    # backward through the same graph. Modules of TransformerEngine compute both at once and free the saved
    # tensors.
    if state.meshes.pp is None or not any(_te.kind_of(module) for module in state.model.modules()):
        return
    handles: list[Any] = []

    def refuse_split(leaf: Any, gradient: torch.Tensor) -> None:
        if _fsdp2.defers_leaf_gradient(leaf):
            raise OrderError(
                "a backward only for the inputs of a pipeline stage, before a separate one for its weights",
                expected="one backward for both, as in TransformerEngine's modules",
                got="a schedule that splits backward (zero bubble)",
                fix="use PipelineStage(..., dw_builder=lambda: lambda: None), which computes both in the first, or a "
                "schedule that does not split, such as Schedule1F1B or ScheduleInterleaved1F1B",
            )
        while handles:
            handles.pop().remove()

    def watch(module: nn.Module, args: Any, output: Any) -> None:
        for tensor in _torch.flatten(output)[0]:
            nodes = graph_nodes(tensor.grad_fn) if isinstance(tensor, torch.Tensor) else ()
            # The nearest parameter is enough: a split backward omits all of them.
            leaf = next(
                (n for n in nodes if isinstance(getattr(n, "variable", None), torch.nn.Parameter)), None
            )
            if leaf is not None:
                tensor.register_hook(functools.partial(refuse_split, leaf))

    handles.append(state.model.register_forward_hook(_torch.disable_compile(watch)))


def refuse_second_derivatives(unit: str) -> None:
    """Raise in a backward with ``create_graph=True`` that reaches a sharded unit. Local, before it is gathered."""
    if torch.compiler.is_compiling():
        return  # a compiler traces this hook, too
    if torch.is_grad_enabled() and _torch.in_backward():
        raise second_derivatives(unit or "the root unit")


def refuse_second_derivatives_of_te(state: ShardedModel) -> None:
    """Raise in a backward with ``create_graph=True`` of a model with a module of TransformerEngine. Local operation."""
    if not (torch.is_grad_enabled() and _torch.in_backward()):
        return
    names = (name or "the model" for name, module in state.model.named_modules() if _te.kind_of(module))
    name = next(names, None)
    if name is not None:
        raise OrderError(
            f"{name}: backward with create_graph=True through a TransformerEngine module",
            expected="first derivatives",
            got="a graph for second derivatives, as for a gradient penalty or a Hessian",
            why="TransformerEngine's kernels have no second derivatives, so that terms would be missing",
            fix="use torch's own layers in the part that the penalty reaches",
        )
