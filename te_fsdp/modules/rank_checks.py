"""What ranks must have alike, and what not: the parts of one weight, and gradients over ``tp``.

Parts of a weight must be drawn from different random numbers. With equal seeds on all ranks, modules that are built
on the device get the same numbers on every rank of ``tp`` (and the same experts on every rank of ``ep``). Training
keeps them equal: the model has as many different rows as one rank holds. Constant parts (zeros, ones) are what any
initialisation gives, and not looked at.

What ``tp`` ranks compute for a parameter that each of them holds whole is the whole gradient, or its part of a sum:

    not marked                            each rank computes the whole gradient: that of the first is taken on all
    marked ``sequence_parallel = True``   each computes a part, and all parts are added up

A layer that sequence parallelism feeds some of the tokens, and that nobody has marked, would learn from those of the
first rank alone; one that is marked and sees all tokens, from ``tp`` times its gradient. So gradients are compared over
``tp``: whole ones before a parameter's first two steps, parts where they come to be, in a first backward. Two, since
layers that begin at zero give some gradients of zero at first.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import combinations
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from te_fsdp import _te, _torch
from te_fsdp.agree import gather, raised_on_all_ranks
from te_fsdp.all_ranks import is_capturing, is_simulated
from te_fsdp.errors import GradientError, InitError, shorten
from te_fsdp.parameters import binding_of, facts_of
from te_fsdp.step_hooks import gradient_of, registered_at

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

    from te_fsdp.modules.plan import ModulePlan
    from te_fsdp.parameters import Binding
    from te_fsdp.step_hooks import Step

#: Attribute that a user sets on a parameter whose parts are meant to be equal.
MEANT = "equal_shards"
# Odd multiplier of a linear congruential generator (Knuth): mixes positions for the checksum.
_MULTIPLIER = 6364136223846793005
# Words at a time: each takes 24 bytes while its checksum is computed, and embeddings have a thousand million.
_PIECE = 1 << 23


def on_device(planned: Iterable[ModulePlan]) -> bool:
    """Whether modules that are not bound yet have parameters on the device. Local operation."""
    return any(
        parameter is not None and not parameter.is_meta
        for item in planned
        if binding_of(item.module) is None
        for parameter in item.module._parameters.values()
    )


def find_equal_shards(
    planned: Iterable[ModulePlan], tp_mesh: DeviceMesh | None, ep_mesh: DeviceMesh | None
) -> list[str]:
    """Parameters of which two ranks hold equal parts that should differ. Changes nothing.

    Collective over ``tp_mesh`` and ``ep_mesh`` where they have several ranks: one object gather of a checksum per
    parameter over each. Parameters on meta, and those of modules that are bound already, are left out.

    Args:
        planned: The modules to be bound.
        tp_mesh: Its ranks must differ in parameters that tp cuts.
        ep_mesh: Its ranks must differ in the parameters of experts.

    Returns:
        One entry per parameter, with the ranks that are equal; the same on all ranks of a tp group, or of an ep group.
    """
    fresh = [item for item in planned if binding_of(item.module) is None]
    found = []
    if dist.is_initialized() and is_simulated():
        return []
    if tp_mesh is not None and tp_mesh.size() > 1:
        found += _equal_over(tp_mesh, "tp", _drawn(_cut_by_tp(fresh)))
    if ep_mesh is not None and ep_mesh.size() > 1:
        found += _equal_over(ep_mesh, "ep", _drawn(_experts(fresh), copies=True))
    return found


def refuse_equal_shards(found: list[str]) -> None:
    """Raise if anything was found.

    Raises:
        InitError: Names the parameters, and the ways out.
    """
    if not found:
        return
    raise InitError(
        f"{shorten(found, 3, '; ')}: equal values where each rank holds another part",
        expected="different values on ranks that hold different rows, columns or experts",
        got="those of one random state, as equal seeds draw them",
        why="Training would keep them equal, so that the model learns what one rank's part can",
        fix='build the model with device="meta" and call te_fsdp.materialize, which draws the weights of one '
        "process; or build TE modules with TransformerEngine's RNG tracker (get_rng_state_tracker=), or with "
        "another seed on each of these ranks, and equal seeds for what they replicate; or load values before. "
        f"Where equal parts are meant, set parameter.{MEANT} = True",
    )


def _cut_by_tp(planned: Iterable[ModulePlan]) -> Iterator[tuple[str, torch.Tensor, str]]:
    """Label, local tensor and kind of every parameter on the device that tp cuts."""
    for item in planned:
        for name, parameter in item.module._parameters.items():
            rule = item.rules.get(name)
            if parameter is not None and rule is not None and rule.shard_dim is not None:
                yield from _values(item, name, parameter)


def _experts(planned: Iterable[ModulePlan]) -> Iterator[tuple[str, torch.Tensor, str]]:
    """Label by local index, local tensor and kind of every expert's parameters on the device."""
    for item in planned:
        for name, parameter in item.module._parameters.items() if item.experts is not None else ():
            if parameter is not None:
                yield from _values(item, name, parameter)


