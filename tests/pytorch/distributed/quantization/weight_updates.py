"""Bodies: quantized weights that a step updates in one batch, compared bit for bit with TE's updates."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

import harness
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from quantization.bodies import SEED, Stepper, batch_of, quantized_weights
from quantization.weight_bytes import HIDDEN, STEPS, buffers_of, recipe_of, stock


def trained(
    recipe: str, optimizer: str, meshes: dict[str, int], together: bool, *, steps: int = STEPS, **options: Any
) -> tuple[nn.Module, Any, Counter[str]]:
    """Return a sharded model after some steps.

    Args:
        recipe: Name of the recipe of its weights.
        optimizer: ``"fused"``, TE's FusedAdam with its own main weights, or ``"adamw"``, torch's with te_fsdp's.
        meshes: Sizes of axes.
        together: Whether te_fsdp writes the weights; else each is quantized by itself, as TE does.
        steps: How many.
        **options: ``fully_shard``'s.

    Returns:
        Model, optimizer, and what the last step did: :func:`counted`.
    """
    import te_fsdp

    kind = options.pop("kind", "transformer")
    built = te_fsdp.Meshes.build(**meshes, device_type=harness.device_type())
    model = stock(kind, recipe, "meta", **built.te_kwargs())
    te_fsdp.fully_shard(model, built, **options)
    te_fsdp.materialize(model, seed=SEED)
    step = Stepper(model, recipe_of(recipe), built, False)
    if optimizer == "adamw":
        step.optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.1)
    te_fsdp.main_weights(model, step.optimizer)
    if options.get("outer_strategy") == "optim":
        te_fsdp.shard_optimizer(step.optimizer)
    counts: Counter[str] = Counter()
    with contextlib.nullcontext() if together else _one_by_one():
        for number in range(steps):
            torch.manual_seed(number)  # NVFP4 rounds gradients by chance
            last = number == steps - 1
            with counted(counts, step.optimizer) if last else contextlib.nullcontext():
                step(*batch_of(HIDDEN))
    te_fsdp.release_params(model)
    return model, step.optimizer, counts


@contextlib.contextmanager
def _one_by_one() -> Iterator[None]:
    """Write weights as TE does: quantize_ of each, which FusedAdam calls for its own main weights itself."""
    from te_fsdp import lifecycle
    from te_fsdp.features import main_params
    from te_fsdp.features.hfsdp import optimizer_shards
    from te_fsdp.features.main_weights import use_fused_adam_master_weights
    from te_fsdp.upstream import te as _te

    def write_all(pairs: Any) -> None:
        for local, value in pairs:
            local.quantize_(value) if _te.is_quantized(local) else local.copy_(value)

    hooks = lifecycle._step_hooks()
    places = [
        (main_params, "quantize_into"),
        (optimizer_shards, "quantize_into"),
        (optimizer_shards, "scales_of_rows"),
    ]
    places.append((hooks, "before"))
    kept = [getattr(*place) for place in places]
    without = tuple(function for function in hooks.before if function is not use_fused_adam_master_weights)
    assert len(without) < len(hooks.before)
    no_scales = lambda cut: {}  # noqa: E731
    for place, new in zip(places, [write_all, write_all, no_scales, without], strict=True):
        setattr(*place, new)
    try:
        yield
    finally:
        for place, old in zip(places, kept, strict=True):
            setattr(*place, old)


@contextlib.contextmanager
def counted(counts: Counter[str], optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Count what an optimizer's step does, the last thing within the context.

    ``reductions`` to the maximum; ``casts`` into a quantized format; calls of FusedAdam's kernel for plain parameters,
    by the dtypes of parameters and gradients.
    """
    import transformer_engine_torch as tex
    from transformer_engine.pytorch.optimizers import FusedAdam

    adam, quantize, reduce = tex.multi_tensor_adam, tex.quantize, dist.all_reduce

    def updated(chunk: int, flag: Any, lists: Any, *args: Any) -> Any:
        counts[f"{lists[1][0].dtype} by {lists[0][0].dtype}"] += 1
        return adam(chunk, flag, lists, *args)

    def cast(*args: Any) -> Any:
        counts["casts"] += 1
        return quantize(*args)

    def reduced(tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM, **options: Any) -> Any:
        counts["reductions"] += op == dist.ReduceOp.MAX
        return reduce(tensor, op=op, **options)

    def begin(*_: Any) -> None:
        tex.quantize, dist.all_reduce = cast, reduced

    hook = optimizer.register_step_pre_hook(begin)
    if isinstance(optimizer, FusedAdam):
        optimizer.multi_tensor_adam = updated
    try:
        yield
    finally:
        hook.remove()
        tex.quantize, dist.all_reduce = quantize, reduce


