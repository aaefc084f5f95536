"""DTensor's sharding decisions, kept from one run to the next.

A decision follows from the operation, the specs of its arguments and this process's rank alone, but holds meshes, and
those of an earlier run have no groups any more. So the decision is kept, and its meshes are replaced by equal ones of
the operation at hand. Deciding takes up to 47 ms an operation where it is over lists of tensors, as those of
optimizers: a quarter of the CPU time of the checkpoints' tests, whose models repeat.

Private names of torch: seen in 2.11 to 2.15; a version without them decides each time.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._op_schema import OpSchema, OutputSharding

MOST = 3000
"""Decisions that are kept, those used last: one over lists of tensors takes up to 100 KB."""


class Decisions:
    """What was decided in this process so far; called as the propagator's own function.

    Args:
        decide: torch's function from an operation's schema to its sharding.
    """

    def __init__(self, decide: Callable[[Any], Any]) -> None:
        self.decide = decide
        self.known: OrderedDict[Any, Any] = OrderedDict()
        self.made = 0

    def __call__(self, schema: Any) -> Any:
        if torch.compiler.is_compiling():  # sizes may be symbols, which have no hash
            return self.decide(schema)
        meshes = {spec.mesh: spec.mesh for spec in _specs([schema.args_schema, schema.kwargs_schema])}
        decision = self.known.get(schema)
        if decision is not None:
            self.known.move_to_end(schema)
            return _on(decision, meshes)
        self.made += 1
        decision = self.decide(schema)
        if all(spec.mesh in meshes for spec in _specs(decision)):
            self.known[schema] = decision
            if len(self.known) > MOST:
                self.known.popitem(last=False)
        return decision


def install() -> Decisions | None:
    """Let this process's propagator of shardings keep its decisions; None where this torch has another one."""
    propagator = getattr(getattr(DTensor, "_op_dispatcher", None), "sharding_propagator", None)
    decide = getattr(propagator, "propagate_op_sharding_non_cached", None)
    if decide is None:
        return None
    # Called where torch's own cache, which `state.reset` clears, has no answer.
    propagator.propagate_op_sharding_non_cached = decisions = Decisions(decide)
    return decisions


def _specs(value: Any) -> Iterator[Any]:
    """All DTensorSpecs in a decision, a schema or a collection of them."""
    if isinstance(value, DTensorSpec):
        yield value
    elif isinstance(value, list | tuple):
        for entry in value:
            yield from _specs(entry)
    elif isinstance(value, dict):
        yield from _specs(list(value.values()))
    elif isinstance(value, OutputSharding):
        yield from _specs([value.output_spec, value.redistribute_schema])
    elif isinstance(value, OpSchema):
        yield from _specs([value.args_schema, value.kwargs_schema])


def _on(value: Any, meshes: dict[Any, Any]) -> Any:
    """The same with the meshes of the operation at hand. Meshes are equal by ranks and names, not by groups."""
    if isinstance(value, DTensorSpec):
        moved = copy.copy(value)
        moved.mesh = meshes[value.mesh]
        return moved
    if isinstance(value, list | tuple) and any(True for _ in _specs(value)):
        return type(value)(_on(entry, meshes) for entry in value)
    if isinstance(value, dict):
        return {name: _on(entry, meshes) for name, entry in value.items()}
    if isinstance(value, OutputSharding):
        parts = {name: _on(getattr(value, name), meshes) for name in ("output_spec", "redistribute_schema")}
        return dataclasses.replace(value, **parts)
    if isinstance(value, OpSchema):
        schemas = {name: _on(getattr(value, name), meshes) for name in ("args_schema", "kwargs_schema")}
        return dataclasses.replace(value, **schemas, _comparison_key=None)
    return value
