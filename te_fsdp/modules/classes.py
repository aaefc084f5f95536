"""te_fsdp's classes: TE's classes plus the mixin, made when first asked for (TE is not imported before).

    te_fsdp.Linear  =  MeshModule  +  te.Linear  +  ShardedInit  +  TransformerEngineBaseModule

``ShardedInit`` stands between TE's class and TE's base class, so that TE's own ``reset_parameters`` of the
class runs, and only the generic part, which knows neither shards nor foreign axis names, is replaced.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch

from te_fsdp import _te
from te_fsdp.binding import binding_of
from te_fsdp.mesh import check_1d
from te_fsdp.modules.base import ForeignModule, MeshModule, OpMeshModule, ResettableModule
from te_fsdp.modules.grouped import GroupedModule, check_switch
from te_fsdp.modules.initialize import initialize_te_parameters
from te_fsdp.modules.plan import check_divisible

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["bound_class", "mesh_class"]


@functools.cache
def _sharded_init_class() -> type:
    """``TransformerEngineBaseModule`` whose generic ``reset_parameters`` is shard-aware."""
    base = _te.base_module_class()

    class ShardedInit(base):  # type: ignore[misc, valid-type]
        """Replaces the generic part of TE's ``reset_parameters`` for bound modules."""

        def reset_parameters(self: Any, defer_init: bool | None = False) -> None:
            """Initialise this rank's shards; see :meth:`MeshModule.reset_parameters`."""
            if binding_of(self) is None:
                super().reset_parameters(defer_init=defer_init)  # type: ignore[not-callable]
            elif not defer_init:
                initialize_te_parameters(self)

    return ShardedInit


@functools.cache
def mesh_class(kind: str) -> type[torch.nn.Module]:
    """te_fsdp's class of a module kind, for example ``te_fsdp.Linear``."""
    stock = _te.module_class(kind)

    def __init__(
        self: Any,
        *args: Any,
        tp_mesh: DeviceMesh | None = None,
        weight_mesh: DeviceMesh | None = None,
        **kwargs: Any,
    ) -> None:
        check_1d(tp_mesh, "tp_mesh", kind)
        check_1d(weight_mesh, "weight_mesh", kind)
        check_switch(kwargs)
        if tp_mesh is not None and kind not in ("LayerNorm", "RMSNorm"):
            kwargs.setdefault("tp_group", tp_mesh.get_group())
            kwargs.setdefault("tp_size", tp_mesh.size())
        check_divisible(kind, stock, args, kwargs)
        super(cls, self).__init__(*args, **kwargs)  # type: ignore[invalid-argument]
        if tp_mesh is not None or weight_mesh is not None:
            self.set_device_mesh(tp_mesh=tp_mesh, weight_mesh=weight_mesh)

    doc = f"""TransformerEngine's ``{kind}`` that can be bound to meshes.

    Takes everything that ``transformer_engine.pytorch.{kind}`` takes, and two keywords more.

    Args:
        *args: As for TE.
        tp_mesh: 1-D tensor-parallel mesh; gives ``tp_group`` and ``tp_size`` where these are left out.
        weight_mesh: 1-D mesh of all ranks that hold pieces of one weight (FSDP shard x tp), for the scale of
            quantized weights with one scale per tensor.
        **kwargs: As for TE.

    Raises:
        MeshError: A mesh is not 1-D, or contradicts ``tp_size`` or ``tp_group``.
        PlacementError: Heads or features that ``tp_size`` does not divide.
    """
    cls = type(kind, _bases(stock), {"__init__": __init__, "__doc__": doc, "__module__": "te_fsdp"})
    return cls


@functools.cache
def bound_class(cls: type) -> type:
    """The class that an instance of ``cls`` gets when it is bound.

    TE's own classes become te_fsdp's (``te.Linear`` -> ``te_fsdp.Linear``); a user's subclass, and a module
    that TE does not know, keep their code and name behind the mixin.
    """
    if issubclass(cls, MeshModule):
        return cls
    for kind in _te.KINDS if _te.is_loaded() else ():
        if cls is _te.module_class(kind):
            return mesh_class(kind)
    return type(cls.__name__, _bases(cls), {"__doc__": cls.__doc__, "__module__": cls.__module__})


def _bases(cls: type) -> tuple[type, ...]:
    """Bases of a bound class over ``cls``."""
    if _te.is_loaded() and issubclass(cls, _te.base_module_class()):
        grouped = issubclass(cls, _te.module_class("GroupedLinear"))
        return (GroupedModule if grouped else ResettableModule, cls, _sharded_init_class())
    if hasattr(cls, "op_backward"):
        return (OpMeshModule, cls)
    from_te = cls.__module__.split(".")[0] == "transformer_engine"
    return (ForeignModule if hasattr(cls, "reset_parameters") and not from_te else MeshModule, cls)
