"""A model's side of a checkpoint: its tensors as entries, and the manifest's description of them.

Keys in the files: ``model.<name>`` of a high-precision parameter or buffer, ``model.<name>:<component>`` of a
quantized weight. The parameters of a layer's experts are one tensor, see :mod:`te_fsdp.checkpoint.entries`.

A stage of a pipeline is a model of its own, whose tensors have the names that they have in the whole model.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from te_fsdp import _te, _torch
from te_fsdp.agree import world_size
from te_fsdp.checkpoint.entries import (
    GROUPED,
    Entry,
    ExpertPlace,
    add_entry,
    cut_entry,
    stacked_name,
    whole_entry,
)
from te_fsdp.checkpoint.manifest import dtype_name
from te_fsdp.errors import CheckpointError, PlacementError, shorten
from te_fsdp.layout import PLAIN, Box, Layout, expert_index
from te_fsdp.modules.plan import original_layouts
from te_fsdp.parameters import ShardInfo, binding_of, require_optimizer, shard_info
from te_fsdp.quantized.components import components_of, describe_format, finish_writing, needed_components
from te_fsdp.quantized.grouped_weight import empty_experts, plain_of
from te_fsdp.sharding.state import settle, sharding_state

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.optim import Optimizer

    from te_fsdp.mesh import Meshes


class Stage(NamedTuple):
    """This rank's stage, or stages: its own mesh, and the ranks at the same place in each stage."""

    mesh: DeviceMesh
    across: DeviceMesh


