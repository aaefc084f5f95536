"""Private names of torch for unreduced gradients under FSDP2; torch 2.11 to 2.15."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from te_fsdp.upstream.fsdp2_units import GROUP, fsdp_parameter_groups, iter_fsdp_params, record_of_group
from te_fsdp.upstream.torch_dtensor import dtensor, runs_eagerly, spec_of, with_dtype


def unreduced_gradients_of(managed: Any) -> list[torch.Tensor]:
    """Return the unsharded, unreduced gradients of an ``FSDPParam``."""
    unsharded = getattr(managed, "_unsharded_param", None)
    gradients = (getattr(managed, "unsharded_accumulated_grad", None), getattr(unsharded, "grad", None))
    return [gradient for gradient in gradients if gradient is not None]


def params_with_unreduced_gradients(unit: nn.Module) -> Iterator[Any]:
    """Yield each ``FSDPParam`` of a unit whose gradient is not reduced over all axes yet."""
    return chain.from_iterable(map(group_params_with_unreduced_gradients, fsdp_parameter_groups(unit)))


def group_params_with_unreduced_gradients(group: Any) -> Iterator[Any]:
    """Yield each ``FSDPParam`` of one group, as :func:`params_with_unreduced_gradients` does for a unit."""
    # Either its unsharded gradient is not reduce-scattered yet, or HSDP has not all-reduced the gradients of
    # its group (``FSDPParamGroup._partial_reduce_output``).
    is_partial = has_partial_reduction(group)
    for managed in group.fsdp_params:
        unsharded = getattr(managed, "_unsharded_param", None)
        # With torch 2.15 both names refer to one gradient.
        is_unreduced = unsharded is not None and (
            unsharded.grad is not None or getattr(managed, "unsharded_accumulated_grad", None) is not None
        )
        if is_unreduced or (is_partial and managed.sharded_param.requires_grad):
            yield managed


def has_partial_reduction(group: Any) -> bool:
    """Return whether HSDP has reduced the gradients of a group over ``dp_shard`` only."""
    return group._partial_reduce_output is not None


def drop_unreduced_gradients(unit: nn.Module) -> None:
    """Drop all unreduced gradients of a unit."""
    for group in fsdp_parameter_groups(unit):
        for managed in group.fsdp_params:
            drop_unreduced_gradient(managed, group)


def drop_unreduced_gradient(managed: Any, group: Any) -> None:
    """Drop the unreduced gradient of one ``FSDPParam``, and the partial reduction of its group."""
    group._partial_reduce_output = None
    if getattr(managed, "_unsharded_param", None) is not None:
        managed._unsharded_param.grad = None
    if "unsharded_accumulated_grad" in vars(managed):
        managed.unsharded_accumulated_grad = None


def tensors_between_microbatches(unit: nn.Module) -> Iterator[list[torch.Tensor]]:
    """Yield the tensors that a microbatch leaves to the next one for each ``FSDPParam``, except the shard's ``.grad``.

    These are unreduced gradients, the partial reduction of its group, and the unsharded parameter.
    """
    for group in fsdp_parameter_groups(unit):
        for managed in group.fsdp_params:
            tensors = (group._partial_reduce_output, managed._unsharded_param if group.is_unsharded else None)
            yield [*unreduced_gradients_of(managed), *(tensor for tensor in tensors if tensor is not None)]


def sharded_unsharded_pairs(groups: Iterable[Any]) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
    """Return each trained sharded parameter with its unsharded parameter, or ``None`` if its group is sharded."""
    pairs = list[tuple[torch.Tensor, torch.Tensor | None]]()
    for group in groups:
        is_unsharded = group.is_unsharded
        for managed in group.fsdp_params:
            if managed.sharded_param.requires_grad:
                pairs.append((managed.sharded_param, managed._unsharded_param if is_unsharded else None))
    return pairs


def leaves_of(groups: Iterable[Any]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield each trained sharded parameter with each leaf to which a backward may add its gradient."""
    # The unsharded parameter comes first: it is the leaf of every forward under FSDP2, also after its unit
    # was resharded.
    for group in groups:
        for managed in group.fsdp_params:
            sharded = managed.sharded_param
            if sharded.requires_grad:
                unsharded = managed.__dict__.get("_unsharded_param")
                if unsharded is not None:
                    yield sharded, unsharded
                yield sharded, sharded


