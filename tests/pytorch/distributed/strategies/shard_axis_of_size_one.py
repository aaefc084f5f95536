"""Trainings over a shard axis of size 1, where each shard is the unsharded weight of its tp rank."""

from __future__ import annotations

import functools
from typing import Any

import harness
import torch

import te_fsdp
from te_fsdp.quantized import fsdp_hooks
from te_fsdp.upstream import fsdp2_patches as _fsdp2_patches, torch_dtensor as _torch

HIDDEN, TOKENS = 128, 32
OPTIONS = {"params_dtype": torch.bfloat16, "device": "meta", "set_parallel_mode": True}


def _buffers(parameter: torch.Tensor) -> list[torch.Tensor]:
    """Return the tensors with the values of a parameter."""
    from te_fsdp.upstream import te as _te

    local = _torch.local_of(parameter)
    return _te.value_buffers_of(local) if _te.is_quantized(local) else [local.detach()]


def _copied(arrange: Any, *args: Any) -> Any:
    """Return copies of a shard's buffers instead of these."""
    inputs, metadata = arrange(*args)
    return inputs, metadata._replace(buffers=tuple(map(torch.clone, metadata.buffers)))


def _losses(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, made: Any, handle: Any
) -> list[torch.Tensor]:
    """Return losses of each microbatch of three steps. The first removes the hook and moves high-precision weights."""
    import transformer_engine.pytorch as te

    losses = []
    for step in range(3):
        for _ in range(2):
            with te.autocast(enabled=made is not None, recipe=made):
                output = model(torch.randn(TOKENS, HIDDEN, dtype=torch.bfloat16, device=harness.device()))
            loss = output.float().square().mean()
            loss.backward()
            losses.append(loss.detach().cpu())
        optimizer.step()
        optimizer.zero_grad()
        handle.remove()
        if step == 0 and made is None:
            model._apply(torch.clone)
    return losses


def compare_shared_memory(
    recipe: str,
    lend: bool = True,
    strategy: str = "optim_grads_params",
    replicas: bool = False,
    **precision: Any,
) -> dict[str, Any]:
    """Train two steps of two microbatches, with weights moved to different memory in between.

    Args:
        recipe: TE's recipe of the weights, or ``"none"``.
        lend: Whether complete shards lend their memory, and pass their gradients on.
        strategy: te_fsdp's.
        replicas: Whether the ranks are replicas, and not ranks of tp.
        precision: Arguments of ``MixedPrecisionPolicy``.

    Returns:
        For each weight that a forward has read: whether it had a buffer of its shard, from which others are derived;
        and all values of the training.
    """
    import transformer_engine.pytorch as te
    from quantization.models import recipe_of

    made = None if recipe == "none" else recipe_of(recipe)
    meshes = te_fsdp.Meshes.build(dp_shard=1, **({"dp_replicate": 2} if replicas else {"tp": 2}))
    with te.quantized_model_init(enabled=made is not None, recipe=made):
        model = torch.nn.Sequential(
            *[te.LayerNormMLP(HIDDEN, 2 * HIDDEN, **OPTIONS, **meshes.te_kwargs()) for _ in "ab"]
        )
    stock, arrange = _fsdp2_patches.alias_single_rank_shards, fsdp_hooks._customize_gather
    if not lend:
        _fsdp2_patches.alias_single_rank_shards = lambda unit: None
        fsdp_hooks._customize_gather = functools.partial(_copied, arrange)
    try:
        policy = te_fsdp.MixedPrecisionPolicy(**precision) if precision else None
        te_fsdp.fully_shard(model, meshes, units=[te.LayerNormMLP], strategy=strategy, precision=policy)
    finally:
        _fsdp2_patches.alias_single_rank_shards = stock
    te_fsdp.materialize(model, seed=0)
    shards = {name: {b.data_ptr() for b in _buffers(p)} for name, p in model.named_parameters()}
    lent: dict[str, bool] = {}

    def look(module: torch.nn.Module, args: Any) -> None:
        for name, parameter in module.named_parameters():
            lent[name] = any(b.data_ptr() in shards[f"0.{name}"] for b in _buffers(parameter))

    handle = model[0].register_forward_pre_hook(look)  # after FSDP2's, which has gathered
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    te_fsdp.main_weights(model, optimizer)
    losses = _losses(model, optimizer, made, handle)
    fsdp_hooks._customize_gather = arrange
    return {
        "lent": lent,
        "losses": losses,
        "weights": [b.cpu() for p in model.parameters() for b in _buffers(p)],
    }


class _Add(torch.autograd.Function):
    """Of a matrix and a vector; both get the same memory for a gradient."""

    @staticmethod
    def forward(ctx: Any, matrix: torch.Tensor, vector: torch.Tensor) -> torch.Tensor:
        ctx.shape = matrix.shape
        return matrix.view(-1) + vector

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient.view(ctx.shape), gradient.view(-1)


class SharedGradients(torch.nn.Module):
    """One product, two parameters whose gradients share memory, and an unused one."""

    def __init__(self) -> None:
        super().__init__()
        self.product = torch.nn.Linear(8, 8, bias=False)
        self.matrix, self.vector = (torch.nn.Parameter(torch.ones(shape)) for shape in ((4, 2), (8,)))
        self.unused = torch.nn.Parameter(torch.ones(3))
        self.seen: dict[str, int] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for name, parameter in self.named_parameters():
            if not parameter._post_accumulate_grad_hooks:
                parameter.register_post_accumulate_grad_hook(
                    lambda p, name=name: self.seen.update({name: p.grad.data_ptr()})
                )
        return self.product(x) * _Add.apply(self.matrix, self.vector)


def reused_gradients(strategy: str) -> list[str]:
    """Run two backwards of replicas of complete shards. The second adds to the first's gradients.

    Returns:
        The parameters whose gradients are the very memory that autograd has made.
    """
    meshes = te_fsdp.Meshes.build(dp_replicate=2, dp_shard=1, device_type=harness.device_type())
    torch.manual_seed(1)
    model = SharedGradients().to(harness.device())
    torch.manual_seed(1)
    reference = SharedGradients().to(harness.device())
    te_fsdp.fully_shard(model, meshes, strategy=strategy, outer_strategy="optim")
    passed: list[str] = []
    sums = torch.zeros(8, device=harness.device())
    for number in range(2):
        x = torch.randn(3, 8, generator=torch.Generator().manual_seed(number)).to(harness.device())
        model(x).square().mean().backward()
        reference(x).square().mean().backward()
        sums = sums + reference.matrix.grad.view(-1)
        reference.matrix.grad = reference.vector.grad = None
        for name, parameter in model.named_parameters():
            held = parameter.grad is not None and _torch.local_of(parameter.grad).data_ptr()
            if number == 0 and held and held == model.seen.get(name):
                passed.append(name)
    checks = harness.Comparisons()
    for name, parameter in model.named_parameters():
        if name == "unused":
            assert parameter.grad is None, name  # as on one process
            continue
        gradient = _torch.local_of(parameter.grad)
        if name == "product.weight":
            checks.bitwise_equal(name, gradient, reference.get_parameter(name).grad)
        else:  # torch itself adds to memory that two parameters share, twice
            checks.bitwise_equal(name, gradient.view(-1), sums)
    checks.require(3)
    return passed
