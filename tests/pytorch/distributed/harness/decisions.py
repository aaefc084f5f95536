"""DTensor's sharding decisions, cached between runs.

A decision follows from the operation, the specs of its arguments and this process's rank alone, but holds meshes, and
those of an earlier run have no groups any more. So the decision is kept, and its meshes are replaced by equal ones of
the operation at hand. Deciding takes up to 47 ms an operation where it is over lists of tensors, as those of
optimizers: a quarter of the CPU time of the checkpoints' tests, whose models repeat.

New decisions are those of torch, but computed faster: lists element by element, because other models have
the same tensors at other places; and among those ways to cut the operands that leave them as they are, where torch
tries each way on each dimension of the mesh, 1,000 on three. The global shapes, strides and dtypes of an operation's
results do not depend on mesh and placements. So they are computed once for all of these, in one `FakeTensorMode`,
where torch makes a mode, with a stack trace, for each decision: more than half of the time of a decision.

`remember_layouts` does the same for the arithmetic of DeviceMesh, which torch repeats for each access to `mesh`.

Private names of torch: seen in 2.11 to 2.15; a version without them decides each time.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import importlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._guards import detect_fake_mode
from torch._subclasses import FakeTensorMode
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._op_schema import OpSchema, OutputSharding
from torch.distributed.tensor._ops import utils

MOST = 3000
"""Decisions that are kept, those used last: one over lists of tensors takes up to 100 KB."""
MOST_METAS = 20000
"""Results whose shapes, strides and dtypes are kept; all are forgotten when there are more."""


class Decisions:
    """Decisions of this process so far; called as the propagator's own function.

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
        if schema.op is torch.ops.aten.detach.default:  # most of them
            return OutputSharding(copy.copy(schema.args_schema[0]))
        meshes = {spec.mesh: spec.mesh for spec in _specs([schema.args_schema, schema.kwargs_schema])}
        decision = self.known.get(schema)
        if decision is not None:
            self.known.move_to_end(schema)
            return _on(decision, meshes)
        self.made += 1
        decision = (self._by_places(schema) if len(meshes) == 1 else None) or self.decide(schema)
        if all(spec.mesh in meshes for spec in _specs(decision)):
            self.known[schema] = decision
            if len(self.known) > MOST:
                self.known.popitem(last=False)
        return decision

    def _by_places(self, schema: Any) -> Any:
        """Return the decision of an operation on lists, joined from those of each place; None for other operations."""
        length = next((len(argument) for argument in schema.args_schema if isinstance(argument, list)), 0)
        if length < 2 or not schema.op.name().startswith(("aten::_foreach_", "aten::_fused_adam")):
            return None
        parts = [
            dataclasses.replace(schema, args_schema=item, _comparison_key=None)
            for item in _places(schema, length)
        ]
        results = [self(part) for part in parts]
        if any(decision.needs_redistribute for decision in results):
            return None  # the schema of the redistribution would be needed too
        outputs = [decision.output_spec for decision in results]
        return OutputSharding(None if outputs[0] is None else tuple(output for (output,) in outputs))


class Metas:
    """Shapes, strides and dtypes of results so far, by the values of the operation's arguments.

    Args:
        compute: torch's function from an operation's schema to the metadata of its results.
    """

    def __init__(self, compute: Callable[[Any], Any]) -> None:
        self.compute = compute
        self.known: dict[Any, Any] = {}
        self._mode = FakeTensorMode()
        self._lock = threading.RLock()

    def __call__(self, schema: Any) -> Any:
        if torch.compiler.is_compiling():
            return self.compute(schema)
        arguments = _values([schema.args_schema, schema.kwargs_schema])
        key = schema.op, torch.get_default_dtype(), arguments
        try:
            if key in self.known:
                return copy.copy(self.known[key])
        except TypeError:  # an argument without a hash
            return self.compute(schema)
        if detect_fake_mode() is not None:  # that of a trace
            return self.compute(schema)
        with self._lock, self._mode:  # torch takes the mode that is active
            result = self.compute(schema)
        if len(self.known) >= MOST_METAS:
            self.known.clear()
        self.known[key] = result
        return copy.copy(result)


