"""Checks of initial values: one random state on all ranks, and different shards on ranks that must differ."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from itertools import combinations
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from te_fsdp.collectives.agreement import are_equal, digest, gather, raised_on_all_ranks
from te_fsdp.collectives.rendezvous import collective_call, is_simulated
from te_fsdp.errors import InitError, shorten
from te_fsdp.records import binding_of
from te_fsdp.tensor_checksums import checksum, is_constant
from te_fsdp.upstream import torch_dtensor as _torch

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from te_fsdp.module_plan import ModulePlan

# [Note: equal shards] Modules built on the device are drawn before. With equal seeds on all ranks they get
# the same numbers on every rank of ``tp`` (and the same experts on every rank of ``ep``), although each rank
# has a different shard. Training keeps these shards equal, so the model has only as many different rows as
# one rank. Constant shards (zeros, ones) are ignored, because any initialization can produce them.
#: Attribute that a user sets on a parameter whose shards are intentionally equal.
MEANT = "equal_shards"


def compare_random_states(mesh: DeviceMesh, label: str, device: torch.device) -> None:
    """Raise InitError on all ranks of ``mesh`` unless they have the same random state on ``device``. Collective."""
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
            got="differing states",
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
    held = [
        (f"{item.name}.{name}" if item.name else name, item, item.rules.get(name), _torch.local_of(parameter))
        for item in planned
        if binding_of(item.module) is None
        for name, parameter in item.module._parameters.items()
        if parameter is not None and not parameter.is_meta and not getattr(parameter, MEANT, False)
    ]
    found = []
    if tp_mesh is not None and tp_mesh.size() > 1:
        cut = {label: t for label, _, rule, t in held if rule is not None and rule.shard_dim is not None}
        found += _names_equal_on_two_ranks(tp_mesh, "tp", _drawn(cut))
    if ep_mesh is not None and ep_mesh.size() > 1:
        experts = {}  # by local index
        for label, item, _, local in held:
            own = item.distributed.get(label.rpartition(".")[2])
            if own.is_expert if own is not None else item.experts is not None:
                experts[label] = local
        found += _names_equal_on_two_ranks(ep_mesh, "ep", _drawn(experts, copies=True))
    return found


def refuse_equal_shards(found: list[str]) -> None:
    """Raise InitError if there are equal shards. The error names the parameters and possible fixes."""
    if not found:
        return
    raise InitError(
        f"{shorten(found, 3, '; ')}: equal values on ranks that must have different shards",
        expected="different values on ranks with different rows, columns or experts",
        got="equal values, as drawn with equal seeds",
        why="Training would keep them equal, so the model would have the capacity of one rank's shard",
        fix='build the model with device="meta" and call te_fsdp.materialize, which draws the weights of one '
        "process; or build TE modules with TransformerEngine's RNG tracker (get_rng_state_tracker=), or with "
        "different seeds on these ranks, but equal seeds for replicated parameters; or load values first. "
        f"If equal shards are intended, set parameter.{MEANT} = True",
    )


def _drawn(held: dict[str, torch.Tensor], *, copies: bool = False) -> dict[str, int]:
    """Return label -> checksum of tensors whose values are not all equal.

    With ``copies``, kinds with several equal tensors on this rank are skipped: experts initialized as copies of one
    layer.
    """
    if not held:
        return {}
    sums = torch.stack([checksum(tensor) for tensor in held.values()]).tolist()  # fetched in one transfer
    constant = torch.stack([is_constant(tensor) for tensor in held.values()]).tolist()
    # The experts of a layer have names that differ by a number: weight0, weight1, ...
    kinds = [label.rstrip("0123456789") for label in held]
    by_kind: dict[str, list[int]] = {}
    for kind, value in zip(kinds, sums, strict=True):
        by_kind.setdefault(kind, []).append(value)
    meant = {kind for kind, values in by_kind.items() if copies and len(values) > 1 and len(set(values)) == 1}
    return {
        label: value
        for label, kind, value, same in zip(held, kinds, sums, constant, strict=True)
        if not same and kind not in meant
    }


def _names_equal_on_two_ranks(mesh: DeviceMesh, axis: str, mine: dict[str, int]) -> list[str]:
    """Return the names whose shards are identical on two ranks of a 1-D mesh."""
    everyone = gather(mine, mesh)
    found: dict[str, str] = {}
    for (one, first), (other, second) in combinations(enumerate(everyone), 2):
        for label, value in first.items():
            if second.get(label) == value:
                found.setdefault(label, f"{label} ({axis} ranks {one} and {other})")
    return list(found.values())
