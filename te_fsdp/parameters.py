"""One record on each parameter, and the one way in which a parameter takes another's place.

Binding, sharding, initialising, casting and loading make new objects for a parameter. What hangs on the old one goes to
the new one, its successor (:func:`carry_over`):

    ``_te_fsdp``          te_fsdp's own record, :class:`Facts`; each object that takes another's place has its own
    other attributes      the user's and TE's marks; those that the successor has already stay as they are

A shard and the gathered parameter that FSDP2 installs in turn share one record. Optimizers, and torch's hooks around
their steps, see parameters alone: what they have to know of the model is found here.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from te_fsdp import _te, _torch

if TYPE_CHECKING:
    import weakref

    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

    from te_fsdp.layout.storage import ParameterPlan

__all__ = [
    "KEY",
    "Facts",
    "Place",
    "attributes_of",
    "carry_over",
    "facts_of",
    "label_of",
    "noted",
    "places_of",
    "plan_of",
    "share",
    "successor",
]

#: The attribute.
KEY = "_te_fsdp"


@dataclass(eq=False)
class Facts:
    """What te_fsdp knows of a parameter. Copies of the parameter leave references to living objects behind.

    Attributes:
        label: Full name of a bound parameter that may be quantized.
        tp_replica: Whether every tensor-parallel rank holds it whole, and must hold the same.
        no_shard: Whether ``fsdp_no_shard`` was called for it.
        plan: What ``fully_shard`` has settled about it.
        ep_mesh: Of an expert's parameter: the expert-parallel mesh, whose ranks hold other experts.
        state: The ``ShardingState`` of its model.
        record: FSDP2's record of it, which knows its shard; of parameters that stay gathered.
        stand_ins: Those of the optimizer that keeps its state in parts (``outer_state.StandIns``).
        replaced: Name and cause, once a module has lost this very object (:mod:`te_fsdp.modules.replaced`).
    """

    label: str | None = None
    tp_replica: bool = False
    no_shard: bool = False
    plan: ParameterPlan | None = None
    ep_mesh: DeviceMesh | None = None
    state: weakref.ref[Any] | None = None
    record: weakref.ref[Any] | None = None
    stand_ins: weakref.ref[Any] | None = None
    replaced: tuple[str, str] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Facts:
        """Meshes are shared by the copy: process groups cannot be copied."""
        return dataclasses.replace(self, plan=None, state=None, record=None, stand_ins=None, replaced=None)

    def __reduce__(self) -> Any:
        """Pickles leave it behind. An empty dict takes its place, which ``torch.load(weights_only=True)`` can read."""
        return OrderedDict, ()


def facts_of(parameter: torch.Tensor) -> Facts | None:
    """A parameter's record; ``None`` if te_fsdp knows nothing of it. Local operation."""
    return parameter.__dict__.get(KEY) or None


def noted(parameter: torch.Tensor) -> Facts:
    """A parameter's record, made if there is none, to be written to. Local operation."""
    facts = parameter.__dict__.get(KEY)
    if not facts:
        facts = parameter.__dict__[KEY] = Facts()
    return facts


def plan_of(parameter: torch.Tensor) -> ParameterPlan | None:
    """What ``fully_shard`` has settled about a parameter; ``None`` for any other. Local operation."""
    facts = parameter.__dict__.get(KEY)
    return facts.plan if facts else None


def label_of(parameter: torch.Tensor, kind: str = "a parameter") -> str:
    """Name of a parameter for messages: its label, else its shape. Local operation."""
    facts = facts_of(parameter)
    return (facts.label if facts is not None else None) or f"{kind} of shape {tuple(parameter.shape)}"


def share(parameter: torch.Tensor, gathered: torch.Tensor) -> None:
    """Let a gathered parameter have its shard's record, and the attributes that it lacks. Local operation."""
    if KEY in parameter.__dict__:
        gathered.__dict__[KEY] = parameter.__dict__[KEY]
    carry_over(parameter, gathered)


def attributes_of(parameter: torch.Tensor) -> dict[str, Any]:
    """What hangs on a parameter and its successors shall have, not what a tensor subclass keeps there for itself."""
    own: Collection[str] = _torch.OWN_ATTRIBUTES
    if not isinstance(parameter, DTensor) and type(parameter) is not torch.nn.Parameter:
        own = {*parameter.detach().__dict__, *_te.OF_THE_BYTES}  # of quantized and of grouped tensors
    return {key: value for key, value in parameter.__dict__.items() if key not in own}


def carry_over(
    old: torch.Tensor | dict[str, Any], new: torch.Tensor, *, leave_out: Collection[str] = ()
) -> None:
    """Give a parameter's successor what hangs on the parameter, unless the successor has it. Local operation.

    Args:
        old: The parameter, or the :func:`attributes_of` it before it was changed.
        new: What takes its place.
        leave_out: Names of attributes.
    """
    have = new.__dict__
    for key, value in (old if isinstance(old, dict) else attributes_of(old)).items():
        if key not in have and key not in leave_out:
            # Another model may go on with the old object, or an optimizer that knows of no change.
            have[key] = dataclasses.replace(value, replaced=None) if isinstance(value, Facts) else value


def successor(
    parameter: torch.Tensor, local: torch.Tensor, *, leave_out: Collection[str] = ()
) -> nn.Parameter:
    """A parameter like the given one around another local tensor, with all that hangs on it. Local operation.

    Args:
        parameter: Plain, or a DTensor.
        local: Shape as the parameter's local tensor, any dtype; this very object is the new local tensor.
        leave_out: Names of attributes that it shall not have.
    """
    if isinstance(parameter, DTensor):
        new = _torch.with_local(local, parameter, requires_grad=parameter.requires_grad)
    else:
        new = torch.nn.Parameter(local, requires_grad=parameter.requires_grad)
    carry_over(parameter, new, leave_out=leave_out)
    return new


class Place(NamedTuple):
    """Where a parameter is registered.

    Attributes:
        label: Full name, from the root.
        owner: Module that has it.
        name: Name there.
        parameter: The parameter.
    """

    label: str
    owner: nn.Module
    name: str
    parameter: nn.Parameter

    @property
    def path(self) -> str:
        """Full name of the owner."""
        return self.label.removesuffix(self.name).removesuffix(".")


def places_of(model: nn.Module, prefix: str = "", *, remove_duplicate: bool = True) -> Iterator[Place]:
    """Every place of a tree where a parameter is registered: tied parameters come once for each. Local operation.

    Args:
        model: The root. Owners' parameters may be replaced meanwhile.
        prefix: Of the labels.
        remove_duplicate: Whether modules that are registered several times come once.
    """
    for path, owner in model.named_modules(prefix=prefix, remove_duplicate=remove_duplicate):
        for name, parameter in list(owner._parameters.items()):
            if parameter is not None:
                yield Place(f"{path}.{name}" if path else name, owner, name, parameter)
