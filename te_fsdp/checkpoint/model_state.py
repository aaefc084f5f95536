"""A model's part of a checkpoint.

Keys in the files: ``model.<name>`` of a high-precision parameter or buffer, ``model.<name>:<component>`` of a quantized
weight, ``delayed.<module>:<tensor>`` of delayed scaling's state. The parameters of a layer's experts are one tensor,
see :mod:`te_fsdp.checkpoint.tensor_entries`.

A pipeline stage is a model whose tensors have the names of the unsplit model. Several models are one module, in which
the parameters of each have its name in front: ``actor.layers.0.weight``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from te_fsdp.checkpoint.manifest import dtype_name
from te_fsdp.checkpoint.tensor_entries import (
    GROUPED,
    ExpertPlace,
    Piece,
    Shape,
    TensorEntry,
    add_entry,
    refuse_equal_names,
    stacked_name,
)
from te_fsdp.collectives.agreement import maximum, world_size
from te_fsdp.errors import CheckpointError, PlacementError, shorten
from te_fsdp.layout import PLAIN, Box, ExpertRange, Layout, expert_index, mlp_rules
from te_fsdp.mesh import Meshes
from te_fsdp.modules.extra_state import local_experts
from te_fsdp.modules.plan import fused_layouts
from te_fsdp.quantized.components import (
    Component,
    components_of,
    describe_format,
    drop_derived_state,
    needed_components,
)
from te_fsdp.quantized.grouped_weight import as_plain_parameter, empty_experts
from te_fsdp.records import binding_of, first_owners
from te_fsdp.shard_info import ShardInfo, shard_info
from te_fsdp.sharded_model import get_sharded_model
from te_fsdp.upstream import te as _te, te_modules as _te_modules, torch_dtensor as _torch
from te_fsdp.upstream.fsdp2_units import wait_and_reshard


class Stage(NamedTuple):
    """This rank's stage or stages: its mesh, and the mesh of the ranks at the same place in each stage."""

    mesh: DeviceMesh
    across: DeviceMesh


