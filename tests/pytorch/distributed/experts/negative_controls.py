"""Negative controls: expert parallelism with one part removed. A test detects each."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import nn


def _placed_in_two_dims(names: Iterable[str], mode: str | None) -> dict[str, Any]:
    """Return placements of one expert's weight (out, in), used for the tensor (experts, out, in) of all."""
    from te_fsdp.layout import GROUPED, ParameterRule

    dim = {"column": 0, "row": 1, None: None}[mode]
    return {name: ParameterRule(dim, GROUPED, quantizable=name == "weight") for name in names}


def _axes_of_one_mesh(meshes: Sequence[Any], groups: dict[Any, Any]) -> tuple[Any, ...]:
    """Return the axes over which a norm is summed, without ``ep``, over which experts are distributed."""
    mesh = meshes[0]
    results = [mesh.get_group(axis) for axis in range(mesh.ndim) if mesh.size(axis) > 1]
    axes = {tuple(dist.get_process_group_ranks(group)): group for group in results}
    groups |= axes
    return tuple(axes)


#: Name -> module and attribute that is replaced, and by what.
PIECES: dict[str, tuple[str, str, Any]] = {
    # The fault of TransformerEngine's pull request 2713.
    "placement": ("te_fsdp.layout", "single_grouped_rules", _placed_in_two_dims),
    # FSDP2 divides gradients of experts by the ranks that share them, as FSDP2 does by default.
    "divide": ("te_fsdp.apply_fully_shard", "set_gradient_divisors", lambda *args: None),
    # Experts of other ranks do not count in the norm.
    "norm": ("te_fsdp.features.clip_grad_norm", "_axes_of", _axes_of_one_mesh),
}


@contextmanager
def remove(name: str) -> Iterator[None]:
    """Remove the part with this name within the context, or none if the name is empty."""
    if not name:
        yield
        return
    place, attribute, instead = PIECES[name]
    module = importlib.import_module(place)
    stock = getattr(module, attribute)
    setattr(module, attribute, instead)
    try:
        yield
    finally:
        setattr(module, attribute, stock)


def disable_divisor_check(name: str, sharded: nn.Module) -> None:
    """Prevent the model's immediate error that FSDP2's gradient divisor is not set."""
    from te_fsdp.records import binding_of

    for module in sharded.modules():
        binding = binding_of(module)
        if binding is not None and binding.experts is not None:
            binding.ep.divided = binding.ep.divided or name == "divide"
