"""From DTensor parameters to the local tensors that TE's kernels read, and back for gradients.

    forward    DTensor parameter --(same local object, not a copy, not a view)--> TE kernel
    backward   local gradient    --(wrapped as DTensor: own placement, or Partial)--> FSDP2 / the parameter

The object identity matters: FSDP2 refills the buffers of one local tensor object for the backward pass, and
TE swaps attributes on that very object (rowwise bytes for forward, columnwise for backward). A view would
keep stale ones. Modules that TE does not know get another object over the same memory: torch's own functions
save what they are given, and the autograd node is taken off the very object at the end of forward.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Partial

from te_fsdp import _torch
from te_fsdp.errors import OrderError

if TYPE_CHECKING:
    from torch import nn

    from te_fsdp.binding import Binding

__all__ = ["keep_returned", "local_parameters"]


class _ToLocal(torch.autograd.Function):
    """DTensor parameters -> their local tensors, one autograd node for a whole module."""

    @staticmethod
    def forward(
        ctx: Any, binding: Binding, names: Sequence[str], is_foreign: bool, *parameters: DTensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        # Specs, not the parameters: those would form a cycle through their local tensors.
        ctx.binding, ctx.names = binding, names
        local, specs = _torch.locals_and_specs(parameters)
        ctx.specs = specs
        if is_foreign:
            local = tuple([t.detach() for t in local])
        frozen = []
        for place, parameter in enumerate(parameters):
            if not parameter.requires_grad:
                specs[place] = None
                frozen.append(local[place])
        if frozen:
            ctx.mark_non_differentiable(*frozen)
        return local

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[Any, ...]:
        binding, found, specs = ctx.binding, list(gradients), list(ctx.specs)
        if binding.tp_mesh is not None and binding.tp_mesh.size() > 1:
            for place, name in enumerate(ctx.names):
                if binding.rules[name].partial_grad and specs[place] is not None:
                    found[place], specs[place] = _partial(binding, name, specs[place], found[place])
        return None, None, None, *_torch.dtensors(found, specs)


def _partial(
    binding: Binding, name: str, spec: _torch.DTensorSpec, gradient: torch.Tensor | None
) -> tuple[torch.Tensor | None, _torch.DTensorSpec]:
    """A gradient of which each rank of tp has another part, and the spec that says so; ``None`` stays ``None``.

    It stays ``Partial`` under FSDP2, which reduces it over ``tp`` once, when it reduces over data parallel. Without
    FSDP2 nobody would, so it is all-reduced over ``tp`` here.
    """
    assert binding.tp_mesh is not None
    if binding.under_fsdp:
        # The gathered parameter is the same object in every backward, and so is its spec.
        known = binding.partial_specs.get(name)
        if known is None or known[0] is not spec:
            partial = _torch.with_placements(spec, (Partial(),))
            known = binding.partial_specs[name] = spec, partial
        return gradient, known[1]
    if gradient is not None:
        gradient = gradient.contiguous()
        dist.all_reduce(gradient, group=binding.tp_mesh.get_group())
    return gradient, spec


@contextmanager
def local_parameters(
    module: nn.Module, binding: Binding, *, differentiable: bool = True
) -> Iterator[tuple[torch.Tensor, ...]]:
    """Within the context the module's own DTensor parameters are their local tensors, for everyone who looks.

    The entries of ``module._parameters`` are swapped, so that attribute access, ``parameters()`` and TE's op
    fuser all see the same objects. Local operation.

    Args:
        module: A bound module.
        binding: Its binding.
        differentiable: Whether gradients shall flow back to the DTensors (``False`` inside a backward).

    Yields:
        The local tensors. A forward that returns one of them must pass its result through
        :func:`keep_returned`.

    Raises:
        OrderError: The parameters are still sharded by FSDP2: its hooks did not run.
    """
    own: dict[str, Any] = module._parameters  # type: ignore[assignment]
    names: list[str] = []
    parameters: list[DTensor] = []
    for name, value in own.items():
        if isinstance(value, DTensor):
            names.append(name)
            parameters.append(value)
    if not names:
        yield ()
        return
    pair = binding.installed.get(names[0])
    if pair is None or parameters[0] is not pair.gathered:  # that one is known to be whole
        _check_gathered(binding, names[0], parameters[0])
    is_foreign = _is_foreign(type(module))
    if differentiable and torch.is_grad_enabled():
        local = _ToLocal.apply(binding, names, is_foreign, *parameters)
    else:
        local, _ = _torch.locals_and_specs(parameters)
    own.update(zip(names, local, strict=True))
    try:
        yield local
    finally:
        for name, parameter, tensor in zip(names, parameters, local, strict=True):
            if own.get(name) is tensor:
                own[name] = parameter
            if not tensor.is_leaf and not is_foreign:
                # The graph has its edges; left on the tensor, the autograd node would tie parameter and local
                # tensor into a cycle that outlives the model. What backward reads again (TE's recomputation) asks
                # the tensor itself whether to compute a gradient.
                tensor.detach_().requires_grad_()


@functools.cache
def _is_foreign(cls: type) -> bool:
    """Whether TE owns no part of a module's class, so that torch's own functions see its parameters."""
    return not any(base.__module__.partition(".")[0] == "transformer_engine" for base in cls.__mro__)


def keep_returned(output: tuple[Any, ...], local: tuple[torch.Tensor, ...], *, copy: bool) -> Any:
    """Replace local parameters among a forward's results (``return_bias=True``) by tensors that outlive it.

    Args:
        output: What the forward returned.
        local: What :func:`local_parameters` yielded, or the module's own parameters if that was nothing.
        copy: Whether FSDP2 may free the parameter after this forward, so that a view would dangle.
    """
    inside = set(map(id, local))
    # Without gradients no view: it would require one as soon as its base does.
    kept = [
        (item.clone() if copy else item.view_as(item) if torch.is_grad_enabled() else item.detach())
        if isinstance(item, torch.Tensor) and id(item) in inside
        else item
        for item in output
    ]
    return tuple(kept)


def _check_gathered(binding: Binding, name: str, parameter: DTensor) -> None:
    """Between FSDP2's gathers parameters lie on the (data parallel, tp) mesh; kernels must never see such a shard."""
    whole = binding.whole_mesh(name)
    if whole is not None and (parameter.device_mesh is whole or parameter.device_mesh == whole):
        return
    raise OrderError(
        f"{binding.name or 'model'}: forward with {name!r} on mesh axes {parameter.device_mesh.mesh_dim_names}",
        expected="the gathered parameter",
        got=f"a shard of it, placements {tuple(parameter.placements)}",
        why="FSDP2 gathers in the forward hooks of the sharded units, which did not run",
        fix="call the module that was sharded (not .forward, not a method of it), or unshard() it first",
    )