class JoinedModules(nn.Module):
    """Several modules as one, each under a prefix: models by name, or stages under the names of the unsplit model."""

    parts: tuple[tuple[str, nn.Module], ...]  #: Prefix, which is empty for stages, and module

    def __init__(self, parts: Iterable[tuple[str, nn.Module]]) -> None:
        super().__init__()
        # Not registered: that would add a prefix of its own, and FSDP2 would take this module for the root.
        self.__dict__["parts"] = tuple(parts)

    def named_modules(  # type: ignore[bad-override]
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """Yield the modules of all parts; a module of two parts has the name that it has in the first one."""
        memo = set() if memo is None else memo
        for name, part in self.parts:
            yield from part.named_modules(memo, ".".join(filter(None, (prefix, name))), remove_duplicate)


def joined_model(models: Any) -> nn.Module:
    """Return a model, models by name, or a rank's stages as one module; CheckpointError for others."""
    if isinstance(models, nn.Module):
        return models
    # A state dict is a mapping too, but not of models.
    is_named = isinstance(models, Mapping) and not any(
        isinstance(value, torch.Tensor) for value in models.values()
    )
    if is_named:
        check_names(models, "model")
    parts = []
    for name, model in models.items() if is_named else [("", models)]:
        stages = [model] if isinstance(model, nn.Module) else model
        stages = list(stages) if isinstance(stages, Iterable) else []
        if not stages or not all(isinstance(stage, nn.Module) for stage in stages):
            raise CheckpointError(
                "checkpoint: model",
                expected="a module, a dict of modules by name, or a rank's stages",
                got=type(model).__name__,
                fix="pass the objects themselves, not state dicts: checkpoint.save(path, model, optimizer), "
                "load(path, model, optimizer)",
            )
        parts += [(name, stage) for stage in stages]
    return parts[0][1] if len(parts) == 1 and not is_named else JoinedModules(parts)


def check_names(given: Mapping[Any, Any], noun: str) -> None:
    """Raise CheckpointError for models or optimizers by names that the files cannot have."""
    invalid = [n for n in given if type(n) is not str or not n or set(n) & {".", "=", ",", "/"}]
    if invalid or not given:
        raise CheckpointError(
            f"checkpoint: {noun}s by name",
            expected=f'a dict of {noun}s whose names contain none of . = , / such as {{"actor": ...}}',
            got=", ".join(map(repr, invalid)) or "an empty dict",
            fix="give each a short name, the same at each save and load",
        )


def meshes_of(model: nn.Module) -> list[Meshes]:
    """Return the meshes of a model, or of models within it. Local operation."""
    return [state.meshes for state in map(get_sharded_model, model.modules()) if state is not None]


def stage_of(model: nn.Module) -> Stage | None:
    """Return this rank's stage if the model is one and the stages cover all ranks. Local operation."""
    # A mesh of fewer ranks belongs to a part of the job, so its pipeline axis does not cover the save.
    for meshes in meshes_of(model):
        if meshes.pp is not None and meshes.pp.size() * meshes.device_mesh.size() == world_size():
            return Stage(meshes.device_mesh, meshes.pp)
    return None


def mesh_sizes(model: nn.Module) -> dict[str, int]:
    """Return world size and axis sizes of the largest mesh among a model's parameters."""
    # By identity: comparing meshes for every parameter is slow.
    meshes = {id(p.device_mesh): p.device_mesh for p in model.parameters() if isinstance(p, DTensor)}.values()
    stage, sizes = stage_of(model), {"ranks": world_size()}
    if stage is not None:
        sizes["pp"] = stage.across.size()
    if meshes:
        # Parameters that tp does not shard are on a submesh of the largest one.
        mesh = max(meshes, key=lambda m: m.ndim)
        names = mesh.mesh_dim_names or tuple(f"axis{i}" for i in range(mesh.ndim))
        sizes |= dict(zip(names, (int(s) for s in mesh.shape), strict=True))
    # No weight is sharded on the expert-parallel axis: its ranks have different weights.
    for binding in map(binding_of, model.modules()):
        if binding is not None and binding.ep.mesh is not None:
            return {**sizes, "ep": int(binding.ep.mesh.size())}
    return sizes


# --- parameters and buffers


class OwnedPart(NamedTuple):
    """This rank's part of a weight that is not divided further: of a parameter, or of one expert."""

    expert: ExpertPlace | None  #: Place in the tensor of all experts, ``None`` for a tensor by itself
    index: int | None  #: Index of the expert in the local tensor; ``None``: it has this weight only
    boxes: tuple[Box, ...]  #: Boxes of the original
    original: Shape  #: Shape of the original


@dataclass(frozen=True)
class OwnedTensor:
    """A parameter, or a persistent buffer, with its owner."""

    fqn: str  #: Name in the model, without the prefixes of wrappers
    module: nn.Module  #: Owner
    name: str  #: Name in the owner
    parameter: torch.Tensor  #: The parameter or buffer
    expert: ExpertPlace | None = None  #: Place in the tensor of all experts, ``None`` for a tensor by itself

    @property
    def key(self) -> str:
        """Return the name of the files' tensor: its own, or that of all experts."""
        return self.fqn if self.expert is None else stacked_name(self.fqn)

    def entry(self, local: torch.Tensor) -> TensorEntry:
        """Return the entry of the files' tensor: views of ``local``, a plain tensor of the local shape."""
        return TensorEntry.cut(local, self.info.original_shape, self.info.boxes).grouped(self.expert)

    @property
    def local(self) -> torch.Tensor:
        """Return this rank's local tensor; for TE's ``GroupedTensor`` the ordinary tensor over its memory."""
        local = _torch.local_of(self.parameter)
        plain = as_plain_parameter(local) if self.is_grouped else local  # type: ignore[bad-argument-type]
        return local if plain is local else plain.detach()

    @cached_property
    def info(self) -> ShardInfo:
        """Return the place of the local tensor in the original."""
        return shard_info(self.module, self.name, self.parameter, label=self.fqn)

    @property
    def is_grouped(self) -> bool:
        """Return whether it has the weights, or biases, of several experts."""
        binding = binding_of(self.module)
        if binding is not None and self.name in binding.distributed:
            return False
        return self.name in ("weight", "bias") and _te.kind_of(self.module) == "GroupedLinear"

    def drop_derived_state(self) -> None:
        """Drop or recompute data derived from overwritten values of a quantized weight. Local operation."""
        drop_derived_state(self.local)
        # Outside of te_fsdp's modules the parameter of TE's class has the value before quantization.
        _te.drop_high_precision_value(_torch.local_of(self.parameter))

    def parts(self) -> list[OwnedPart]:
        """Return this rank's parts, one for each expert of a grouped tensor. Local operation."""
        info = self.info
        if not self.is_grouped:
            return [OwnedPart(self.expert, None, info.boxes, info.original_shape)]
        total, *original = info.original_shape
        result = []
        for box in info.boxes:
            expert_box = Box(box.original[1:], box.local[1:], box.sizes[1:])
            for index in range(box.sizes[0]):
                expert = ExpertPlace(box.original[0] + index, total)
                result.append(OwnedPart(expert, box.local[0] + index, (expert_box,), tuple(original)))
        return result


def owned_parameters(model: nn.Module) -> list[OwnedTensor]:
    """Return every parameter once, under its first name, after :func:`wait_and_reshard`. Local operation."""
    wait_and_reshard(model)
    # Files do not have the parts that torch.compile and activation checkpointing insert into names.
    return [
        OwnedTensor(_torch.without_wrappers(label), module, name, parameter, _expert_of(module, name))
        for label, module, name, parameter in first_owners(model).values()
    ]


def owned_buffers(model: nn.Module) -> list[OwnedTensor]:
    """Return every persistent buffer once, under its first name. Local operation."""
    owned: dict[int, OwnedTensor] = {}
    for prefix, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and _torch.is_persistent(module, name):
                fqn = _torch.without_wrappers(f"{prefix}.{name}")
                owned.setdefault(id(buffer), OwnedTensor(fqn, module, name, buffer))
    return list(owned.values())


def _expert_of(module: nn.Module, name: str) -> ExpertPlace | None:
    """Return the place of a module's parameter in a grouped tensor; ``None`` for a separate tensor."""
    index = expert_index(name)  # a global one: under expert parallelism parameters are registered so
    if index is None or (experts := local_experts(module)) is None:
        return None
    if not experts.first <= index < experts.first + experts.count:
        raise CheckpointError(
            f"{type(module).__name__}.{name}",
            expected=f"experts {experts.first} to {experts.first + experts.count - 1} of {experts.total}",
            got=f"expert {index}",
            fix="do not register parameters of experts by hand",
        )
    return ExpertPlace(index, experts.total)


def modules_of(model: nn.Module) -> dict[str, nn.Module]:
    """Return modules by name, without the prefixes of wrappers; a module registered twice under both names."""
    return {_torch.without_wrappers(name): m for name, m in model.named_modules(remove_duplicate=False)}


def modules_with_extra_state(model: nn.Module) -> list[str]:
    """Return the names of modules with an ``_extra_state`` entry, as all of TE's with parameters."""
    stock = nn.Module.get_extra_state
    return [name for name, m in modules_of(model).items() if type(m).get_extra_state is not stock]


def tied_names(model: nn.Module) -> dict[str, str]:
    """Return the further names of tied parameters and buffers, each with the first name."""
    first: dict[int, str] = {}
    tied = {}
    for named in (model.named_parameters, model.named_buffers):
        for name, tensor in named(remove_duplicate=False):
            if first.setdefault(id(tensor), name) != name:
                tied[_torch.without_wrappers(name)] = _torch.without_wrappers(first[id(tensor)])
    return tied


def original_layouts(root: nn.Module) -> dict[int, dict[str, Layout]]:
    """Return the layouts of TE modules' direct parameters by ``id`` of the module, for any mesh. Local operation.

    The rows of a fused projection are query, key and value on top of each other, or interleaved by heads. This
    does not depend on the mesh. Rules contain it only if tp shards the rows.
    """
    fused: dict[int, Layout] = {}
    by_module: dict[int, dict[str, Layout]] = {}
    modules: list[Any] = list(root.modules())
    for module in modules:
        kind = _te.kind_of(module)
        if kind == "MultiheadAttention":
            fused.update(fused_layouts(module))
        if kind not in (None, "unknown"):
            # Everything else of a module, such as the weight of a norm, is one matrix or vector.
            layouts = by_module[id(module)] = dict.fromkeys(module._parameters, PLAIN)
            if kind in ("Linear", "LayerNormLinear"):
                names = (*module.weight_names, *module.bias_names)
                layouts.update(dict.fromkeys(names, fused.get(id(module), PLAIN)))
            elif kind == "LayerNormMLP":
                layouts.update({name: rule.layout for name, rule in mlp_rules(module.activation).items()})
    return by_module


@dataclass
class ModelState:
    """A model's contribution to a checkpoint, or the target of a load."""

    owned: dict[int, OwnedTensor]  #: Parameters by their ``id``
    #: Parameters by the files' tensor that they are part of. The fields below use these names.
    members: dict[str, list[OwnedTensor]] = field(default_factory=dict)
    described: dict[str, dict[str, Any]] = field(default_factory=dict)  #: The manifest's ``parameters``
    buffers: dict[str, dict[str, Any]] = field(default_factory=dict)  #: The manifest's ``buffers``
    entries: dict[str, TensorEntry] = field(default_factory=dict)  #: Tensors by key
    keys: dict[str, list[str]] = field(default_factory=dict)  #: Keys of each tensor
    #: Quantized parameters whose blocks this rank's rectangles cut through, if that was allowed: without entries.
    cut_blocks: set[str] = field(default_factory=set)

    def add(self, owned: OwnedTensor, layout: Layout | None, may_cut_blocks: bool) -> None:
        """Add a parameter, whose original has a layout. Raise as :func:`model_state`."""
        local: Any = owned.local
        name, shape = owned.key, owned.info.original_shape
        is_grouped = owned.expert is not None or owned.is_grouped
        described: dict[str, Any] = {
            "shape": [*shape] if owned.expert is None else [owned.expert.total, *shape],
            "dtype": dtype_name(owned.parameter.dtype),
            "layout": GROUPED if is_grouped else str(layout) if layout is not None else None,
            "format": None,
        }
        entries: dict[str, TensorEntry] = {}
        if not _te.is_quantized(local):
            entries[f"model.{name}"] = owned.entry(local)
        else:
            weight = local
            if owned.is_grouped:
                # A rank without experts has none to describe.
                empty = (1, *shape[1:]), _te.quantizer_of(local), local.dtype, local.device
                weight = (local.experts or empty_experts(*empty).experts)[0]
            names = sorted(component.name for component in components_of(weight, owned.fqn))
            format_ = describe_format(weight, owned.fqn)
            assert format_ is not None
            needed_components(format_, names, owned.fqn)  # raises for values whose bytes are not saved
            described |= {"format": format_, "components": names}
            try:
                for part in owned.parts():
                    weight = local if part.index is None else local.experts[part.index]
                    for component in components_of(weight, owned.fqn):
                        entry = component_entry(component, part, owned.fqn).grouped(part.expert)
                        add_entry(entries, f"model.{name}:{component.name}", entry)
            except PlacementError:
                # A load may convert such a weight through high precision. A save has no form for half a block.
                if not may_cut_blocks:
                    raise
                self.cut_blocks.add(name)
                entries = {}
        for key, entry in entries.items():
            add_entry(self.entries, key, entry)
        self.keys[name] = list(entries)
        first = self.described.setdefault(name, described)
        # All experts of a layer are one tensor, with one entry in the manifest.
        if first != described:
            differing = [key for key in first if first[key] != described.get(key)]
            raise CheckpointError(
                f"{name}: {owned.fqn} differs from the tensors of the other experts",
                expected=", ".join(f"{key} {first[key]}" for key in differing),
                got=", ".join(f"{key} {described.get(key)}" for key in differing),
                why="A checkpoint stores the weights of all experts of a layer as one tensor",
                fix="build all experts of one layer with the same options",
            )


def model_state(
    model: nn.Module, *, may_cut_blocks: bool = False, shared: tuple[str, ...] | None = None
) -> ModelState:
    """Return entries and description of a model's parameters and persistent buffers. Local operation.

    FSDP2 units are resharded: entries are views of the sharded parameters. With ``may_cut_blocks``, shards may cut the
    blocks of a quantized weight. That weight has no entries, and can be loaded through high precision, but not saved.
    ``shared`` are patterns of the names that stages of a rank share; ``None``: any, because a load fills each of them.
    Raise CheckpointError for tensors on meta, PlacementError for a shard whose place in the original is unknown.
    """
    state = ModelState({id(owned.parameter): owned for owned in owned_parameters(model)})
    buffers = owned_buffers(model)
    stages = "the stages of one rank" if isinstance(model, JoinedModules) else None
    if shared is not None or stages is None:
        refuse_equal_names([o.fqn for o in (*state.owned.values(), *buffers)], shared or (), stages)
    absent = [o.fqn for o in (*state.owned.values(), *buffers) if o.local.is_meta]
    if absent:
        raise CheckpointError(
            f"{len(absent)} tensor(s) on meta: {shorten(absent)}",
            expected="a model on its device",
            fix="call te_fsdp.materialize(model) first",
        )
    # The layout of the original, which does not depend on the mesh that saves.
    layouts = original_layouts(model)
    for owned in state.owned.values():
        state.members.setdefault(owned.key, []).append(owned)
        layout = layouts.get(id(owned.module), {}).get(owned.name)
        if layout is None and binding_of(owned.module) is not None:
            layout = PLAIN
        state.add(owned, layout, may_cut_blocks)
    for owned in buffers:
        key, buffer = f"model.{owned.fqn}", owned.parameter
        state.buffers[owned.fqn] = {"shape": list(buffer.shape), "dtype": dtype_name(buffer.dtype)}
        add_entry(state.entries, key, owned.entry(owned.local))
        state.keys[owned.fqn] = [key]
    return state


def component_entry(component: Component, part: OwnedPart, label: str) -> TensorEntry:
    """Return the entry of a component of one weight; PlacementError, which names ``label``, for cut blocks."""
    # Without a block a component belongs to the full weight (a scale per tensor). Every shard has it.
    if component.block is None:
        return TensorEntry.replicated(component.tensor)
    rectangles = component.boxes(part.boxes, label, part.original)
    return TensorEntry.cut(component.tensor, component.shape(part.original), rectangles)


# --- delayed scaling's state: plain tensors of all GEMMs of a module; in a file, of all experts


def delayed_modules(model: nn.Module) -> dict[str, tuple[nn.Module, dict[str, Any]]]:
    """Return the modules with delayed scaling's state, and the state, by name. Local operation."""
    states = ((name, m, _te.delayed_states(m)) for name, m in model.named_modules())
    return {_torch.without_wrappers(name): (m, state) for name, m, state in states if state is not None}


def of_all_gemms(module: nn.Module, recipe: dict[str, Any]) -> dict[str, Any]:
    """Return a described recipe with the GEMMs of all experts."""
    experts = local_experts(module)
    return recipe if experts is None else {**recipe, "num_gemms": experts.total}


def delayed_state(model: nn.Module) -> tuple[dict[str, Any], dict[str, TensorEntry]]:
    """Return description and copies of delayed scaling's state. Local operation."""
    described: dict[str, Any] = {}
    entries: dict[str, TensorEntry] = {}
    for name, (module, states) in delayed_modules(model).items():
        described[name] = of_all_gemms(module, _te_modules.describe_delayed_recipe(module))
        for key, entry in _delayed_entries(name, module, states):
            # Copies, because an asynchronous save reads them while training updates the state in place.
            copies = tuple(Piece(piece.offsets, piece.tensor.clone()) for piece in entry.pieces)
            entries[key] = TensorEntry(entry.shape, entry.dtype, copies)
    return described, entries


def make_delayed(model: nn.Module, described: dict[str, Any]) -> dict[str, TensorEntry]:
    """Return entries of the described modules' delayed-scaling state, allocated if it is missing."""
    modules, entries = modules_of(model), {}
    for name, recipe in described.items():
        module, experts = modules[name], local_experts(modules[name])
        local_recipe = recipe if experts is None else {**recipe, "num_gemms": experts.count}
        entries |= dict(_delayed_entries(name, module, _te_modules.make_delayed_states(module, local_recipe)))
    return entries


def _delayed_entries(
    name: str, module: nn.Module, states: dict[str, Any]
) -> Iterator[tuple[str, TensorEntry]]:
    """Yield a module's scales ``(tensors,)`` and histories ``(steps, tensors)``, or its experts' part of them."""
    experts = local_experts(module) or ExpertRange(0, 1, 1)
    for key, state in states.items():
        for attribute in ("scale", "amax_history"):
            tensor = getattr(state, attribute).detach()
            # A module has the scales of all its GEMMs in one tensor. Those of an expert are adjacent in it.
            per_expert = tensor.shape[-1] // experts.count
            shape = (*tensor.shape[:-1], per_expert * experts.total)
            offsets = (0,) * (tensor.ndim - 1) + (per_expert * experts.first,)
            entry = TensorEntry(shape, tensor.dtype, (Piece(offsets, tensor),))
            yield f"delayed.{name}:{key}.{attribute}", entry


def share_newest_amax(entries: dict[str, TensorEntry], mesh: DeviceMesh | None) -> None:
    """Set the newest row of copied histories to its maximum over ranks. Collective over ``mesh``, or the world.

    Between a step and the next forward that row has each rank's own amaxes, because the optimizer quantizes shards. TE
    takes the maximum over ranks before it reads the row, so the maximum on all ranks is the same state.
    """
    histories = [e for key, e in entries.items() if key.endswith("amax_history") and not e.is_empty]
    if not histories or world_size() == 1:
        return
    pieces = [entry.pieces[0] for entry in histories]
    # Amaxes are not negative, so zeros are neutral for the experts of other ranks.
    newest = pieces[0].tensor.new_zeros(sum(entry.shape[1] for entry in histories))
    rows = newest.split([entry.shape[1] for entry in histories])
    own_parts = [row.narrow(0, p.offsets[1], p.tensor.shape[1]) for row, p in zip(rows, pieces, strict=True)]
    for row, piece in zip(own_parts, pieces, strict=True):
        row.copy_(piece.tensor[0])
    maximum(newest, mesh)
    for row, piece in zip(own_parts, pieces, strict=True):
        piece.tensor[0] = row
