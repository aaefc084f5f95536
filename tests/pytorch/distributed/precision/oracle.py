"""The policy's arithmetic in one process, to the bit.

One process holds the unsharded model, computes every rank's gradients one after the other, and rounds and adds them as
the policy says. With two ranks on an axis sums have two terms, so that their order does not matter and halves are
exact: every transport gives these very bits.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

Gradients = list[torch.Tensor]


@dataclass(frozen=True)
class Arithmetic:
    """Dtypes of one case, resolved: nothing is ``None``.

    Attributes:
        main: Of main weights.
        compute: Of compute weights and of what autograd gives.
        grads: Of accumulated gradients.
        wire: Of gradients on the wire.
        fp32_sum: Whether what came over the wire is added in fp32.
        each: Whether each microbatch is reduced, or only the last one.
        replicas: Size of ``dp_replicate``.
        outer_last: Whether ``dp_replicate`` is reduced over with the last microbatch only.
    """

    main: torch.dtype
    compute: torch.dtype
    grads: torch.dtype
    wire: torch.dtype
    fp32_sum: bool = False
    each: bool = True
    replicas: int = 1
    outer_last: bool = False

    def reduced(self, microbatches: list[list[torch.Tensor]]) -> torch.Tensor:
        """Return accumulated gradient of one parameter from those of each microbatch and rank."""
        if not self.each:
            microbatches = [
                [self._added([m[rank] for m in microbatches]) for rank in range(len(microbatches[0]))]
            ]
        if self.outer_last:
            parts = [[self._inner(half) for half in _halves(m, self.replicas)] for m in microbatches]
            partial = [
                sum((p[r].to(self.grads) for p in parts[1:-1]), parts[0][r].to(self.grads)) for r in range(2)
            ]
            last = [self._output(parts[-1][r]) + partial[r] for r in range(2)]
            return self._outer(last)
        return self._added([self._over_all(m) for m in microbatches])

    def _added(self, terms: list[torch.Tensor]) -> torch.Tensor:
        total = terms[0].to(self.grads)
        for term in terms[1:]:
            total = total + term.to(self.grads)
        return total

    def _over_all(self, ranks: list[torch.Tensor]) -> torch.Tensor:
        if self.replicas == 1:
            return self._inner(ranks).to(self.grads)
        return self._outer([self._output(self._inner(half)) for half in _halves(ranks, self.replicas)])

    def _output(self, inner: torch.Tensor) -> torch.Tensor:
        """Return dp_shard's reduced gradient as input of the reduction over dp_replicate: rounded, or as summed."""
        return inner.to(self.grads if self.fp32_sum else self.wire).to(self.grads)

    def _outer(self, terms: list[torch.Tensor]) -> torch.Tensor:
        """Reduce over dp_replicate: rounded to the sent dtype on the way there and, if they are summed here, back."""
        sent = [term.to(self.wire) for term in terms]
        mean = self._mean([s.float() for s in sent] if self.fp32_sum else sent)
        return mean.to(self.wire).to(self.grads)

    def _inner(self, ranks: list[torch.Tensor]) -> torch.Tensor:
        sent = [rank.to(self.grads).to(self.wire) for rank in ranks]
        return self._mean([s.float() for s in sent] if self.fp32_sum else sent)

    @staticmethod
    def _mean(terms: list[torch.Tensor]) -> torch.Tensor:
        return terms[0] if len(terms) == 1 else (terms[0] + terms[1]) / 2


def _halves(ranks: list[torch.Tensor], replicas: int) -> list[list[torch.Tensor]]:
    return [ranks[r * len(ranks) // replicas : (r + 1) * len(ranks) // replicas] for r in range(replicas)]


@dataclass
class Oracle:
    """The unsharded model, its main weights and their optimizer.

    Attributes:
        model: In the compute dtype; filled with rounded main weights before each use.
        arithmetic: The case.
        main: Main weights by name.
    """

    model: nn.Module
    arithmetic: Arithmetic
    main: dict[str, nn.Parameter] = field(default_factory=dict)
    optimizer: Any = None

    def __post_init__(self) -> None:
        if not self.main:
            for name, parameter in self.model.named_parameters():
                self.main[name] = nn.Parameter(parameter.detach().to(self.arithmetic.main).clone())

    def gradients(self, x: torch.Tensor, seed: torch.Tensor, fill: bool = True) -> dict[str, torch.Tensor]:
        """Return gradients of one rank's microbatch, as autograd gives them."""
        if fill:
            with torch.no_grad():
                for name, parameter in self.model.named_parameters():
                    parameter.copy_(self.main[name])
        self.model.zero_grad()
        self.model(x).backward(seed)
        return {name: p.grad.clone() for name, p in self.model.named_parameters() if p.grad is not None}

    def step(self, gradients: dict[str, torch.Tensor]) -> None:
        """Run one optimizer step; gradients are rounded to the main weights' dtype once."""
        for name, parameter in self.main.items():
            parameter.grad = gradients[name].to(parameter.dtype)
        self.optimizer.step()
