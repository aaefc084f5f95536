"""Bodies: train a mixture of experts on a mesh, compared with stock TE in one process that has all experts.

`matrix.bodies` describes the method: the reference first, then each rank compares its shards; parameters of experts
have global names. `matrix.tolerances` has the bounds: two GEMMs in a row.
"""

from __future__ import annotations

import re
from typing import Any

import harness
import torch
import torch.distributed as dist
from matrix.bodies import SEED, Check, Seen, _dense, _main, _optimizer
from parity.runs import check_full_precision, shards
from torch import nn

from experts import negative_controls
from experts.model import DROPPED, ROUTES, TOKENS, build, routes, width_of

STEPS = 3  # each with separate routes
CLIP = 1.0
_EXPERT = re.compile(r"(.* )?mixture\.(up|down)\.(weight|bias)\d+")


def training(
    axes: dict[str, int],
    recipe: str,
    weights: str,
    experts: int,
    bias: bool,
    route: str,
    *,
    single: bool = False,
    broken: str = "",
    steps: int = STEPS,
    **how: Any,
) -> dict[str, Any]:
    """Run one case; `how` are further arguments of fully_shard.

    Returns:
        Per kind of value the largest error as a share of its bound; how many gradients were exactly zero, as they
        must be for experts without tokens; the number of ranks.
    """
    import te_fsdp

    assert route in (*ROUTES, DROPPED)
    if weights == "fp32":
        check_full_precision()
    expected, originals = _reference(recipe, weights, experts, bias, route)
    if single:
        expected.tensors, originals = _stack_experts(expected.tensors), _stack_experts(originals)
    meshes = te_fsdp.Meshes.build(**axes, device_type=harness.device_type())
    model = build(recipe, weights, experts, meshes, "meta", bias=bias, single=single)
    with negative_controls.remove(broken):
        te_fsdp.fully_shard(model, meshes, **how)
        te_fsdp.materialize(model, seed=SEED)
        negative_controls.disable_divisor_check(broken, model)
        check = ExpertCheck(recipe, weights, "grouped", expected, originals)
        check.initial(model)
        if steps:
            _train(check, model, meshes, (recipe, weights, experts, route), steps)
        return {**check.settle(dist.get_world_size()), "zeros": check.zeros}


def _train(
    check: ExpertCheck, model: nn.Module, meshes: Any, data: tuple[str, str, int, str], steps: int
) -> None:
    """Train with comparisons."""
    import te_fsdp

    expected = check.expected
    before = {name: _dense(parameter).clone() for name, parameter, _ in shards(model)}
    optimizer = _optimizer(model)
    for step in range(steps):
        x, target, chosen = (_part(t, meshes) for t in batch(*data, step))
        output, loss, slope = _pass(model, x, target, chosen)
        dp = meshes.size("dp_replicate") * meshes.size("dp_shard")
        check.values(f"output {step}.0", output, _part(expected[f"output {step}.0"], meshes))
        slopes = _part(expected[f"input gradient {step}.0"], meshes)
        check.values(f"input gradient {step}.0", slope, slopes * dp)
        total = loss.clone()
        dist.all_reduce(total)
        check.loss(f"{step}.0", float(total) / dist.get_world_size(), output.numel() * dp)
        for name, parameter, info in shards(model):
            assert parameter.grad is not None, f"{name} has no gradient"
            check.shard(f"gradient {step}", name, parameter.grad, info)
        check.norm(step, te_fsdp.clip_grad_norm_(model, CLIP), expected[f"norm {step}"])
        optimizer.step()
        optimizer.zero_grad()
    for name, parameter, info in shards(model):
        check.shard("update", name, _main(optimizer, parameter) - before[name], info)


