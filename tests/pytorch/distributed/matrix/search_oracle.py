"""The oracle of the random search: stock TE in one process, with its own main weights where the policy has them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import harness
import torch
import torch.distributed as dist
from torch import nn

from matrix.bodies import EPSILON, LEARNING_RATE, SEED, _dense, batch
from matrix.configurations import Configuration
from matrix.models import width_of
from matrix.search_models import Stack

STEPS = 3
CLIP = 1.0


class Oracle:
    """The unsharded model of a configuration. Every rank builds it, rank 0 trains it.

    Attributes:
        initial: Initial parameters by name, in fp32; of main weights where there are some.
        missing: Names without gradient by step.
        path: Sum over the steps of the root mean square of what a step adds to a main weight.
    """

    path: dict[str, float]

    def __init__(self, drawn: Configuration, *, noise: float = 0.0) -> None:
        """Build the model. Collective.

        Args:
            drawn: The configuration.
            noise: Standard deviation of a relative error of the inputs, to see how far it grows.
        """
        self.drawn, self.noise = drawn, noise
        alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
        torch.manual_seed(SEED)
        weights = drawn.computes_in if drawn.weights == "fp32" else drawn.weights
        self.model = Stack(drawn, harness.device(), group=alone, weights=weights)
        if drawn.draws_fp32:
            torch.manual_seed(SEED)
            self.wide_values = Stack(drawn, harness.device(), group=alone, weights="fp32").state_dict()
        self.initial: dict[str, torch.Tensor] = {}
        self.mains: dict[str, nn.Parameter] = {}
        self.missing: dict[int, set[str]] = {}

    def start_from(self, wide: set[str], whole: set[str]) -> None:
        """Set initial values and main weights.

        Args:
            wide: Parameters that the sharded model has in fp32: they are their own main weights.
            whole: Parameters that are not sharded. They keep their dtype under a policy, as frozen ones do.
        """
        for name, parameter in self.model.named_parameters():
            keeps = name in wide or (self.drawn.outer == "optim" and not _is_quantized(parameter))
            keeps_dtype = name not in wide and (name in whole or not parameter.requires_grad)
            value = _dense(parameter)
            # On the CPU, torch 2.11 draws different values in bf16 and in fp32, from equal random states.
            if self.drawn.draws_fp32 and not keeps_dtype:
                with torch.no_grad():
                    parameter.copy_(self.wide_values[name])
                value = self.wide_values[name] if name in wide else _dense(parameter)
            self.initial[name] = value.clone()
            if keeps and parameter.dtype != torch.float32:
                options = {"requires_grad": parameter.requires_grad}
                self.mains[name] = nn.Parameter(value.clone(), **options)

    def train(self) -> dict[str, torch.Tensor]:
        """Return what the training shows: outputs, gradients, norms and updates by name. Collective."""
        from transformer_engine.pytorch.quantization import FP8GlobalStateManager

        from te_fsdp.upstream import te as _te

        drawn, seen = self.drawn, dict[str, torch.Tensor]()
        named = dict(self.model.named_parameters())
        optimizer = optimizer_of(drawn, trained(self.model, self.mains))
        trains, before, path = dist.get_rank() == 0, self.initial, dict[str, float]()
        for step in range(STEPS):
            self._run(step, seen)
            self.missing[step] = {name for name, p in named.items() if p.grad is None}
            for name, parameter in named.items():
                gradient = self.initial[name] if parameter.grad is None else parameter.grad
                seen[f"gradient {step} {name}"] = gradient.detach().float().clone()
            norm = torch.ones((), device=gradient.device)
            if drawn.clips and trains:
                norm = nn.utils.clip_grad_norm_(named.values(), CLIP)
            seen[f"norm {step}"] = norm.detach().float()
            if trains:
                self._step(optimizer)
                now = {name: main.clone() for name, main in self._mains_now(optimizer).items()}
                for name, main in now.items():
                    moved = main - before.get(name, self.initial[name])
                    path[name] = path.get(name, 0.0) + float(moved.square().mean().sqrt())
                before = now
                for parameter in named.values():
                    _te.drop_transpose(parameter)  # FusedAdam leaves a stale one on Hopper (docs/upstream.md)
        never = set.intersection(*self.missing.values())
        updates = {f"update {n}": m - self.initial[n] for n, m in before.items() if trains and n not in never}
        sent = [self.missing, updates, path]
        dist.broadcast_object_list(sent, 0)
        self.missing, updates, self.path = sent
        FP8GlobalStateManager.reset()  # else each of the two models would roll the other's amax histories
        return seen | updates

    def _run(self, step: int, seen: dict[str, torch.Tensor]) -> None:
        drawn, hidden, trains = self.drawn, width(self.drawn), dist.get_rank() == 0
        if trains and drawn.evaluates:
            evaluate(drawn, self.model, batch(hidden, "evaluation")[0])
        if trains and drawn.abandons:
            run(drawn, self.model, *batch(hidden, "abandoned"), 1, False)
            self.model.zero_grad()
        for micro in range(drawn.microbatches):
            x, target = batch(hidden, f"{step}.{micro}")
            if trains:
                x = x * (1 + self.noise * torch.randn_like(x)) if self.noise else x
                x = run(drawn, self.model, x, target, drawn.microbatches, uses_side(drawn, step))
            seen[f"output {step}.{micro}"] = x.float()

    def _step(self, optimizer: Any) -> None:
        named = dict(self.model.named_parameters())
        for name, main in self.mains.items():
            main.grad = None if named[name].grad is None else named[name].grad.float()
        optimizer.step()
        self.model.zero_grad()
        with torch.no_grad():
            for name, main in self.mains.items():
                named[name].copy_(main)

    def _mains_now(self, optimizer: Any) -> dict[str, torch.Tensor]:
        """Return the fp32 main weight of each trained parameter that has one."""
        results = {}
        for name, parameter in self.model.named_parameters():
            main = self.mains.get(name, parameter)
            if main.requires_grad and main.dtype != torch.float32:
                main = optimizer.state[main].get("master_param")
            if main is not None and main.dtype == torch.float32 and parameter.requires_grad:
                results[name] = main.detach()
        return results


def _is_quantized(parameter: torch.Tensor) -> bool:
    from te_fsdp.upstream import te as _te

    return _te.is_quantized(parameter)


def optimizer_of(drawn: Configuration, parameters: Iterable[torch.Tensor]) -> Any:
    """Return the drawn optimizer. Its steps are proportional to gradients, so that their bounds hold for updates."""
    from transformer_engine.pytorch.optimizers import FusedAdam

    if drawn.optimizer == "sgd":
        return torch.optim.SGD(parameters, lr=LEARNING_RATE / EPSILON, foreach=True)  # the default on GPUs
    if drawn.optimizer == "adamw":
        return torch.optim.AdamW(parameters, lr=LEARNING_RATE, eps=EPSILON, weight_decay=1e-3)
    options: dict[str, Any] = {"master_weights": True, "master_weight_dtype": torch.float32}
    return FusedAdam(parameters, lr=LEARNING_RATE, eps=EPSILON, **options)


def trained(model: nn.Module, mains: dict[str, nn.Parameter] | None = None) -> list[torch.Tensor]:
    """Return the parameters that an optimizer gets: main weights in place of the parameters that have some."""
    named = [(mains or {}).get(name, parameter) for name, parameter in model.named_parameters()]
    return [parameter for parameter in named if parameter.requires_grad]


def width(drawn: Configuration) -> int:
    """Return a hidden size in which every format finds full blocks."""
    return width_of(drawn.recipe, drawn.weights)


def uses_side(drawn: Configuration, step: int) -> bool:
    """Return whether the side branch is in the loss of a step."""
    return drawn.side == "in the second step" and step == 1


def run(
    drawn: Configuration, model: nn.Module, x: torch.Tensor, target: torch.Tensor, divisor: int, side: bool
) -> torch.Tensor:
    """Run forward and backward of a loss per token. Return the output."""
    x = x.detach().to(_dtype(drawn)).requires_grad_()  # for te.checkpoint
    output = model(x, side)
    loss = (output.float() - target.float()).square().mean() * output.shape[-1]
    (loss / divisor).backward()
    return output.detach()


def evaluate(drawn: Configuration, model: nn.Module, x: torch.Tensor) -> None:
    """Run a forward without gradients, as a validation between steps does."""
    model.eval()
    with torch.no_grad():
        model(x.to(_dtype(drawn)))
    model.train()


def _dtype(drawn: Configuration) -> torch.dtype:
    return torch.float32 if drawn.computes_in == "fp32" else torch.bfloat16
