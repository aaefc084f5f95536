"""Checks of weights: one initialization on all ranks; before a step equal copies, different shards, equal losses."""

from __future__ import annotations

import struct
from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import combinations
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from te_fsdp.collectives.agreement import are_equal, digest, gather, raised_on_all_ranks
from te_fsdp.collectives.rendezvous import collective_call, is_capturing, is_simulated
from te_fsdp.errors import InitError, MeshError, shorten
from te_fsdp.features.broadcast_params import replica_groups_of_dtensor, replica_groups_of_plan
from te_fsdp.gradient_sync import require_reduced
from te_fsdp.lifecycle import Step
from te_fsdp.modules.plan import ModulePlan
from te_fsdp.records import binding_of, param_owners
from te_fsdp.sharded_model import ShardedModel, shard_of
from te_fsdp.tensor_checksums import checksum, is_constant
from te_fsdp.upstream import te as _te, torch_dtensor as _torch

T = TypeVar("T")

# Elements of a shard that are not equal to another shard's by chance.
_ENOUGH = 16


# [Note: equal shards] Modules built on the device are drawn before. With equal seeds on all ranks they get
# the same numbers on every rank of ``tp`` (and the same experts on every rank of ``ep``), although each rank
# has a different shard. Training keeps these shards equal, so the model has only as many different rows as
# one rank. Constant shards (zeros, ones) are ignored, because any initialization can produce them.
#: Attribute that a user sets on a parameter whose shards are intentionally equal.
MEANT = "equal_shards"


def compare_random_states(mesh: DeviceMesh, label: str, device: torch.device) -> None:
    """Raise InitError on all ranks unless they have the same random state on ``device``. Collective over ``mesh``."""
    # Weights on a device are drawn from the generator of that device.
    on_cpu = device.type == "cpu"
    state = torch.get_rng_state() if on_cpu else torch.get_device_module(device.type).get_rng_state(device)
    # One max all-reduce of two integers per axis.
    with collective_call(f"reset_parameters ({label})", mesh):
        same = are_equal([digest(state.cpu().numpy().tobytes())], mesh, device=device)
    if not same:
        raise InitError(
            f"{label}: initialization with different random states",
            expected="equal states on all ranks of the mesh",
            got="different states",
            why="Shards of different initializations, or differing replicas, would silently train incorrectly",
            fix="call torch.manual_seed with one seed on all ranks first, or pass seed= to te_fsdp.materialize",
        )


def compare_shards(
    planned: Collection[ModulePlan], tp_mesh: DeviceMesh | None, ep_mesh: DeviceMesh | None
) -> None:
    """Raise InitError if shards are equal on ranks where they must differ. Collective over both meshes."""
    if has_device_parameters(planned):  # parameters on meta have no values to compare
        with raised_on_all_ranks(ep_mesh, "set_device_mesh"), raised_on_all_ranks(tp_mesh, "set_device_mesh"):
            refuse_equal_shards(find_equal_shards(planned, tp_mesh, ep_mesh))


def has_device_parameters(planned: Iterable[ModulePlan]) -> bool:
    """Return whether unbound modules have parameters on the device. Local operation."""
    return any(
        parameter is not None and not parameter.is_meta
        for item in planned
        if binding_of(item.module) is None
        for parameter in item.module._parameters.values()
    )


def find_equal_shards(
    planned: Iterable[ModulePlan], tp_mesh: DeviceMesh | None, ep_mesh: DeviceMesh | None
) -> list[str]:
    """Return parameters with equal shards on two ranks where they should differ, with the ranks. Changes nothing.

    It checks parameters sharded over ``tp``, and parameters of experts over ``ep``. Collective over these meshes: one
    object all-gather of a checksum per parameter. All ranks return the same. Parameters on meta and of bound modules
    are skipped.
    """
    if dist.is_initialized() and is_simulated():
        return []
    shards = [
        (f"{item.name}.{name}" if item.name else name, item, item.rules.get(name), _torch.local_of(parameter))
        for item in planned
        if binding_of(item.module) is None
        for name, parameter in item.module._parameters.items()
        if parameter is not None and not parameter.is_meta and not getattr(parameter, MEANT, False)
    ]
    equal = []
    if tp_mesh is not None and tp_mesh.size() > 1:
        cut = {label: t for label, _, rule, t in shards if rule is not None and rule.shard_dim is not None}
        equal += _names_equal_on_two_ranks(tp_mesh, "tp", _checksums_of_random(cut))
    if ep_mesh is not None and ep_mesh.size() > 1:
        experts = {}  # by local index
        for label, item, _, local in shards:
            user_dtensor = item.distributed.get(label.rpartition(".")[2])
            if user_dtensor.is_expert if user_dtensor is not None else item.experts is not None:
                experts[label] = local
        equal += _names_equal_on_two_ranks(ep_mesh, "ep", _checksums_of_random(experts, copies=True))
    return equal


