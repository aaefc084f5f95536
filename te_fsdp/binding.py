"""What ``set_device_mesh`` leaves on a module: its meshes, its rules and its parameters' Python attributes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from te_fsdp.parameters import carry_over, facts_of, noted

if TYPE_CHECKING:
    import weakref

    import torch
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

    from te_fsdp._torch import DTensorSpec
    from te_fsdp.layout.experts import ExpertRange
    from te_fsdp.layout.rules import ParameterRule

__all__ = ["NO_SHARD", "Binding", "binding_of", "is_exempt"]

#: Key in the module's ``__dict__``.
KEY = "_te_fsdp_binding"
#: Key in a module's ``__dict__`` by ``fsdp_no_shard``: ``True`` for all parameters in it and below it, or a frozenset
#: of names of own ones.
NO_SHARD = "_te_fsdp_no_shard"


@dataclass
class Installed:
    """The two forms of a parameter that FSDP2 installs in turn.

    No weak references: torch swaps no tensor that has some.

    Attributes:
        shard: The sharded one.
        gathered: The gathered one, or whatever else was assigned.
        release: Frees what the gathered one holds besides what FSDP2 frees (:mod:`te_fsdp.quantized.installed`);
            ``None`` for nothing.
    """

    shard: DTensor | None = None
    gathered: torch.Tensor | None = None
    release: Callable[[], None] | None = None


@dataclass
class Binding:
    """A module's tie to its meshes.

    Attributes:
        name: Name of the module in the tree that ``set_device_mesh`` was called on, for messages.
        tp_mesh: 1-D tensor-parallel mesh, or ``None``.
        weight_mesh: 1-D mesh of the ranks that hold pieces of one weight, or ``None``.
        rules: Rule of each own parameter.
        attributes: Python attributes of each own parameter (TE's marks and the user's), carried over to every
            object that replaces the parameter.
        under_fsdp: Whether FSDP2 manages the parameters (set when it installs its sharded ones).
        requantizes: Whether te_fsdp is sharding high-precision stand-ins of quantized weights right now.
        weight_mesh_agreed: Whether the ranks know that ``weight_mesh`` is the one that cuts the weights.
        shards: Local shards of delayed-scaling weights, by name, since FSDP2 last gathered them.
        ep_mesh: 1-D expert-parallel mesh of an expert module, ``None`` for all others.
        experts: The experts of an expert module. Its parameters are registered under their global indices.
        amax_group: Ranks over which delayed scaling reduces the amax of an expert module: those that hold the same
            experts. ``None``: those of the weight mesh.
        divided: Whether FSDP2 is known to divide an expert module's gradients by the right number.
        cut_within: Whether FSDP2 cuts the quantized weight of all experts along their rows or columns, and not between
            experts.
        sharded: Names of own parameters that FSDP2 has replaced by shards.
        on_meta: Whether parameters may still be on meta.
        installed: Own parameters that FSDP2 has installed and te_fsdp has looked at, by name.
        recomputed: Whether a forward of the module was seen to run within a backward, which needs what both read.
        experts_mesh: Mesh that parameters of all experts lie on when nothing is sharded: ``ep``, or (``ep``, ``tp``).
        partial_specs: Of parameters whose gradients are partial over tp, by name: spec of the gathered one, and the
            same with that placement.
    """

    name: str
    tp_mesh: DeviceMesh | None
    weight_mesh: DeviceMesh | None
    rules: dict[str, ParameterRule]
    attributes: dict[str, dict[str, Any]] = field(default_factory=dict)
    under_fsdp: bool = False
    requantizes: bool = False
    weight_mesh_agreed: bool = False
    shards: dict[str, weakref.ref[torch.Tensor]] = field(default_factory=dict)
    ep_mesh: DeviceMesh | None = None
    experts: ExpertRange | None = None
    amax_group: ProcessGroup | None = None
    divided: bool = False
    experts_mesh: DeviceMesh | None = None
    cut_within: bool = False
    sharded: set[str] = field(default_factory=set)
    on_meta: bool = True
    recomputed: bool = False
    installed: dict[str, Installed] = field(default_factory=dict)
    partial_specs: dict[str, tuple[DTensorSpec, DTensorSpec]] = field(default_factory=dict)
    _weight_group: tuple[DeviceMesh, str] | None = None

    @property
    def weight_group(self) -> str | None:
        """Name of the process group of ``weight_mesh``. Kept: every gather of a weight with one scale asks."""
        mesh = self.weight_mesh
        if mesh is None:
            return None
        if self._weight_group is None or self._weight_group[0] is not mesh:
            self._weight_group = mesh, mesh.get_group().group_name
        return self._weight_group[1]

    def label(self, parameter: str) -> str:
        """Full name of an own parameter, for messages."""
        return f"{self.name}.{parameter}" if self.name else parameter

    def whole_mesh(self, name: str) -> DeviceMesh | None:
        """Mesh that an own parameter lies on when FSDP2 does not shard it; ``None`` for an ordinary tensor."""
        grouped = name in self.rules and self.rules[name].layout.is_grouped
        return self.experts_mesh if grouped and self.experts_mesh is not None else self.tp_mesh

    def carry(self, name: str, parameter: torch.Tensor) -> None:
        """Give ``parameter`` what is known for ``name``, and the attributes that it lacks."""
        carry_over(self.attributes.get(name, {}), parameter)
        facts, rule = noted(parameter), self.rules.get(name)
        if rule is not None and rule.quantizable:
            facts.label = self.label(name)
        if rule is not None and rule.shard_dim is None and self.tp_mesh is not None:
            facts.tp_replica = True
        if self.ep_mesh is not None:
            facts.ep_mesh = self.ep_mesh

    def __deepcopy__(self, memo: dict[int, Any]) -> Binding:
        """Meshes are shared by the copy: process groups cannot be copied."""
        attributes = {name: dict(values) for name, values in self.attributes.items()}
        copied = Binding(
            self.name, self.tp_mesh, self.weight_mesh, dict(self.rules), attributes, self.under_fsdp
        )
        copied.ep_mesh, copied.experts, copied.amax_group = self.ep_mesh, self.experts, self.amax_group
        copied.experts_mesh, copied.cut_within = self.experts_mesh, self.cut_within
        return copied


def binding_of(module: object) -> Binding | None:
    """The module's binding, ``None`` where ``set_device_mesh`` was never called."""
    return module.__dict__.get(KEY)


def is_exempt(module: Any, name: str) -> bool:
    """Whether a module's own parameter is, or shall be, kept whole on all data-parallel ranks. Local operation."""
    mark = module.__dict__.get(NO_SHARD, ())
    if mark is True or name in mark:
        return True
    parameter = module._parameters.get(name)
    facts = None if parameter is None else facts_of(parameter)
    return facts is not None and (facts.no_shard or bool(facts.plan and facts.plan.storage.is_whole))
