"""Whether a weight mesh is the one that cuts a weight: FSDP2's shard axis times tp, no replicas, nothing left out.

``set_device_mesh`` cannot know what FSDP2 will do. So the mesh is looked at when FSDP2 installs the first quantized
shard of a module, at the latest before its first gather, and the ranks agree on what they see: all raise, or none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from te_fsdp import _te, _torch
from te_fsdp.agree import maximum
from te_fsdp.errors import MeshError, message
from te_fsdp.quantized.amax import remember_shard

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

    from te_fsdp.binding import Binding

__all__ = ["adopt_shard", "agree_on_weight_mesh"]


def adopt_shard(binding: Binding, module: nn.Module, name: str, parameter: DTensor) -> None:
    """Take note of a parameter that FSDP2 has cut and that is, or will be, quantized.

    Without tensor parallelism FSDP2's shard axis is the whole weight mesh, and is taken as such where none was given.
    Collective over the mesh of the parameter, once per module: one max all-reduce of an integer per axis.

    Raises:
        MeshError: On all ranks, if on any of them the weight mesh does not consist of the ranks that hold this
            weight's pieces.
    """
    local = _torch.local_of(parameter)
    if name in binding.rules and binding.rules[name].layout.is_grouped and not binding.cut_within:
        return  # every expert lies whole on one rank
    if binding.weight_mesh_agreed or not (_is_shared(local) or _will_be_shared(local, module, name)):
        return
    if binding.weight_mesh is None and _tp_size(binding) == 1:
        binding.weight_mesh = _shard_axis(binding, name, parameter)
    _agree(binding, name, parameter)


def agree_on_weight_mesh(binding: Binding, module: nn.Module, local: torch.Tensor) -> None:
    """The same before a gather of a module's weight, for shards that came to the module by another way.

    Also remembers the shards of delayed scaling, see :mod:`te_fsdp.quantized.amax`.

    Args:
        binding: The module's.
        module: Owner of the weight.
        local: The shard about to be gathered.
    """
    if _te.has_delayed_scale(local):
        remember_shard(binding, module, local)
    if binding.weight_mesh_agreed or not _is_shared(local):
        return
    for name, parameter in module._parameters.items():
        if isinstance(parameter, DTensor) and _torch.local_of(parameter) is local:
            _agree(binding, name, parameter)
            return


def _agree(binding: Binding, name: str, parameter: DTensor) -> None:
    problem = _problem(binding, name, parameter)
    mesh = parameter.device_mesh
    bad = torch.tensor([problem is not None], dtype=torch.int32, device=_device(mesh))
    maximum(bad, mesh)
    if int(bad):
        raise MeshError(problem or _elsewhere(binding, name))
    binding.weight_mesh_agreed = True


def _device(mesh: DeviceMesh) -> torch.device:
    """This process' device; parameters may be on meta."""
    kind = mesh.device_type
    return (
        torch.device(kind)
        if kind == "cpu"
        else torch.device(kind, torch.get_device_module(kind).current_device())
    )


def _is_shared(local: torch.Tensor) -> bool:
    return _te.is_quantized(local) and bool(_te.one_scale_quantizers(_te.quantizer_of(local)))


def _will_be_shared(local: torch.Tensor, module: nn.Module, name: str) -> bool:
    quantizer = _te.weight_quantizer(module, name) if local.is_meta else None
    return quantizer is not None and bool(_te.one_scale_quantizers(quantizer))


def _tp_size(binding: Binding) -> int:
    return binding.tp_mesh.size() if binding.tp_mesh is not None else 1


def _axes(binding: Binding, name: str, parameter: DTensor) -> list[int]:
    """Mesh axes that cut the weight: tp, which is the last one of a bound parameter, and FSDP2's shard axis."""
    own, count = binding.whole_mesh(name), parameter.device_mesh.ndim
    first = count - (0 if own is None else own.ndim)
    found = [i for i, p in enumerate(parameter.placements[:first]) if _torch.shard_dim_of(p) is not None]
    return [*found, *([count - 1] if binding.tp_mesh is not None else [])]


def _shard_axis(binding: Binding, name: str, parameter: DTensor) -> DeviceMesh | None:
    """The 1-D mesh of FSDP2's shard axis, the only one that cuts where tp does not; ``None`` if of size 1."""
    mesh = parameter.device_mesh
    tp_axis = mesh.ndim - 1 if binding.tp_mesh is not None else None
    axes = [axis for axis in _axes(binding, name, parameter) if axis != tp_axis]
    if not axes or mesh.size(axes[0]) == 1:
        return None
    if mesh.ndim == 1:
        return mesh
    assert mesh.mesh_dim_names is not None  # FSDP2 asks for names on 2-D meshes
    return mesh[mesh.mesh_dim_names[axes[0]]]


def _problem(binding: Binding, name: str, parameter: DTensor) -> str | None:
    """The error text of a weight mesh that contradicts the parameter's own mesh, ``None`` if it does not."""
    mesh, at = parameter.device_mesh, parameter.device_mesh.get_coordinate()
    assert at is not None
    axes = _axes(binding, name, parameter)
    index = tuple(slice(None) if axis in axes else at[axis] for axis in range(mesh.ndim))
    want = sorted(mesh.mesh[index].flatten().tolist())
    have = [dist.get_rank()] if binding.weight_mesh is None else binding.weight_mesh.mesh.flatten().tolist()
    if sorted(have) == want:
        return None
    return message(
        f"{binding.label(name)}: weight_mesh of a weight with one scale per tensor",
        expected=f"ranks {want}, the {len(want)} that hold pieces of it (FSDP shard x tp)",
        got=f"ranks {sorted(have)}" if binding.weight_mesh is not None else "None",
        why="Pieces of one weight would be quantized with different scales, or scales of other weights mixed in",
        fix='pass weight_mesh=te_fsdp.Meshes(...).weight, the flattened ("dp_shard", "tp") mesh',
    )


def _elsewhere(binding: Binding, name: str) -> str:
    return message(
        f"{binding.label(name)}: weight_mesh of a weight with one scale per tensor",
        expected="on every rank the ranks that hold pieces of the weight",
        got="others on another rank",
        fix='pass weight_mesh=te_fsdp.Meshes(...).weight, the flattened ("dp_shard", "tp") mesh',
    )