class Stages(nn.Module):
    """Several stages of one model as if they were registered in one module, under the names of the whole."""

    parts: tuple[nn.Module, ...]

    def __init__(self, parts: Iterable[nn.Module]) -> None:
        super().__init__()
        self.__dict__["parts"] = tuple(parts)  # registered they would have a prefix

    def named_modules(  # type: ignore[bad-override]
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """The modules of all parts, those that hold others (the parts themselves) under one name."""
        memo = set() if memo is None else memo
        for part in self.parts:
            yield from part.named_modules(memo, prefix, remove_duplicate)


def as_one(model: nn.Module | Iterable[nn.Module], optimizer: Optimizer | None = None) -> nn.Module:
    """A model, or several stages of one, as one module.

    Raises:
        CheckpointError: Something else, such as a state dict.
        PlacementError: An optimizer that is none.
    """
    if optimizer is not None:
        require_optimizer(optimizer, "checkpoint: model, optimizer")
    if isinstance(model, nn.Module):
        return model
    given = list(model) if isinstance(model, Iterable) else []
    if not given or not all(isinstance(part, nn.Module) for part in given):
        raise CheckpointError(
            "checkpoint: model",
            expected="a module, or a rank's stages",
            got=type(model).__name__,
            fix="checkpoint.save(path, model, optimizer) and load(path, model, optimizer) take the objects themselves, "
            "no state dicts",
        )
    return given[0] if len(given) == 1 else Stages(given)


def meshes_of(model: nn.Module) -> list[Meshes]:
    """The meshes of a model, or of models within it. Local operation."""
    return [state.meshes for state in map(sharding_state, model.modules()) if state is not None]


def stage_of(model: nn.Module) -> Stage | None:
    """This rank's stage, where the model is one and the stages are on all ranks. Local operation."""
    for meshes in meshes_of(model):
        if meshes.pp is not None and meshes.pp.size() * meshes.device_mesh.size() == world_size():
            return Stage(meshes.device_mesh, meshes.pp)
    return None


@dataclass(frozen=True)
class Part:
    """Rectangles of a weight that is not divided further: a parameter's, or one expert's.

    Attributes:
        place: Of the expert in the tensor of all; ``None``: it is a tensor of the files by itself.
        index: Of the expert in the local tensor; ``None``: the local tensor is this weight's alone.
        boxes: What this rank holds of the original.
        original: Shape of the original.
    """

    place: ExpertPlace | None
    index: int | None
    boxes: tuple[Box, ...]
    original: tuple[int, ...]

    def where(self, box: Box) -> tuple[Any, ...]:
        """Index of a box in the local tensor."""
        return (*(() if self.index is None else (self.index,)), *box.local_slices())


@dataclass(frozen=True)
class Owned:
    """A parameter, or a persistent buffer, with its owner.

    Attributes:
        fqn: Name in the model, without what wrappers add.
        module: Owner.
        name: Name in the owner.
        parameter: The parameter or buffer.
        expert: Where it lies in the tensor of all experts; ``None``: it is a tensor of the files by itself.
    """

    fqn: str
    module: nn.Module
    name: str
    parameter: torch.Tensor
    expert: ExpertPlace | None = None

    @property
    def key(self) -> str:
        """Name of the files' tensor: its own, or that of all experts."""
        return self.fqn if self.expert is None else stacked_name(self.fqn)

    def entry(self, entry: Entry) -> Entry:
        """An entry of this parameter's own tensor as one of the files' tensor; views of the same memory."""
        return entry if self.expert is None else self.expert.lift(entry)

    @property
    def local(self) -> torch.Tensor:
        """This rank's local tensor. Of TE's ``GroupedTensor`` the ordinary tensor over its memory."""
        local = _torch.local_of(self.parameter)
        plain = plain_of(local) if self.is_grouped else local  # type: ignore[bad-argument-type]
        return local if plain is local else plain.detach()

    @cached_property
    def info(self) -> ShardInfo:
        """Where the local tensor lies in the original."""
        return shard_info(self.module, self.name, self.parameter, label=self.fqn)

    @property
    def is_grouped(self) -> bool:
        """Whether it holds the weights, or biases, of several experts."""
        return self.name in ("weight", "bias") and _te.kind_of(self.module) == "GroupedLinear"

    def parts(self) -> list[Part]:
        """What this rank holds, one expert's weight at a time where it holds those of several. Local operation."""
        info = self.info
        if not self.is_grouped:
            return [Part(self.expert, None, info.boxes, info.original_shape)]
        total, *original = info.original_shape
        found = []
        for box in info.boxes:
            one = Box(box.original[1:], box.local[1:], box.sizes[1:])
            for index in range(box.sizes[0]):
                place = ExpertPlace(box.original[0] + index, total)
                found.append(Part(place, box.local[0] + index, (one,), tuple(original)))
        return found


def come_to_rest(model: nn.Module) -> None:
    """Reshard FSDP2 units, and wait for new weights on their way. Local operation."""
    settle(model)
    for module in model.modules():
        if _torch.is_fsdp_module(module):
            module.reshard()  # type: ignore[operator]


def owned_parameters(model: nn.Module) -> list[Owned]:
    """Every parameter once, under its first name; :func:`come_to_rest` first. Local operation."""
    come_to_rest(model)
    found: dict[int, Owned] = {}
    for prefix, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and id(parameter) not in found:
                place = _place_of(module, name)
                found[id(parameter)] = Owned(clean_name(prefix, name), module, name, parameter, place)
    return list(found.values())


def _owned_buffers(model: nn.Module) -> Iterator[Owned]:
    """Every persistent buffer once, under its first name. Local operation."""
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and id(buffer) not in seen and _torch.is_persistent(module, name):
                seen.add(id(buffer))
                yield Owned(clean_name(prefix, name), module, name, buffer)


def names_of(model: nn.Module) -> set[str]:
    """Names of the files' tensors that a model holds. Local operation."""
    return {owned.key for owned in (*owned_parameters(model), *_owned_buffers(model))}


def clean_name(prefix: str, name: str) -> str:
    """Full name without the parts that wrappers add."""
    return _torch.without_wrappers(".".join(part for part in (prefix, name) if part))


def own_experts(module: nn.Module) -> tuple[int, int, int] | None:
    """First expert, their number and that of all experts of a ``GroupedLinear``; ``None`` for other modules."""
    if _te.kind_of(module) != "GroupedLinear":
        return None
    binding = binding_of(module)
    experts = binding.experts if binding is not None else None
    if experts is not None:
        return experts.first, experts.count, experts.total
    return 0, int(module.num_gemms), int(module.num_gemms)  # type: ignore[arg-type]


def _place_of(module: nn.Module, name: str) -> ExpertPlace | None:
    """Where a module's own parameter lies in a grouped tensor; ``None`` for one that is a tensor of its own."""
    index = expert_index(name)  # a global one: under expert parallelism parameters are registered so
    experts = own_experts(module) if index is not None else None
    if experts is None or index is None:
        return None
    first, count, total = experts
    if not first <= index < first + count:
        raise CheckpointError(
            f"{type(module).__name__}.{name}",
            expected=f"experts {first} to {first + count - 1} of {total}",
            got=f"expert {index}",
            fix="do not register parameters of experts by hand",
        )
    return ExpertPlace(index, total)


@dataclass
class ModelState:
    """What a model contributes to a checkpoint, or takes from one.

    Attributes:
        owned: Parameters by name.
        members: Parameters by the files' tensor that they are, or are part of. What follows goes by these names.
        described: The manifest's ``parameters``.
        buffers: The manifest's ``buffers``.
        entries: Tensors by key.
        keys: Keys of each tensor.
        cut_blocks: Quantized parameters whose rectangles on this rank cut through blocks, when that was allowed; they
            have no entries.
    """

    owned: dict[str, Owned]
    members: dict[str, list[Owned]] = field(default_factory=dict)
    described: dict[str, dict[str, Any]] = field(default_factory=dict)
    buffers: dict[str, dict[str, Any]] = field(default_factory=dict)
    entries: dict[str, Entry] = field(default_factory=dict)
    keys: dict[str, list[str]] = field(default_factory=dict)
    cut_blocks: set[str] = field(default_factory=set)

    def finish_loading(self, names: set[str]) -> None:
        """Forget, or make anew, what quantized weights derived from the bytes that were replaced. Local operation."""
        for owned in (one for name in names & self.members.keys() for one in self.members[name]):
            local = owned.local
            if _te.is_quantized(local):
                local.derive_transposes() if owned.is_grouped else finish_writing(local)  # type: ignore[missing-attribute]


def model_state(model: nn.Module, *, may_cut_blocks: bool = False) -> ModelState:
    """Entries and description of a model's parameters and persistent buffers. Local operation.

    FSDP2 units are resharded: the entries are views of the sharded parameters.

    Args:
        model: The model.
        may_cut_blocks: Whether a rank's rectangles may cut through blocks of a quantized weight, which then gets no
            entries: it can be loaded through high precision, but not saved.

    Raises:
        CheckpointError: Parameters or buffers on meta.
        PlacementError: A shard whose place in the original is unknown.
    """
    state = ModelState({owned.fqn: owned for owned in owned_parameters(model)})
    for owned in state.owned.values():
        state.members.setdefault(owned.key, []).append(owned)
    buffers = list(_owned_buffers(model))
    absent = [o.fqn for o in (*state.owned.values(), *buffers) if o.local.is_meta]
    if absent:
        raise CheckpointError(
            f"{len(absent)} tensor(s) on meta: {shorten(absent)}",
            expected="a model on its device",
            fix="call te_fsdp.materialize(model) first",
        )
    layouts = original_layouts(model)
    for owned in state.owned.values():
        layout = layouts.get(id(owned.module), {}).get(owned.name)
        if layout is None and binding_of(owned.module) is not None:
            layout = PLAIN
        _add_parameter(state, owned, layout, may_cut_blocks)
    for owned in buffers:
        shape, dtype = owned.parameter.shape, owned.parameter.dtype
        state.buffers[owned.fqn] = {"shape": list(shape), "dtype": dtype_name(dtype)}
        info = owned.info
        state.entries[f"model.{owned.fqn}"] = cut_entry(owned.local, info.original_shape, info.boxes)
        state.keys[owned.fqn] = [f"model.{owned.fqn}"]
    return state


def _add_parameter(state: ModelState, owned: Owned, layout: Layout | None, may_cut_blocks: bool) -> None:
    info, local, name = owned.info, owned.local, owned.key
    is_grouped = owned.expert is not None or owned.is_grouped
    described: dict[str, Any] = {
        "shape": list(owned.entry(Entry(info.original_shape, local.dtype, ())).shape),
        "dtype": dtype_name(owned.parameter.dtype),
        "layout": GROUPED if is_grouped else str(layout) if layout is not None else None,
    }
    entries: dict[str, Entry] = {}
    if not _te.is_quantized(local):
        described["format"] = None
        entries[f"model.{name}"] = owned.entry(cut_entry(local, info.original_shape, info.boxes))
    else:
        described |= _describe_quantized(owned)
        try:
            entries = _quantized_entries(owned)
        except PlacementError:
            if not may_cut_blocks:
                raise
            state.cut_blocks.add(name)
    for key, entry in entries.items():
        add_entry(state.entries, key, entry)
    state.keys[name] = list(entries)
    first = state.described.setdefault(name, described)
    if first != described:
        wrong = [key for key in first if first[key] != described.get(key)]
        raise CheckpointError(
            f"{name}: {owned.fqn} is no tensor like those of the other experts",
            expected=", ".join(f"{key} {first[key]}" for key in wrong),
            got=", ".join(f"{key} {described.get(key)}" for key in wrong),
            why="A checkpoint holds the weights of all experts of a layer as one tensor",
            fix="build the experts of one layer alike",
        )


def modules_with_extra_state(model: nn.Module) -> list[str]:
    """Names of the modules whose state dict has an ``_extra_state`` entry, as all of TE's with parameters have."""
    stock = torch.nn.Module.get_extra_state
    modules = model.named_modules(remove_duplicate=False)
    return [clean_name("", prefix) for prefix, m in modules if type(m).get_extra_state is not stock]


def tied_names(model: nn.Module) -> dict[str, str]:
    """Further names of tied parameters and buffers, each with the first name."""
    first: dict[int, str] = {}
    tied = {}
    for named in (model.named_parameters, model.named_buffers):
        for name, tensor in named(remove_duplicate=False):
            if first.setdefault(id(tensor), name) != name:
                tied[clean_name("", name)] = clean_name("", first[id(tensor)])
    return tied


def _describe_quantized(owned: Owned) -> dict[str, Any]:
    """The manifest's ``format`` and ``components`` of a quantized parameter. Local operation.

    Raises:
        CheckpointError: Its components do not give its values.
        PlacementError: An option of its format under which they would give others.
    """
    local: Any = owned.local
    one = local
    if owned.is_grouped:
        # A rank that holds no expert has none to describe.
        shape = (1, *owned.info.original_shape[1:])
        held = (
            local.experts or empty_experts(shape, _te.quantizer_of(local), local.dtype, local.device).experts
        )
        one = held[0]
    names = sorted(component.name for component in components_of(one, owned.fqn))
    described = describe_format(one, owned.fqn)
    assert described is not None
    needed_components(described, names, owned.fqn)  # raises: nothing may be saved whose bytes are elsewhere
    return {"format": described, "components": names}


def _quantized_entries(owned: Owned) -> dict[str, Entry]:
    """Entries of a quantized parameter's components, by file key: views of its buffers. Local operation.

    Raises:
        PlacementError: A rank's rectangle cuts through blocks.
    """
    entries: dict[str, Entry] = {}
    local: Any = owned.local
    for part in owned.parts():
        one = local if part.index is None else local.experts[part.index]
        for component in components_of(one, owned.fqn):
            entry = whole_entry(component.tensor)
            if component.block is not None:
                rectangles = component.boxes(part.boxes, owned.fqn, part.original)
                entry = cut_entry(component.tensor, component.shape(part.original), rectangles)
            key = f"model.{owned.key}:{component.name}"
            add_entry(entries, key, entry if part.place is None else part.place.lift(entry))
    return entries


def mesh_sizes(model: nn.Module) -> dict[str, int]:
    """World size and the axes of the widest mesh among a model's parameters."""
    # By identity: to compare meshes takes longer than all else here, and parameters are many.
    meshes = {id(p.device_mesh): p.device_mesh for p in model.parameters() if isinstance(p, DTensor)}.values()
    stage = stage_of(model)
    sizes = {"ranks": world_size()} | ({} if stage is None else {"pp": stage.across.size()})
    if meshes:
        mesh = max(meshes, key=lambda m: m.ndim)
        names = mesh.mesh_dim_names or tuple(f"axis{i}" for i in range(mesh.ndim))
        sizes |= dict(zip(names, (int(s) for s in mesh.shape), strict=True))
    # No weight lies on the expert-parallel axis: its ranks hold different ones.
    expert_meshes = [
        b.ep_mesh for b in map(binding_of, model.modules()) if b is not None and b.ep_mesh is not None
    ]
    if expert_meshes:
        sizes["ep"] = int(expert_meshes[0].size())
    return sizes