# [Note: inputs of backward] The leaf of a resharded unit's forward is the unsharded parameter. Of
# ``loss.backward(inputs=list(model.parameters()))``, torch ignores the sharded ones, so that nothing was trained.
@functools.cache
def add_unsharded_inputs() -> None:
    """Let ``backward(inputs=...)`` of sharded parameters reach the unsharded ones; once per process."""
    stock = torch.autograd.backward
    # Called in a compiled function, it would trace each hook of a backward on the CPU.
    eager = runs_eagerly(stock)

    @functools.wraps(stock)
    def backward(*args: Any, **options: Any) -> None:
        if options.get("inputs") is not None and not torch.compiler.is_compiling():
            inputs = options["inputs"]
            inputs = [inputs] if isinstance(inputs, torch.Tensor) else list(inputs)
            given = set(map(id, inputs))
            managed = [one for _, one in iter_fsdp_params() if id(one.sharded_param) in given]
            leaves = [one.__dict__.get("_unsharded_param") for one in managed]
            options["inputs"] = inputs + [
                leaf for leaf in leaves if leaf is not None and id(leaf) not in given
            ]
        eager(*args, **options)

    torch.autograd.backward = backward


class _Edge(torch.autograd.Function):
    """A node with the edge to a leaf. ``get_gradient_edge`` makes a view, which runs DTensor's dispatch."""

    @staticmethod
    def forward(ctx: Any, leaf: torch.Tensor) -> torch.Tensor:
        return torch.empty(0)


def leaf_in_backward(leaf: torch.Tensor) -> str:
    """Return how the running backward uses a leaf: it ``"adds"`` to ``.grad``, ``"returns"`` it, or ``""``."""
    if not leaf.requires_grad:
        return ""
    with torch.enable_grad():
        # The output keeps its node alive. In torch 2.11, a Python reference to a node does not.
        output: Any = _Edge.apply(leaf)
    node = output.grad_fn.next_functions[0][0]
    try:
        runs = torch._C._will_engine_execute_node(node)
    except RuntimeError:  # the gradient is a result of torch.autograd.grad
        return "returns"
    return "adds" if runs else ""


def reduces_over_all_axes(group: Any) -> bool:
    """Return whether backwards reduce the gradients of a group completely, including the all-reduce of HSDP."""
    return group.reduce_grads and not has_partial_reduction(group)


#: The event after which the gradients that a group has just reduced are final. ``None`` if nothing was reduced or there
#: are no streams (``FSDPParamGroup._post_reduce_event``).
reduction_event: Callable[[Any], Any] = operator.attrgetter("_post_reduce_event")
#: Whether the parameters of a group are unsharded.
is_group_unsharded: Callable[[Any], bool] = operator.attrgetter("is_unsharded")


# --- gradients of a group that are partial over tp


def replicated_records(group: Any) -> list[Any]:
    """Return a group's records whose unsharded parameter is replicated over its only mesh axis. Local operation."""
    # The result changes only with the parameters, which the first all-gather creates.
    record = group.__dict__.get(GROUP) or record_of_group(group)
    cached = record.replicated
    if cached is not None and cached[0] is group.fsdp_params:
        return cached[1]
    created = [(m, m.__dict__.get("_unsharded_param")) for m in group.fsdp_params]
    records = [
        managed
        for managed, parameter in created
        if isinstance(parameter, DTensor)
        and len(spec_of(parameter).placements) == 1
        and spec_of(parameter).placements[0].is_replicate()
    ]
    if all(parameter is not None for _, parameter in created):
        record.replicated = group.fsdp_params, records
    return records


def partial_gradients(records: Iterable[Any], placement: Placement) -> Iterator[tuple[Any, DTensor]]:
    """Yield (record, unsharded gradient) of the gradients that await a reduction as ``placement`` over one axis.

    Gradients accumulated over several backwards are included. ``records`` are :func:`replicated_records`.
    """
    for managed in records:
        gradient: Any = managed._unsharded_param.grad
        if managed.__dict__.get("unsharded_accumulated_grad") is not None:  # torch before 2.15
            if gradient is not None:
                managed.accumulate_unsharded_grad_if_needed()
            gradient = managed.unsharded_accumulated_grad
        if not isinstance(gradient, DTensor) or type(gradient._local_tensor) is not torch.Tensor:
            continue
        placements = gradient._spec.placements
        if len(placements) == 1 and placements[0] == placement:
            yield managed, gradient


def set_unsharded_gradient(managed: Any, gradient: torch.Tensor) -> None:
    """Replace a gradient of :func:`partial_gradients` by a local tensor with the unsharded parameter's placements."""
    parameter = managed._unsharded_param
    full = dtensor(gradient, with_dtype(spec_of(parameter), gradient.dtype))
    if managed.__dict__.get("unsharded_accumulated_grad") is not None:
        managed.unsharded_accumulated_grad = full
    else:
        parameter.grad = full