def _values(value: Any) -> Any:
    """Return metadata of tensors, and types and values of all else: they determine the results of an operation."""
    if isinstance(value, DTensorSpec):
        return value.tensor_meta
    if isinstance(value, list | tuple):
        return (type(value), *map(_values, value))
    if isinstance(value, dict):
        return tuple((name, _values(entry)) for name, entry in value.items())
    return type(value), value


def remember_layouts() -> None:
    """Cache the computation of a mesh's layout, a function of two tuples of numbers.

    torch does it in Python with each slice of a mesh and each access to `DeviceMesh.mesh`.
    """
    try:
        layouts = importlib.import_module("torch.distributed._mesh_layout")
    except ImportError:
        return
    for owner, names in (("_MeshLayout", ("collapse", "cosize")), ("_FlatLayout", ("complement",))):
        result = getattr(layouts, owner, None)
        for name in names:
            if hasattr(result, name):
                setattr(result, name, functools.lru_cache(maxsize=4096)(getattr(result, name)))


def install() -> Decisions | None:
    """Let this process's sharding propagator keep its decisions; None if this torch has a different one."""
    propagator = getattr(getattr(DTensor, "_op_dispatcher", None), "sharding_propagator", None)
    decide = getattr(propagator, "propagate_op_sharding_non_cached", None)
    if decide is None:
        return None
    # Called after a miss of torch's own cache, which `state.reset` clears.
    propagator.propagate_op_sharding_non_cached = decisions = Decisions(decide)
    if compute := getattr(propagator, "_propagate_tensor_meta_non_cached", None):
        propagator._propagate_tensor_meta_non_cached = Metas(compute)
    if expand := getattr(utils, "expand_to_full_mesh_op_strategy", None):
        utils.expand_to_full_mesh_op_strategy = _among_those_that_cost_nothing(expand)
    return decisions


def _places(schema: Any, length: int) -> Iterator[tuple[Any, ...]]:
    """Yield arguments of the operation on each place of its lists alone."""
    for place in range(length):
        yield tuple(
            argument[place : place + 1] if isinstance(argument, list | tuple) else argument
            for argument in schema.args_schema
        )


def _among_those_that_cost_nothing(expand: Callable[..., Any]) -> Callable[..., Any]:
    """Return torch's list of all strategies; if one redistributes no operand, without those that do.

    Moving costs nothing only for operands that are as they should be on each dimension, and for replicated ones.
    """

    def fits(strategy: list[Any], held: list[Any]) -> bool:
        """Return whether a strategy for one mesh dimension accepts the placements of one of them."""
        free = [all(isinstance(placement, Replicate) for placement in each) for each in held]
        return any(
            all(any_ or expected == has for any_, expected, has in zip(free, strategy, here, strict=False))
            for here in zip(*held, strict=False)
        )

    @functools.wraps(expand)
    def narrowed(mesh: Any, schema: Any, strategies: list[Any], **options: Any) -> Any:
        operands = [strategy.strategies for strategy in (*schema.args_strategy, *schema.kwargs_strategy)]
        held = [operand[0].output_spec.placements for operand in operands if len(operand) == 1]
        first = options.get("input_index", 1)
        fit = [item for item in strategies if fits(item[first:], held)] if len(held) == len(operands) else []
        if 0 < len(fit) < len(strategies):
            try:
                result = expand(mesh, schema, fit, **options)
            except RuntimeError:  # none of them is valid; torch's error names all
                result = None
            costs = [sum(map(sum, each.redistribute_cost)) for each in result.strategies] if result else []
            if 0 in costs:
                return result
        return expand(mesh, schema, strategies, **options)

    return narrowed


def _specs(value: Any) -> Iterator[Any]:
    """Yield all DTensorSpecs in a decision, a schema or a collection of them."""
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
    """Return the same with the meshes of the operation at hand. Meshes are equal by ranks and names, not by groups."""
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