def refuse_equal_shards(equal: list[str]) -> None:
    """Raise InitError if there are equal shards. The error names the parameters and possible fixes."""
    if not equal:
        return
    raise InitError(
        f"{shorten(equal, 3, '; ')}: equal values on ranks that must have different shards",
        expected="different values on ranks with different rows, columns or experts",
        got="equal values, as drawn with equal seeds",
        why="Training would keep them equal, so the model would have the capacity of one rank's shard",
        fix='build the model with device="meta" and call te_fsdp.materialize, which draws the weights of one '
        "process; or build TE modules with TransformerEngine's RNG tracker (get_rng_state_tracker=), or with "
        "different seeds on these ranks, but equal seeds for replicated parameters; or load values first. "
        f"If equal shards are intended, set parameter.{MEANT} = True",
    )


def _checksums_of_random(tensors: dict[str, torch.Tensor], *, copies: bool = False) -> dict[str, int]:
    """Return label -> checksum of tensors whose values are not all equal.

    With ``copies``, kinds with several equal tensors on this rank are skipped: experts initialized as copies of one
    layer.
    """
    if not tensors:
        return {}
    sums = torch.stack([checksum(tensor) for tensor in tensors.values()]).tolist()  # fetched in one transfer
    constant = torch.stack([is_constant(tensor) for tensor in tensors.values()]).tolist()
    # The experts of a layer have names that differ by a number: weight0, weight1, ...
    kinds = [label.rstrip("0123456789") for label in tensors]
    by_kind: dict[str, list[int]] = {}
    for kind, value in zip(kinds, sums, strict=True):
        by_kind.setdefault(kind, []).append(value)
    meant = {kind for kind, values in by_kind.items() if copies and len(values) > 1 and len(set(values)) == 1}
    return {
        label: value
        for label, kind, value, same in zip(tensors, kinds, sums, constant, strict=True)
        if not same and kind not in meant
    }


def _names_equal_on_two_ranks(mesh: DeviceMesh, axis: str, mine: dict[str, int]) -> list[str]:
    """Return the names whose shards are identical on two ranks of a 1-D mesh."""
    by_rank = gather(mine, mesh)
    texts: dict[str, str] = {}
    for (first_rank, first), (second_rank, second) in combinations(enumerate(by_rank), 2):
        for label, value in first.items():
            if second.get(label) == value:
                texts.setdefault(label, f"{label} ({axis} ranks {first_rank} and {second_rank})")
    return list(texts.values())


# ---------------------------------------------------------------------------------------------------- copies and shards


def compare_copies_of_step(step: Step) -> None:
    """Raise before a step if ranks that replicate a parameter have different bits. Collective over replica groups."""
    for state, _ in () if is_simulated() or is_capturing() else step.models:
        compare_copies(state, step.where)


