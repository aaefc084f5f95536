"""Checks of weights before a step: equal copies, different shards, equal losses of a closure."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch.distributed.tensor import DTensor

from te_fsdp.checks.initial_values import MEANT, refuse_equal_shards
from te_fsdp.collectives.agreement import are_equal, raised_on_all_ranks
from te_fsdp.collectives.rendezvous import is_capturing, is_simulated
from te_fsdp.errors import InitError, MeshError, OrderError, shorten
from te_fsdp.gradient_sync import require_reduced
from te_fsdp.optimizer_step import has_mixed_groups
from te_fsdp.records import get_record, iter_param_owners
from te_fsdp.replica_groups import replica_groups_of_dtensor, replica_groups_of_plan
from te_fsdp.sharded_model import shard_of
from te_fsdp.tensor_checksums import checksum, is_constant
from te_fsdp.upstream import te as _te, torch_dtensor as _torch

if TYPE_CHECKING:
    import torch.distributed as dist

    from te_fsdp.lifecycle import Step
    from te_fsdp.sharded_model import ShardedModel

T = TypeVar("T")

# Elements of a shard that are not equal to another shard's by chance.
_ENOUGH = 16


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
        held: dict[dist.ProcessGroup, list[tuple[str, torch.Tensor]]] = {}
        for place in iter_param_owners(state.model):
            # Weights may be gathered now.
            shard = place._replace(parameter=cast("torch.nn.Parameter", shard_of(place.parameter)))
            groups = [*replica_groups_of_dtensor(shard.parameter), *replica_groups_of_plan(state, shard)]
            if groups:
                # Once per parameter, although several axes may replicate it.
                value = checksum(_torch.local_of(shard.parameter))
                for group in groups:
                    held.setdefault(group, []).append((place.label, value))
        # A parameter may differ over several groups. It is named once.
        bad = list(dict.fromkeys(label for label, is_same in _compare_sums(held) if not is_same))
        if bad:
            first = "before the first step" if not state.checked.optimizers else "before each step"
            raise InitError(
                f"{shorten(bad)}: copies differ between ranks",
                expected=f"equal values on all ranks that hold a weight's copies, {first}",
                got=f"{len(bad)} parameter(s) that differ",
                why="Different values were written on different ranks, as by nn.init with a different seed per rank",
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
            if p.numel() < _ENOUGH * p.device_mesh.size() or getattr(p, MEANT, False):
                continue
            names = p.device_mesh.mesh_dim_names or ()
            for axis, placement in enumerate(p.placements):
                if _torch.shard_dim_of(placement) is not None and p.device_mesh.size(axis) > 1:
                    part = (name, names[axis], local), checksum(local)
                    cut.setdefault(p.device_mesh.get_group(axis), []).append(part)
        found: dict[str, str] = {}
        for (name, axis, local), is_same in _compare_sums(cut):
            if is_same and not bool(is_constant(local)):
                found.setdefault(name, f"{name} (all ranks of {axis})")
        refuse_equal_shards(list(found.values()))


def _compare_sums(held: Mapping[dist.ProcessGroup, list[tuple[T, torch.Tensor]]]) -> Iterator[tuple[T, bool]]:
    """Yield the owner of each checksum, and whether it is equal on its group. Collective: two integers for each."""
    for group, sums in held.items():
        same = are_equal(torch.stack([value for _, value in sums]), group).tolist()
        yield from zip((owner for owner, _ in sums), same, strict=True)


# ------------------------------------------------------------------------------------------------------------- closures


def refuse_closure(step: Step) -> None:
    """Raise if the backward of a closure would come after work that the step does once, before it. Local operation."""
    if not step.models or step.closure is None:
        return
    held = [get_record(parameter) for _, parameters in step.models for parameter in parameters]
    if has_mixed_groups(step.optimizer) or any(
        f.tp_replica or (f.plan is not None and f.plan.gradient_dtype is not None) for f in held if f
    ):
        raise OrderError(
            f"{step.where}(closure) of a model with tensor parallelism, with parameters that "
            "are not sharded, or with gradients in main_grads_dtype",
            expected="step() after backward()",
            got="a closure",
            why="Its gradients would come too late to be made equal over tp, or cast",
            fix="call backward() first, then step() without a closure",
        )


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
    (bits,) = struct.unpack("q", struct.pack("d", float(loss)))
    halves = [bits >> 32, bits & 0xFFFFFFFF]
    if not bool(are_equal(halves, mesh).all()):
        raise MeshError(
            f"{step.where}(closure): losses that differ between ranks",
            expected="the same loss on all ranks, the mean over their data",
            got=f"here {float(loss)!r}",
            why="It decides by the loss when to stop: the ranks would diverge, and wait for each other",
            fix="after loss.backward(): loss = loss.detach().clone(); torch.distributed.all_reduce(loss); return "
            "loss / the number of ranks",
        )
