"""What must differ between ranks: the parts of one weight.

Parts of a weight must be drawn from different random numbers. With equal seeds on all ranks, modules that are built
on the device get the same numbers on every rank of ``tp`` (and the same experts on every rank of ``ep``). Training
keeps them equal: the model has as many different rows as one rank holds. Constant parts (zeros, ones) are what any
initialisation gives, and not looked at.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import combinations
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from te_fsdp import _te, _torch
from te_fsdp.agree import gather
from te_fsdp.all_ranks import is_simulated
from te_fsdp.errors import InitError, shorten
from te_fsdp.parameters import binding_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from te_fsdp.modules.plan import ModulePlan

#: Attribute that a user sets on a parameter whose parts are meant to be equal.
MEANT = "equal_shards"
# Odd multiplier of a linear congruential generator (Knuth): makes the checksum depend on positions.
_MULTIPLIER = 6364136223846793005
# Words at a time: each takes 8 bytes while its checksum is computed, and embeddings have a thousand million.
_PIECE = 1 << 24


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
        total += places.mul_(_MULTIPLIER).mul_(piece).sum()
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