def batch(
    recipe: str, weights: str, experts: int, route: str, step: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the same global batch on every rank: input, target, and each token's expert."""
    generator = torch.Generator().manual_seed(100 + step)
    data = torch.randn((2, TOKENS, width_of(recipe, weights)), generator=generator).bfloat16()
    return *data.to(harness.device()), routes(route, experts, step).to(harness.device())


def _part(tensor: torch.Tensor, meshes: Any) -> torch.Tensor:
    """Return this rank's tokens: data parallelism shards them, tp does not."""
    replica = meshes.device_mesh.get_local_rank("dp_replicate")
    place = replica * meshes.size("dp_shard") + meshes.device_mesh.get_local_rank("dp_shard")
    return tensor.chunk(meshes.size("dp_replicate") * meshes.size("dp_shard"))[place].contiguous()


def _pass(
    model: nn.Module, x: torch.Tensor, target: torch.Tensor, chosen: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Run forward and backward: output, loss per token, gradient of the input."""
    x = x.detach().to(next(model.parameters()).dtype).requires_grad_()
    output = model(x, chosen)
    loss = (output.float() - target.float()).square().mean() * output.shape[-1]
    loss.backward()
    return output.detach(), loss.detach(), x.grad


def _reference(
    recipe: str, weights: str, experts: int, bias: bool, route: str
) -> tuple[Seen, dict[str, torch.Tensor]]:
    """Return the results of one process with stock TE, and the initial parameters. Collective over the world."""
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager

    from te_fsdp.upstream import te as _te

    torch.manual_seed(SEED)
    model = build(recipe, weights, experts, None, harness.device(), bias=bias)
    model.recipe = _without_reduction(model.recipe)
    before = {name: _dense(parameter).clone() for name, parameter in model.named_parameters()}
    seen: dict[str, torch.Tensor] = {}
    optimizer = _optimizer(model)
    trains = dist.get_rank() == 0
    for step in range(STEPS):
        x, target, chosen = batch(recipe, weights, experts, route, step)
        output = loss = slope = norm = None
        if trains:
            output, loss, slope = _pass(model, x, target, chosen)
        for name, parameter in model.named_parameters():
            seen[f"gradient {step} {name}"] = parameter.grad.clone() if trains else before[name]
        if trains:
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            optimizer.zero_grad()
            for parameter in model.parameters():
                _te.drop_transpose(parameter)  # FusedAdam leaves a stale one on Hopper
        seen[f"output {step}.0"] = output if trains else x
        seen[f"input gradient {step}.0"] = slope if trains else x
        seen[f"loss {step}.0"] = loss if trains else x.new_zeros(())
        seen[f"norm {step}"] = norm if trains else x.new_zeros(())
    for name, parameter in model.named_parameters():
        seen[f"update {name}"] = _main(optimizer, parameter) - before[name] if trains else before[name]
    result = Seen({name: tensor.detach().float().clone() for name, tensor in seen.items()})
    result.send()
    FP8GlobalStateManager.reset()  # else each of the two models would roll the other's amax histories
    return result, before


def _stack_experts(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return tensors of experts, one by one, as those of the one parameter of all."""
    results = {name: tensor for name, tensor in tensors.items() if not _EXPERT.fullmatch(name)}
    parts: dict[str, list[torch.Tensor]] = {}
    for name, tensor in tensors.items():
        if _EXPERT.fullmatch(name):
            parts.setdefault(name.rstrip("0123456789"), []).append(tensor)
    return results | {name: torch.stack(several) for name, several in parts.items()}


def _without_reduction(recipe: Any) -> Any:
    """Return the recipe for one rank alone, whose amaxes are those of the full batch already."""
    import dataclasses

    return (
        dataclasses.replace(recipe, reduce_amax=False) if recipe is not None and recipe.delayed() else recipe
    )


class ExpertCheck(Check):
    """Comparisons, with experts that had no token: their gradients are zero to the bit, and so are their updates."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.zeros, self.steps = 0, STEPS

    def shard(self, what: str, name: str, actual: torch.Tensor, info: Any) -> None:
        """Compare a parameter's gradient or update, box by box."""
        if float(self.expected[f"{what} {name}"].abs().max()) > 0:
            super().shard(what, name, actual, info)
            return
        self.zeros += 1
        left = float(_dense(actual).abs().sum())
        if left != 0:
            self.findings.failures.append(f"{what} {name}: {left} where one process has zeros")

    def norm(self, step: int, actual: torch.Tensor, expected: torch.Tensor) -> None:
        """Compare the norm of all gradients, within the bounds of gradients."""
        difference = abs(float(actual) - float(expected)) / float(expected)
        self._share(f"norm {step}", difference, self.gradient_bound)