def compare_copies(state: ShardedModel, where: str) -> None:
    """Raise on all ranks if ranks that replicate a parameter have different bits.

    Collective over every axis that replicates a parameter: two integers for each.
    """
    with raised_on_all_ranks(state.meshes.device_mesh, where):
        copies: dict[dist.ProcessGroup, list[tuple[str, torch.Tensor]]] = {}
        for owner in param_owners(state.model):
            # Weights may be unsharded now.
            shard = owner._replace(parameter=cast("torch.nn.Parameter", shard_of(owner.parameter)))
            groups = [*replica_groups_of_dtensor(shard.parameter), *replica_groups_of_plan(state, shard)]
            if groups:
                # Once per parameter, although several axes may replicate it.
                value = checksum(_torch.local_of(shard.parameter))
                for group in groups:
                    copies.setdefault(group, []).append((owner.label, value))
        # A parameter may differ over several groups. It is named once.
        bad = list(dict.fromkeys(label for label, is_same in _compare_sums(copies) if not is_same))
        if bad:
            first = "before the first step" if not state.checked.optimizers else "before each step"
            raise InitError(
                f"{shorten(bad)}: copies differ between ranks",
                expected=f"equal values on all ranks with a copy of the weight, {first}",
                got=f"{len(bad)} parameter(s) that differ",
                why="Different values were written on different ranks, as by nn.init with a different seed per rank, "
                "or some ranks have clipped, scaled or stepped differently",
                fix="use equal seeds on all ranks when weights are written, or te_fsdp.materialize(model, seed=...)",
            )


def refuse_equal_parts(state: ShardedModel, where: str) -> None:
    """Raise on all ranks if all ranks of an axis have the same shard of a parameter, and its values vary.

    Collective over every axis that shards a parameter: two integers for each.
    """
    # ``parameter.to_local().normal_()`` with equal seeds does that. Experts, which may start as copies of
    # one, are left out.
    with raised_on_all_ranks(state.meshes.device_mesh, where):
        cut: dict[dist.ProcessGroup, list[tuple[tuple[str, str, torch.Tensor], torch.Tensor]]] = {}
        for name, p in state.parameters().items():
            local = _torch.local_of(p)
            if not isinstance(p, DTensor) or p.ndim > 2 or state.is_expert(name) or _te.is_quantized(local):
                continue
            if not p.is_floating_point():  # masks and indices are not drawn
                continue
            if p.numel() < _ENOUGH * p.device_mesh.size() or getattr(p, MEANT, False):
                continue
            names = p.device_mesh.mesh_dim_names or ()
            for axis, placement in enumerate(p.placements):
                if _torch.shard_dim_of(placement) is not None and p.device_mesh.size(axis) > 1:
                    part = (name, names[axis], local), checksum(local)
                    cut.setdefault(p.device_mesh.get_group(axis), []).append(part)
        texts: dict[str, str] = {}
        for (name, axis, local), is_same in _compare_sums(cut):
            if is_same and not bool(is_constant(local)):
                texts.setdefault(name, f"{name} (all ranks of {axis})")
        refuse_equal_shards(list(texts.values()))


def _compare_sums(
    by_group: Mapping[dist.ProcessGroup, list[tuple[T, torch.Tensor]]],
) -> Iterator[tuple[T, bool]]:
    """Yield the owner of each checksum, and whether it is equal on its group. Collective: two integers for each."""
    for group, sums in by_group.items():
        same = are_equal(torch.stack([value for _, value in sums]), group).tolist()
        yield from zip((owner for owner, _ in sums), same, strict=True)


# ------------------------------------------------------------------------------------------------------------- closures


def check_closure(step: Step, loss: Any) -> None:
    """Check the gradients that a closure has left, and the loss that steers ``LBFGS``.

    Collective over the mesh for ``LBFGS``: one max all-reduce of two integers.
    """
    # ``LBFGS`` decides by the loss when to stop, and how far a line search goes. Ranks with different losses
    # would take different decisions, and wait for each other.
    for state, parameters in step.models:
        require_reduced(state, f"{step.where}(closure)", parameters)
    mesh = step.models[0][0].meshes.device_mesh
    if not isinstance(step.optimizer, torch.optim.LBFGS) or mesh.size() == 1:
        return
    # Bits, because ranks must have equal losses exactly, NaN included.
    if not bool(are_equal([digest(struct.pack("d", float(loss)))], mesh)):
        raise MeshError(
            f"{step.where}(closure): losses that differ between ranks",
            expected="the same loss on all ranks, the mean over their data",
            got=f"here {float(loss)!r}",
            why="It decides by the loss when to stop: the ranks would diverge, and wait for each other",
            fix="after loss.backward(): loss = loss.detach().clone(); torch.distributed.all_reduce(loss); return "
            "loss / the number of ranks",
        )
