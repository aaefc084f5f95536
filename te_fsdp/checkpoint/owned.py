"""A model's parameters and buffers with their owners, and the names that they have in the files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from te_fsdp import _te, _torch
from te_fsdp.checkpoint.experts import ExpertPlace, place_of, stacked_name
from te_fsdp.modules.shards import ShardInfo, shard_info
from te_fsdp.quantized.grouped import plain_of
from te_fsdp.sharding.state import settle

if TYPE_CHECKING:
    import torch
    from torch import nn

    from te_fsdp.checkpoint.entries import Entry

__all__ = ["Owned", "by_key", "clean_name", "owned_buffers", "owned_parameters"]


@dataclass(frozen=True)
class Owned:
    """A parameter, or a persistent buffer, with its owner.

    Attributes:
        fqn: Name in the model, without what wrappers add.
        module: Owner.
        name: Name in the owner.
        parameter: The parameter or buffer.
        expert: Where it lies in the tensor of all experts; ``None``: it is a tensor of the files by itself.
    """

    fqn: str
    module: nn.Module
    name: str
    parameter: torch.Tensor
    expert: ExpertPlace | None = None

    @property
    def key(self) -> str:
        """Name of the files' tensor: its own, or that of all experts."""
        return self.fqn if self.expert is None else stacked_name(self.fqn)

    def entry(self, entry: Entry) -> Entry:
        """An entry of this parameter's own tensor as one of the files' tensor; views of the same memory."""
        return entry if self.expert is None else self.expert.lift(entry)

    @property
    def local(self) -> torch.Tensor:
        """This rank's local tensor. Of TE's ``GroupedTensor`` the ordinary tensor over its memory."""
        local = _torch.local_of(self.parameter)
        plain = plain_of(local) if self.is_grouped else local  # type: ignore[bad-argument-type]
        return local if plain is local else plain.detach()

    def info(self) -> ShardInfo:
        """Where the local tensor lies in the original."""
        return self._info

    @cached_property
    def _info(self) -> ShardInfo:
        return shard_info(self.module, self.name, self.parameter, label=self.fqn)

    @property
    def is_grouped(self) -> bool:
        """Whether it holds the weights, or biases, of several experts."""
        return self.name in ("weight", "bias") and _te.kind_of(self.module) == "GroupedLinear"


def owned_parameters(model: nn.Module) -> list[Owned]:
    """Every parameter once, under its first name; FSDP2 units are resharded first. Local operation.

    New weights on their way are waited for.
    """
    settle(model)
    for module in model.modules():
        if _torch.is_fsdp_module(module):
            module.reshard()  # type: ignore[operator]
    found: dict[int, Owned] = {}
    for prefix, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and id(parameter) not in found:
                place = place_of(module, name)
                found[id(parameter)] = Owned(clean_name(prefix, name), module, name, parameter, place)
    return list(found.values())


def by_key(owned: Iterable[Owned]) -> dict[str, list[Owned]]:
    """Parameters by the files' tensor that they are, or are part of."""
    found: dict[str, list[Owned]] = {}
    for one in owned:
        found.setdefault(one.key, []).append(one)
    return found


def owned_buffers(model: nn.Module) -> Iterator[Owned]:
    """Every persistent buffer once, under its first name. Local operation."""
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and id(buffer) not in seen and _torch.is_persistent(module, name):
                seen.add(id(buffer))
                yield Owned(clean_name(prefix, name), module, name, buffer)


def clean_name(prefix: str, name: str) -> str:
    """Full name without the parts that wrappers add."""
    return _torch.without_wrappers(".".join(part for part in (prefix, name) if part))
