"""Bodies: changes of a loop that graphs record, in comparison with the eager loop."""

from __future__ import annotations

from typing import Any

import harness
import torch
from torch import nn

from graphed.program_bodies import HIDDEN, STEPS, _batch, _compared, _Model, _outcome, _recording


class ReplacingMomentum(torch.optim.Optimizer):
    """Momentum that is a new tensor after each step. A replay would read the old one."""

    def __init__(self, parameters: Any, lr: torch.Tensor) -> None:
        super().__init__(parameters, {"lr": lr, "capturable": True})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[bad-override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    state["momentum"] = state.get("momentum", 0) * 0.9 + parameter.grad
                    parameter -= group["lr"] * state["momentum"]


def _adamw(parameters: Any, lr: torch.Tensor) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=lr, fused=True, capturable=True)


def _fused_adam(parameters: Any, lr: torch.Tensor) -> torch.optim.Optimizer:
    from transformer_engine.pytorch.optimizers import FusedAdam

    return FusedAdam(parameters, lr=lr, capturable=True)


def first_updates(kind: str, optimizer: str) -> list[Any]:
    """Update a parameter for the first time in a step that is recorded: losses and weights have the same bits.

    Args:
        kind: Change after the first step. "frozen": the parameter was frozen. "cleared": the optimizer's states are
            cleared. "added": the parameter is a new one of the optimizer. "": no change.
        optimizer: "adamw", "fused_adam" or "replaces".

    Returns:
        Why steps of the optimizer run eagerly, and the numbers of recordings and of replays.
    """
    import te_fsdp

    build = {"adamw": _adamw, "fused_adam": _fused_adam, "replaces": ReplacingMomentum}[optimizer]
    meshes = te_fsdp.Meshes.build(device_type=harness.device_type())

    def train(graphs: bool) -> tuple[dict[str, torch.Tensor], list[Any]]:
        model, step, values = _Model(), None, {}
        te_fsdp.fully_shard(model, meshes, units="blocks.*")
        te_fsdp.materialize(model, seed=0)
        late = model.blocks[1].mlp.fc1_weight
        late.requires_grad_(kind not in ("frozen", "added"))
        rate = torch.tensor(0.01, device=harness.device())
        updated = build([p for p in model.parameters() if kind != "added" or p is not late], rate)

        def forward_backward(x: torch.Tensor) -> torch.Tensor:
            loss = model(x).square().mean()
            loss.backward()
            return loss

        if graphs:
            with _recording():
                step = te_fsdp.graphed_step(model, updated, forward_backward, warmup=1)
        for number in range(STEPS):
            if number == 1:
                late.requires_grad_(True)
                if kind == "cleared":
                    updated.state.clear()
                if kind == "added":
                    updated.add_param_group({"params": [late], "lr": rate})
            if step is None:
                values[f"loss {number}"] = forward_backward(_batch(number)).detach()
                updated.step()
                updated.zero_grad()
            else:
                values[f"loss {number}"], _ = step(_batch(number))
        values |= {name: harness.full(p.detach()) for name, p in model.named_parameters()}
        if step is None:
            return values, []
        assert not step.why_eager, step.why_eager
        return values, [step.why_step_eager, step.recordings, step.replays]

    return _compared(train)


def frozen_weight() -> str:
    """Freeze the weight of a trained bias before the step that is recorded; return the error of this step."""
    import transformer_engine.pytorch as te

    import te_fsdp

    model = nn.Sequential(te.Linear(HIDDEN, HIDDEN, device="meta"), te.Linear(HIDDEN, HIDDEN, device="meta"))
    te_fsdp.fully_shard(model, te_fsdp.Meshes.build(device_type=harness.device_type()))
    te_fsdp.materialize(model, seed=0)
    optimizer = _adamw(model.parameters(), torch.tensor(0.01, device=harness.device()))

    def forward_backward(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward()
        return loss

    with _recording():
        step = te_fsdp.graphed_step(model, optimizer, forward_backward, warmup=1)
    step(_batch(0))
    model[1].weight.requires_grad_(False)
    try:
        step(_batch(1))
    except te_fsdp.GradientError as error:
        return str(error)
    return ""


def quantized_forwards(recipe: str) -> list[int]:
    """Replay two backwards of units whose quantized weights are transposed for them: the same bits.

    Returns:
        The numbers of recordings and of replays.
    """
    import transformer_engine.pytorch as te
    from transformer_engine.common import recipe as recipes

    import te_fsdp

    chosen = getattr(recipes, recipe)()
    meshes = te_fsdp.Meshes.build(device_type=harness.device_type())

    def train(graphs: bool) -> tuple[dict[str, torch.Tensor], list[int]]:
        with te.quantized_model_init(enabled=True, recipe=chosen):
            model = _Model(torch.bfloat16)
        te_fsdp.fully_shard(model, meshes, units="blocks.*", transport="copy_engine")
        te_fsdp.materialize(model, seed=0)
        optimizer, values, graphed = torch.optim.SGD(model.parameters(), lr=0.1), {}, None
        te_fsdp.main_weights(model, optimizer)
        if graphs:
            with _recording():
                graphed = te_fsdp.graphed_units(model, warmup=1)
        for number in range(STEPS):
            with te.autocast(enabled=True, recipe=chosen):
                loss = model(_batch(number, 128).bfloat16()).float().square().mean()
                if number >= 3:
                    loss = loss + model(_batch(100 + number, 128).bfloat16()).float().square().mean()
            loss.backward()
            values[f"loss {number}"] = loss.detach()
            optimizer.step()
            optimizer.zero_grad()
        return _outcome(model, values, graphed)

    return _compared(train)