def _values(item: ModulePlan, name: str, parameter: torch.Tensor) -> Iterator[tuple[str, torch.Tensor, str]]:
    local = _torch.local_of(parameter)
    if local.is_meta or getattr(parameter, MEANT, False):
        return
    label = f"{item.name}.{name}" if item.name else name
    yield label, local, label.rstrip("0123456789")


def _drawn(held: Iterable[tuple[str, torch.Tensor, str]], *, copies: bool = False) -> dict[str, int]:
    """Label -> checksum of those whose values are not all the same.

    Args:
        held: Label, local tensor and kind.
        copies: Leave out kinds of which this rank has several, all equal: experts that begin as copies of one layer.
    """
    entries = [(label, kind, checksum(tensor), is_constant(tensor)) for label, tensor, kind in held]
    if not entries:
        return {}
    sums = torch.stack([entry[2] for entry in entries]).tolist()  # fetched at once
    constant = torch.stack([entry[3] for entry in entries]).tolist()
    kinds: dict[str, list[int]] = {}
    for (_, kind, _, _), value in zip(entries, sums, strict=True):
        kinds.setdefault(kind, []).append(value)
    meant = {kind for kind, values in kinds.items() if copies and len(values) > 1 and len(set(values)) == 1}
    return {
        label: value
        for (label, kind, _, _), value, same in zip(entries, sums, constant, strict=True)
        if not same and kind not in meant
    }


def _equal_over(mesh: DeviceMesh, axis: str, mine: dict[str, int]) -> list[str]:
    """Which of them two ranks of a 1-D mesh have alike."""
    everyone = gather(mine, mesh)
    found: dict[str, str] = {}
    for (one, first), (other, second) in combinations(enumerate(everyone), 2):
        for label, value in first.items():
            if second.get(label) == value:
                found.setdefault(label, f"{label} ({axis} ranks {one} and {other})")
    return list(found.values())


def checksum(tensor: torch.Tensor) -> torch.Tensor:
    """Position-dependent checksum of a tensor's bytes, int64 on its device, wrapping on overflow.

    Halved, so that its negative exists too.
    """
    words = _words(tensor)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for start in range(0, words.numel(), _PIECE):
        piece = words[start : start + _PIECE]
        places = torch.arange(start + 1, start + 1 + piece.numel(), dtype=torch.int64, device=tensor.device)
        # No linear function of the position: biases after Adam's first step are patterns of two values,
        # and many such patterns have equal sums of positions.
        places.mul_(_MULTIPLIER)
        places.bitwise_xor_(places >> 32).mul_(_MULTIPLIER)
        total += places.mul_(piece).sum()
    return total // 2


def is_constant(tensor: torch.Tensor) -> torch.Tensor:
    """Whether all values of a tensor are the same: a bool on its device."""
    words = _words(tensor)
    return (words == words[:1]).all()


def _words(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's bits as a flat tensor of integers of the same size."""
    # Of quantized tensors the values: padding of their scale buffers is left as the kernel finds it.
    tensor = tensor.dequantize() if _te.is_quantized(tensor) else tensor
    data = tensor.detach().contiguous().view(-1)
    return data.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[data.element_size()])


# --------------------------------------------------------------------------------------------- gradients over tp

# In how many steps gradients of a parameter are compared.
_STEPS = 2
# How far gradients of one parameter may lie apart over tp, in parts of their norm. Kernels that add in another order
# change bf16 values by a unit in the last place, 1/256; sums in bf16 over hundreds of ranks by 1/40. Other tokens give
# gradients that have less in common, but for batches of very many: the norm of the noise to that of the mean.
_APART = 1 / 16
# Four bits, rounded at random as each rank draws: 1/5.
_APART_IN_4_BITS = 1 / 2
# Parts of one gradient that lie nearer than this, in parts of their norm, are one gradient, rounded otherwise.
_SAME = 1 / 128


def compare_gradients(model: nn.Module, wanted: bool) -> None:
    """Let gradients of what each rank of tp holds whole be looked at in the first steps, or no longer. Local operation.

    Args:
        model: A bound model, sharded or not.
        wanted: Whether :func:`require_equal_gradients` and :func:`refuse_same_gradient` shall look.
    """
    for binding in filter(None, map(binding_of, model.modules())):
        binding.marked.clear()
        if wanted and binding.tp_mesh is not None and binding.tp_mesh.size() > 1:
            # Of a loss that is a plain sum the gradient of a bias is the number of tokens.
            marked = [
                name for name, rule in binding.rules.items() if rule.partial_grad and "bias" not in name
            ]
            binding.marked.update(dict.fromkeys(marked, _STEPS))
    for parameter in model.parameters():
        facts = facts_of(parameter)
        if facts is not None and facts.tp_replica:
            facts.looks = _STEPS if wanted else 0