def compare_with_one_by_one(recipe: str, optimizer: str, meshes: dict[str, int], **options: Any) -> int:
    """Compare trainings with weights written together and one by one, bit for bit.

    Returns:
        Number of quantized weights compared.
    """
    model, ours, _ = trained(recipe, optimizer, meshes, True, **options)
    other, expected, _ = trained(recipe, optimizer, meshes, False, **options)
    checks, count = harness.Comparisons(), 0
    for (name, one), two in zip(model.named_parameters(), other.parameters(), strict=True):
        for key, state in ours.state[one].items():
            if isinstance(state, torch.Tensor):
                checks.bitwise_equal(f"{name} {key}", _local(state), _local(expected.state[two][key]))
        actual, their = _local(one), _local(two)
        if not hasattr(actual, "_quantizer"):
            checks.bitwise_equal(name, actual.detach(), their.detach())
            continue
        for component, twin in zip(buffers_of(actual, name), buffers_of(their, name), strict=True):
            checks.bitwise_equal(f"{name} {component.name}", component.tensor, twin.tensor)
        count += 1
    checks.require(2)
    return count


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def cost(recipe: str, optimizer: str, meshes: dict[str, int], **options: Any) -> dict[str, Any]:
    """Return the counts of a later step (:func:`counted`), of quantized weights, and of transposes of shards."""
    model, _, counts = trained(recipe, optimizer, meshes, True, steps=2, **options)
    transposes = [getattr(_local(p), "_transpose", None) for _, _, p in quantized_weights(model)]
    return {**counts, "weights": len(transposes), "transposes": sum(t is not None for t in transposes)}


def mixed_gradients() -> dict[str, Any]:
    """Train with FusedAdam an FP8 weight with a bf16 gradient and fp32 parameters: one dtype per kernel call.

    Also: a step that raises leaves parameters, and their state, where they are looked for.
    """
    import transformer_engine.pytorch as te
    from transformer_engine.pytorch.optimizers import FusedAdam

    import te_fsdp

    with te.quantized_model_init(recipe=recipe_of("current")):
        linear = te.Linear(64, 64, bias=False, params_dtype=torch.bfloat16, device="meta")
    model = nn.Sequential(linear, nn.Linear(64, 64, device="meta"))
    te_fsdp.fully_shard(model, te_fsdp.Meshes.build(device_type=harness.device_type()))
    te_fsdp.materialize(model, seed=SEED)
    optimizer = FusedAdam(model.parameters(), master_weights=True)
    weight = model[0].weight
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter, dtype=parameter.dtype)
    counts: Counter[str] = Counter()
    with counted(counts, optimizer):
        optimizer.step()
    optimizer.param_groups[0]["betas"] = None  # the step raises after main weights were put in place
    with contextlib.suppress(TypeError):
        optimizer.step()
    keys = set(optimizer.state_dict()["state"][0])
    held = optimizer.param_groups[0]["params"][0] is weight
    return {**counts, "state": sorted(keys), "held": held, "gradient": str(weight.grad.dtype)}
