"""``set_device_mesh``: plan, check, then bind every module of a tree to its meshes."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard

from te_fsdp import _te, _torch
from te_fsdp.binding import KEY, Binding, binding_of
from te_fsdp.errors import MeshError, OrderError, PlacementError, message
from te_fsdp.mesh import check_1d, check_ascending
from te_fsdp.modules.classes import bound_class
from te_fsdp.modules.copies import watch_copies
from te_fsdp.modules.plan import PARALLEL_KINDS, Planned, plan_tree, quantizable
from te_fsdp.quantized.alignment import Grid
from te_fsdp.quantized.all_gather import mend_hooks
from te_fsdp.quantized.amax import requantize
from te_fsdp.quantized.installed import mend_new_zeros
from te_fsdp.quantized.optimizer_steps import watch_steps
from te_fsdp.quantized.shards import plan_cuts
from te_fsdp.quantized.support import check_quantizer

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

    from te_fsdp.layout.rules import ParameterRule

__all__ = ["check_device_mesh", "set_device_mesh"]

_log = logging.getLogger("te_fsdp")


def set_device_mesh(
    model: nn.Module, tp_mesh: DeviceMesh | None = None, weight_mesh: DeviceMesh | None = None
) -> None:
    """Bind a tree of TE modules to meshes, in place: parameters become DTensors, rightly placed over tp.

    Call it once, before FSDP2's ``fully_shard``, on parameters made on the device or on meta. Each module's
    class becomes te_fsdp's subclass of its TE class, so that ``isinstance``, names and ``state_dict`` keys
    stay. Modules that TE does not know are replicated over tp; mark a parameter ``sequence_parallel = True``
    if each tp rank computes only its part of that parameter's gradient. Calling again with the same meshes
    changes nothing.

    Local for high-precision parameters and meta ones. For quantized weights on the device with one scale per
    tensor it is collective over ``weight_mesh``: they are requantized with the scale of the whole weight.

    Args:
        model: A TE module, or any tree that contains some.
        tp_mesh: 1-D tensor-parallel mesh, or ``None`` for no tensor parallelism. A parameter of local shape
            ``(out / tp, in)`` becomes a DTensor of global shape ``(out, in)``, and so on.
        weight_mesh: 1-D mesh of all ranks that hold pieces of one weight: FSDP shard x tp, flattened, without
            replicas. Needed for weights with one scale per tensor under tensor parallelism.

    Raises:
        MeshError: A mesh is not 1-D, or not in ascending order, contradicts a module's ``tp_size`` or
            ``tp_group``, or the two do not fit together.
        OrderError: Parameters are sharded by FSDP2 already, or bound to other meshes.
        PlacementError: A module or option for which there is no right placement, or a quantized weight of which no
            cut consists of whole blocks of its format.

    Source: semantics of TransformerEngine PR #2713, signature included.
    """
    planned = check_device_mesh(model, tp_mesh, weight_mesh)
    tp = tp_mesh.size() if tp_mesh is not None else 1
    # Also where FSDP2 is not to follow, or called by the user: then the weight mesh tells how many ranks it has.
    plan_cuts(
        quantizable(planned), Grid(dp_shard=weight_mesh.size() // tp if weight_mesh is not None else 1, tp=tp)
    )
    replaced: dict[int, torch.nn.Parameter] = {}
    for item in planned:
        _bind(item, tp_mesh, weight_mesh, replaced)
    if tp_mesh is not None:
        watch_copies()
    if _te.is_loaded():
        mend_hooks()
        watch_steps()


def check_device_mesh(
    model: nn.Module, tp_mesh: DeviceMesh | None, weight_mesh: DeviceMesh | None
) -> list[Planned]:
    """All checks of :func:`set_device_mesh`, without changing anything. Local operation.

    Returns:
        The modules to bind, with their rules.
    """
    where = type(model).__name__
    check_1d(tp_mesh, "tp_mesh", f"set_device_mesh({where})")
    check_1d(weight_mesh, "weight_mesh", f"set_device_mesh({where})")
    if tp_mesh is not None:
        check_ascending(tp_mesh, "tp_mesh", f"set_device_mesh({where})")
    _check_nested(tp_mesh, weight_mesh, where)
    planned = plan_tree(model, tp_mesh.size() if tp_mesh is not None else 1)
    for item in planned:
        _check_item(item, tp_mesh, weight_mesh)
    return planned


def _check_nested(tp_mesh: DeviceMesh | None, weight_mesh: DeviceMesh | None, where: str) -> None:
    """The ranks that cut a weight include those that cut it by tp."""
    if tp_mesh is None or weight_mesh is None:
        return
    tp, weight = set(tp_mesh.mesh.flatten().tolist()), set(weight_mesh.mesh.flatten().tolist())
    if not tp <= weight:
        raise MeshError(
            message(
                f"set_device_mesh({where}): weight_mesh",
                expected=f"a mesh that contains the tp ranks {sorted(tp)}",
                got=f"ranks {sorted(weight)}",
                fix="pass te_fsdp.Meshes(...).weight, the flattened (dp_shard, tp) mesh",
            )
        )


def _check_item(item: Planned, tp_mesh: DeviceMesh | None, weight_mesh: DeviceMesh | None) -> None:
    """Everything that can be wrong with one module, before any module is touched."""
    label = item.name or type(item.module).__name__
    binding = binding_of(item.module)
    if binding is not None:
        _check_same(label, binding, tp_mesh, weight_mesh)
        return
    for name, parameter in item.module._parameters.items():
        if isinstance(parameter, DTensor) and (item.kind is not None or parameter.device_mesh != tp_mesh):
            raise OrderError(
                message(
                    f"{label}.{name}: set_device_mesh after the parameter became a DTensor",
                    expected="a plain parameter, as TE makes it",
                    got=f"DTensor with placements {tuple(parameter.placements)}",
                    why="FSDP2 would not see the tensor-parallel placement, and checkpoints would lose tp shards",
                    fix="call set_device_mesh before fully_shard, or te_fsdp.fully_shard, which does both",
                )
            )
        if parameter is None or item.kind is None:
            continue
        quantizer = _te.weight_quantizer(item.module, name)
        if quantizer is None:
            continue
        check_quantizer(f"{label}.{name}", quantizer)
        if tp_mesh is None or tp_mesh.size() == 1 or weight_mesh is not None:
            continue
        if _te.needs_shared_amax(quantizer):
            raise MeshError(
                message(
                    f"{label}.{name}: weight_mesh of a quantized weight with one scale per tensor",
                    expected="the mesh of all ranks that hold pieces of it",
                    got="None",
                    why="Each rank would quantize its piece with a scale of its own",
                    fix="pass weight_mesh=te_fsdp.Meshes(...).weight",
                )
            )
    group = getattr(item.module, "tp_group", None)
    if item.kind in PARALLEL_KINDS and group is not None and tp_mesh is not None and item.module.tp_size > 1:
        have, want = dist.get_process_group_ranks(group), tp_mesh.mesh.flatten().tolist()
        if sorted(have) != sorted(want):
            raise MeshError(
                message(
                    f"{label}: tp_mesh",
                    expected=f"the ranks of tp_group, {have}",
                    got=want,
                    fix="pass the mesh that tp_group belongs to, or build the module with tp_size alone",
                )
            )


def _check_same(
    label: str, binding: Binding, tp_mesh: DeviceMesh | None, weight_mesh: DeviceMesh | None
) -> None:
    """A second call may only repeat the first."""
    same_tp = binding.tp_mesh is tp_mesh or binding.tp_mesh == tp_mesh
    same_weight = binding.weight_mesh is weight_mesh or binding.weight_mesh == weight_mesh
    if (
        same_tp
        and (same_weight or binding.weight_mesh is None or weight_mesh is None)
        and not binding.under_fsdp
    ):
        return
    same_weight = same_weight or weight_mesh is None  # without tp, FSDP2's shard axis was taken as the mesh
    if binding.under_fsdp and not (same_tp and same_weight):
        what, fix = "set_device_mesh after fully_shard", "call set_device_mesh before fully_shard"
    elif binding.under_fsdp:
        return
    else:
        what, fix = (
            "set_device_mesh with other meshes than before",
            "bind a model once; build a new one for a new mesh",
        )
    raise OrderError(
        message(
            f"{label}: {what}",
            expected=f"tp_mesh={_ranks(binding.tp_mesh)}, weight_mesh={_ranks(binding.weight_mesh)}",
            got=f"tp_mesh={_ranks(tp_mesh)}, weight_mesh={_ranks(weight_mesh)}",
            why="The parameters are placed already",
            fix=fix,
        )
    )


def _ranks(mesh: DeviceMesh | None) -> str:
    """A mesh by its ranks, which its own text leaves out."""
    return "None" if mesh is None else f"ranks {mesh.mesh.tolist()}"


def _bind(
    item: Planned,
    tp_mesh: DeviceMesh | None,
    weight_mesh: DeviceMesh | None,
    replaced: dict[int, torch.nn.Parameter],
) -> None:
    """Bind one module: class, process group, parameters. ``replaced`` keeps tied parameters tied."""
    module = item.module
    known = binding_of(module)
    if known is not None:
        # A parent knows more than the module alone (q/k norms, fused projections): its rules replace earlier
        # ones.
        known.rules.update(item.rules)
        known.weight_mesh = known.weight_mesh or weight_mesh
        known.name = item.name if len(item.name) > len(known.name) else known.name
        return
    if item.kind is None and any(isinstance(p, DTensor) for p in module._parameters.values()):
        _log.debug("%s: left alone, its parameters are DTensors already", item.name)
        return
    binding = Binding(item.name, tp_mesh, weight_mesh, dict(item.rules))
    for name, parameter in module._parameters.items():
        if parameter is not None:
            binding.attributes[name] = _python_attributes(parameter)
    module.__dict__[KEY] = binding
    module.__class__ = bound_class(type(module))
    if (
        tp_mesh is not None
        and hasattr(module, "set_tensor_parallel_group")
        and getattr(module, "tp_size", 1) > 1
    ):
        module.set_tensor_parallel_group(tp_mesh.get_group())
    for name, parameter in list(module._parameters.items()):
        if parameter is None:
            continue
        if id(parameter) not in replaced:
            new = _place(parameter, item.rules[name], binding) if tp_mesh is not None else parameter
            local = _torch.local_of(new)
            if _te.is_quantized(local) and not local.is_meta:
                requantize(local, binding)
                mend_new_zeros(local)
            binding.carry(name, new)
            replaced[id(parameter)] = new
            replaced.setdefault(id(new), new)
        module._parameters[name] = replaced[id(parameter)]


def _place(parameter: torch.nn.Parameter, rule: ParameterRule, binding: Binding) -> torch.nn.Parameter:
    """The parameter as a DTensor on the tp mesh; data, quantized buffers and ``requires_grad`` stay as they are."""
    mesh = binding.tp_mesh
    assert mesh is not None
    local = parameter.detach()
    kept = _te.high_precision_value(parameter)
    if kept is not None:
        _te.attach_high_precision_value(local, kept)
    shape, placement = list(local.shape), Replicate()
    if rule.shard_dim is not None:
        if rule.shard_dim >= local.ndim:
            raise PlacementError(
                message(
                    f"{binding.name}: shard dim {rule.shard_dim}",
                    expected=f"{local.ndim} dims",
                    got=tuple(shape),
                )
            )
        shape[rule.shard_dim] *= mesh.size()
        placement = Shard(rule.shard_dim)
    like = DTensor.from_local(
        local,
        mesh,
        [placement],
        run_check=False,
        shape=torch.Size(shape),
        stride=torch.empty(shape, device="meta").stride(),
    )
    return _torch.with_local(local, like, requires_grad=parameter.requires_grad)


def _python_attributes(parameter: torch.Tensor) -> dict[str, Any]:
    """What users and TE hung on a parameter; not what a tensor subclass keeps for itself."""
    internal = ("_local_tensor", "_spec")
    if _te.is_quantized(parameter):
        probe = parameter.detach().__dict__.keys()
        kept = ("_high_precision_init_val", "get_high_precision_init_val", "clear_high_precision_init_val")
        internal += (*probe, *kept, "amax_reduction_group")
    return {key: value for key, value in parameter.__dict__.items() if key not in internal}
