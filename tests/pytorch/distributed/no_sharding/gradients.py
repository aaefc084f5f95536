"""Bodies: unusual gradients of exempt parameters."""

from __future__ import annotations

import contextlib
from typing import Any

import harness
import torch
import torch.distributed as dist
from quantization.bodies import SEED, Stepper, batch_of
from quantization.weight_bytes import (
    HIDDEN,
    compare,
    compare_unsharded,
    gathered,
    named_weights,
    recipe_of,
    requantize,
    stock,
)
from torch import nn

from no_sharding.bodies import meshes_of


class Branches(nn.Module):
    """Each rank takes one of two branches of the same size; no rank takes the third."""

    def __init__(self) -> None:
        super().__init__()
        self.common, self.left, self.right, self.never = (
            nn.Linear(4, 4, device=harness.device()) for _ in range(4)
        )

    def forward(self, x: torch.Tensor, rank: int) -> torch.Tensor:
        branch = self.left if rank % 2 else self.right
        return branch(self.common(x))


def unused_on_some_ranks(how: str, *, mixed: bool = False) -> dict[str, Any]:
    """Compare gradients of parameters that only some ranks use with the mean over all ranks' losses in one process.

    Args:
        how: "exempt"; "filled": with zeros by te_fsdp; "neither", the negative control.
        mixed: compute in bf16, reduce in fp32, and let gradients wait for the second backward.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy

    import te_fsdp
    from te_fsdp.upstream import (
        fsdp2_units,
        fsdp2_unused as _fsdp2_unused,
    )

    torch.manual_seed(1)
    reference = Branches()
    torch.manual_seed(1)
    model = Branches()
    if how == "exempt":
        te_fsdp.fsdp_no_shard([model.left, model.right, model.never])
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if mixed else None
    te_fsdp.fully_shard(model, meshes_of({}), mp_policy=policy)
    if how == "neither":
        for group in fsdp2_units.fsdp_parameter_groups(model):
            before = fsdp2_units.record_of_group(group).listeners[0]
            before[:] = [
                each for each in before if getattr(each, "func", None) is not _fsdp2_unused._complete
            ]
    x = torch.randn(dist.get_world_size(), 3, 4, generator=torch.Generator().manual_seed(2)).to(
        harness.device()
    )
    for number in range(2):
        sum(reference(part, rank).square().mean() for rank, part in enumerate(x)).backward()
        with te_fsdp.no_sync(model) if mixed and not number else contextlib.nullcontext():
            model(x[dist.get_rank()], dist.get_rank()).square().mean().backward()
    gradients = {name: harness.full(p.grad) for name, p in model.named_parameters() if p.grad is not None}
    checks = harness.Comparisons()
    for name in ("common.weight", "left.weight", "right.weight"):
        expected = reference.get_parameter(name).grad / dist.get_world_size()
        if mixed:
            checks.close(
                name, gradients[name], expected, 3e-2, "bf16: values, weights and outputs of 2^-9 each"
            )
        else:
            checks.close(name, gradients[name], expected, 1e-5, "fp32: a few sums in a different order")
    never = gradients.get("never.weight")
    return {**checks.require(3), "never": None if never is None else float(never.abs().sum())}


def mean_without_fully_shard(average: bool) -> float:
    """Return the gradient of a parameter whose ranks have gradients 1 and 2, without fully_shard around it."""
    from te_fsdp.features.replicated_gradients import ReplicatedGradients
    from te_fsdp.layout import STORAGE
    from te_fsdp.plan import plan_storage, replicated_parameters

    meshes, model = meshes_of({}), nn.Linear(4, 4, bias=False, device=harness.device())
    rows = plan_storage(model, {"": STORAGE["no_shard", "no_shard"]})
    reduction = ReplicatedGradients(
        model, replicated_parameters(model, rows), meshes, units=[""], average=average
    )
    model(torch.full((1, 4), 1.0 + dist.get_rank(), device=harness.device())).sum().backward()
    assert not reduction.unreduced()
    return float(model.weight.grad[1, 2])


def long_sum(schedule: str, grads_dtype: str | None, comm_dtype: str | None = None) -> float:
    """Return the sum of 300 gradients of 1 / 256 each, of a bf16 parameter: 1.171875 exactly, 1 in bf16.

    Args:
        schedule: "plain" or "no_sync".
        grads_dtype: of accumulation.
        comm_dtype: on the wire.
    """
    import te_fsdp

    named = {None: None, "float32": torch.float32, "bfloat16": torch.bfloat16}
    model = nn.Linear(8, 8, bias=False, device=harness.device(), dtype=torch.bfloat16)
    nn.init.zeros_(model.weight)
    policy = te_fsdp.MixedPrecisionPolicy(
        main_params_dtype=None, main_grads_dtype=named[grads_dtype], grad_comm_dtype=named[comm_dtype]
    )
    te_fsdp.fully_shard(model, meshes_of({}), strategy="no_shard", precision=policy)
    x = torch.full((1, 8), 1 / 256, device=harness.device(), dtype=torch.bfloat16)
    for number in range(300):
        waits = schedule == "no_sync" and number < 299
        with te_fsdp.no_sync(model) if waits else contextlib.nullcontext():
            model(x).sum().backward()
    gradient = model.weight.grad
    assert gradient.dtype == (named[grads_dtype] or torch.bfloat16)
    assert (gradient == gradient.flatten()[0]).all()
    return float(gradient.flatten()[0])


def quantized(
    kind: str, recipe: str, axes: dict[str, int], exempt: list[str], group: str, fp32_gradients: bool = False
) -> dict[str, int]:
    """Compare bytes and scales of quantized exempt weights with one process at the start and after each of two steps.

    Args:
        kind: module kind of `quantization.models`.
        recipe: recipe name.
        axes: mesh sizes.
        exempt: names of modules and parameters.
        group: over whom their amax is reduced: "", "tp" or "weight".
        fp32_gradients: under a precision policy, which draws sharded weights from other values than `stock` does.

    Returns:
        Buffers compared at the start, in the steps, and weights in the forms that kernels read.
    """
    import te_fsdp
    from te_fsdp.records import binding_of

    meshes = meshes_of(axes)
    model = stock(kind, recipe, "meta", **meshes.te_kwargs())
    te_fsdp.fsdp_no_shard([_get(model, name) for name in exempt])
    te_fsdp.fully_shard(model, meshes, precision=te_fsdp.MixedPrecisionPolicy() if fp32_gradients else None)
    te_fsdp.materialize(model, seed=SEED)
    owner = model.get_submodule(
        exempt[0] if isinstance(_get(model, exempt[0]), nn.Module) else exempt[0].rpartition(".")[0]
    )
    expected = {"": None, "tp": meshes.tp, "weight": meshes.weight}[group]
    assert binding_of(owner).weight_mesh == expected, binding_of(owner).weight_mesh
    oracle = stock(kind, recipe)
    counts = {"init": compare(model, oracle, "init"), "steps": 0}
    dtypes = set()
    for name in exempt:
        result = _get(model, name)
        for parameter in result.parameters() if isinstance(result, nn.Module) else [result]:
            parameter.register_post_accumulate_grad_hook(lambda p: dtypes.add(p.grad.dtype))
    step = Stepper(model, recipe_of(recipe), meshes, False)
    te_fsdp.main_weights(model, step.optimizer)
    for number in range(2):
        step(*batch_of(HIDDEN))
        values = {
            name: gathered(module, own, step.optimizer.state[parameter]["master_param"])
            for name, module, own, parameter in named_weights(model)
        }
        requantize(oracle, values)
        counts["steps"] += compare(model, oracle, f"step {number + 1}")
    counts["gathered"] = compare_unsharded(model, oracle)
    assert dtypes == {torch.float32 if fp32_gradients else torch.bfloat16}, dtypes
    return counts


def _get(model: nn.Module, name: str) -> Any:
    result: Any = model
    for part in name.split(".") if name else ():
        result = getattr(result, part)
    return result