@torch.no_grad()
def refuse_same_gradient(binding: Binding, name: str, gradient: torch.Tensor) -> None:
    """Look at a part of a sum over tp, in the first backward in which it is not zero. Collective over tp then.

    Args:
        binding: Its module's.
        name: Of the parameter in that module.
        gradient: This rank's part, a local tensor.

    Raises:
        GradientError: All ranks of tp have computed the same.
    """
    if name not in binding.marked or is_simulated() or is_capturing():
        return
    assert binding.tp_mesh is not None
    ((_, ratio),) = _apart_over_tp(binding.tp_mesh, [(gradient, gradient)])
    if ratio < _SAME:
        raise GradientError(
            f"{binding.label(name)}: gradients that are the same over tp",
            expected="another part of the gradient on each rank, of a parameter that is marked sequence_parallel",
            got="the same on all ranks of a tp group",
            why="They are added up: the parameter would learn from a multiple of its gradient",
            fix="leave the mark off layers that see all tokens on each rank (sequence_parallel=False), or cut the "
            "sequence before them. Where gradients shall be the same, pass check_inputs=False to fully_shard or "
            "set_device_mesh",
        )
    binding.marked[name] -= 1
    if ratio >= _SAME or not binding.marked[name]:
        del binding.marked[name]


def require_equal_gradients(step: Step) -> None:
    """Compare the gradients of what every rank of tp holds whole, in the first steps of each parameter.

    Collective then: a broadcast of each such gradient over tp, and two numbers for each over its mesh.

    Raises:
        GradientError: They differ by more than rounding, on all ranks of the model. They are as they were.
    """
    looked = [(parameter, facts) for parameter, facts in step.held if facts.looks and parameter.requires_grad]
    if not looked or is_simulated() or is_capturing():
        return
    found: dict[DeviceMesh, list[tuple[torch.Tensor, torch.Tensor]]] = {}
    for parameter, _ in looked:
        gradient = gradient_of(parameter)
        if gradient is not None and isinstance(parameter, DTensor):
            found.setdefault(parameter.device_mesh, []).append((parameter, _torch.local_of(gradient)))
    recipes = [recipe for state, _ in step.models for recipe in _te.recipes_in_use(state.model)]
    in_4_bits = any("NVFP4" in recipe or "Custom" in recipe for recipe in recipes)
    with raised_on_all_ranks(step.models[0][0].meshes.device_mesh if step.models else None, step.where):
        apart = [entry for mesh, held in found.items() for entry in _apart_over_tp(mesh, held)]
        limit = _APART_IN_4_BITS if in_4_bits else _APART
        _refuse_apart(step, [(parameter, ratio) for parameter, ratio in apart if ratio > limit])
    for _, facts in looked:
        facts.looks -= 1


@torch.no_grad()
def _apart_over_tp(
    mesh: DeviceMesh, held: list[tuple[torch.Tensor, torch.Tensor]]
) -> list[tuple[torch.Tensor, float]]:
    """How far the gradients lie from those of the first tp rank, in parts of their norm. Collective over ``mesh``.

    Args:
        mesh: Whose last axis is tp.
        held: Parameters, with the local tensors of their gradients.

    Returns:
        The same numbers on all ranks; NaN without a gradient but zero, and with NaN in one.
    """
    group = mesh.get_group(mesh.ndim - 1)
    if group.size() == 1:
        return []
    sums = torch.zeros((len(held), 2), dtype=torch.float64, device=held[0][1].device)
    for row, (_, gradient) in zip(sums, held, strict=True):
        first = gradient.clone(memory_format=torch.contiguous_format)
        dist.broadcast(first, group=group, group_src=0)
        row[0] = torch.linalg.vector_norm(gradient - first, dtype=torch.float64).square()
        row[1] = torch.linalg.vector_norm(first, dtype=torch.float64).square()
    for axis in range(mesh.ndim):
        dist.all_reduce(sums, group=mesh.get_group(axis))
    # All ranks but the first differ from it; all have its norm.
    ratios = (sums[:, 0] / (group.size() - 1) / (sums[:, 1] / group.size())).sqrt().tolist()
    return [(parameter, ratio) for (parameter, _), ratio in zip(held, ratios, strict=True)]


def _refuse_apart(step: Step, apart: list[tuple[torch.Tensor, float]]) -> None:
    if not apart:
        return
    names = step.names
    for owner, name in registered_at({id(parameter) for parameter, _ in apart} - names.keys()):
        binding = binding_of(owner)
        names[id(owner._parameters[name])] = name if binding is None else binding.label(name)
    told = [
        f"{names.get(id(parameter), 'a parameter')} by {ratio:.0%} of its norm" for parameter, ratio in apart
    ]
    raise GradientError(
        f"{step.where}: gradients that differ over tp",
        expected="the same on all ranks of a tp group, of parameters that each holds whole",
        got=shorten(told, 3, ", "),
        why="They come of other tokens or features on each rank, as sequence parallelism deals them out, and nobody "
        "adds them up: those of the first rank would be taken",
        fix="set parameter.sequence_parallel = True on the parameters of layers that see a part of the tokens, before "
        "te_fsdp.fully_shard or set_device_mesh; or give these layers all tokens. Where gradients shall differ, pass "
        "check_inputs=False to fully_shard or set_device_mesh",
    )
