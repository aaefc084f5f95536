"""``ModulePlan``: how a module will be bound to its meshes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from te_fsdp.layout import ExpertRange, ParameterRule
from te_fsdp.quantized.alignment import Grid
from te_fsdp.records import UserDTensor


@dataclass(frozen=True)
class ModuleMeshes:
    """The meshes that a module is bound to, each 1-D."""

    tp_mesh: DeviceMesh | None = None
    weight_mesh: DeviceMesh | None = None  #: Mesh of the ranks that have shards of one weight
    ep_mesh: DeviceMesh | None = None  #: For experts only
    replicas: int = 1  #: Number of copies of the model on these ranks, where it is known
    #: Mesh of an unsharded parameter of all experts: ``ep``, or (``ep``, ``tp``).
    experts_mesh: DeviceMesh | None = None
    single: DeviceMesh | None = None  #: Mesh of this rank alone, for a user's DTensor on axes of size 1

    @property
    def grid(self) -> Grid:
        """Return the sizes of the axes that shard a weight. The weight mesh has the ranks if the user calls FSDP2."""
        tp = self.tp_mesh.size() if self.tp_mesh is not None else 1
        return Grid(self.replicas, self.weight_mesh.size() // tp if self.weight_mesh is not None else 1, tp)


@dataclass(frozen=True)
class ModulePlan:
    """How one module of the tree will be bound."""

    name: str  #: Its name in the tree, ``""`` for the root
    module: Any
    kind: str | None  #: TE kind, or ``None`` for modules that are not TE's
    rules: dict[str, ParameterRule]  #: Rule of each direct parameter
    experts: ExpertRange | None = None  #: Experts of a module that expert parallelism distributes
    meshes: ModuleMeshes = ModuleMeshes()
    #: Sharded dim of each direct weight that is quantized or has all experts, by its name in the bound module.
    fsdp_dims: Mapping[str, int] = field(default_factory=dict)
    #: The user's DTensors among the parameters, by name.
    distributed: Mapping[str, UserDTensor] = field(default_factory=dict)

    def registered(self, name: str) -> str:
        """Return the name of a direct parameter in the bound module: that of all experts if it becomes part of it."""
        single = name.rstrip("0123456789")
        if name not in self.rules and single in self.rules:
            return single
        return name if self.experts is None else self.experts.registered_name(name)
