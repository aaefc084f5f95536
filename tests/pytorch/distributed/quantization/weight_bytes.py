"""Bodies: every shard of a quantized weight has the bytes of one process.

The oracle of each comparison is a stock TE model in one process, without te_fsdp: its weights are quantized by
TE itself from the full value, gathered from all ranks. Raw buffers are compared, not dequantized values.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import harness
import torch
import torch.distributed as dist
from torch import nn

from quantization.bodies import SEED, Stepper, batch_of, quantized_weights
from quantization.models import build

STEPS = 3  # delayed scaling reads a history of two
HIDDEN = 256


def steps_of(recipe: str) -> int:
    """Return how many steps show all of a recipe: the second has weights that the first has changed."""
    return STEPS if recipe.startswith("delayed") else 2


def width_of(recipe: str, shards: int) -> int:
    """Return a small hidden size of which every rank of a mesh gets full blocks.

    Args:
        recipe: Recipe name.
        shards: Number of FSDP2's shards of a tp-local weight; four only without tp.
    """
    if recipe == "block" or "/" in recipe:  # a hybrid weight is cut as float8-block is, whatever its formats
        return 512 if shards == 4 else 256
    return 256 if recipe in ("mxfp8", "nvfp4") else 128


def recipe_of(name: str) -> Any:
    """Return recipes as the other bodies use them; delayed scaling with a history of few steps."""
    from transformer_engine.common import recipe

    from quantization import models

    if name == "delayed, longer":  # than that of training
        return recipe.DelayedScaling(amax_history_len=5, amax_compute_algo="most_recent")
    if name == "delayed":
        return recipe.DelayedScaling(amax_history_len=2, amax_compute_algo="most_recent")
    return models.recipe_of(name)


def meshes_of(dp_replicate: int, tp: int) -> Any:
    """Return the job's meshes."""
    import te_fsdp

    return te_fsdp.Meshes.build(dp_replicate=dp_replicate, tp=tp, device_type=harness.device_type())


def sharded(
    kind: str,
    recipe: str,
    meshes: Any,
    *,
    reshard_after_forward: bool = True,
    fsdp: bool = True,
    strategy: str | None = None,
    **kwargs: Any,
) -> nn.Module:
    """Return a model with quantized weights, sharded but still on meta; without ``fsdp`` only over tp."""
    import te_fsdp

    model = stock(kind, recipe, "meta", **meshes.te_kwargs(), **kwargs)
    if not fsdp:
        te_fsdp.set_device_mesh(model, meshes.tp, meshes.weight)
        return model
    how = {"reshard_after_forward": reshard_after_forward} if strategy is None else {"strategy": strategy}
    return te_fsdp.fully_shard(model, meshes, **how)


def stock(kind: str, recipe: str, device: Any = None, *, hidden: int = HIDDEN, **kwargs: Any) -> nn.Module:
    """Return TE's own model with quantized weights; on the device, drawn from the seed, unless said otherwise."""
    import transformer_engine.pytorch as te

    if device is None:
        torch.manual_seed(SEED)
    with te.quantized_model_init(recipe=recipe_of(recipe), preserve_high_precision_init_val=True):
        return build(kind, hidden, device or harness.device(), **kwargs)


def training(
    kind: str,
    recipe: str,
    dp_replicate: int,
    tp: int,
    *,
    group: str = "weight",
    fsdp: bool = True,
    reshard_after_forward: bool = True,
    strategy: str | None = None,
    steps: int | None = None,
) -> dict[str, int]:
    """Compare bytes and scales at init and after each of some FusedAdam steps with one process.

    Args:
        kind: Module kind.
        recipe: Recipe name.
        dp_replicate: Copies of the model.
        tp: Tensor-parallel ranks.
        group: ``"weight"``; or as stock TE has it, ``"fsdp"`` from the start, ``"fsdp after init"``.
        fsdp: Whether FSDP2 takes part.
        reshard_after_forward: FSDP2's option.
        strategy: Of te_fsdp, instead.
        steps: How many; by default :func:`steps_of` them.

    Returns:
        Number of buffers compared at init, after the steps, and of gathered weights.
    """
    import te_fsdp

    meshes = meshes_of(dp_replicate, tp)
    hidden = width_of(recipe, meshes.size("dp_shard"))
    how = {"fsdp": fsdp, "reshard_after_forward": reshard_after_forward, "strategy": strategy}
    model = sharded(kind, recipe, meshes, hidden=hidden, **how)
    if group == "fsdp":
        use_stock_amax_group(model, meshes)
    te_fsdp.materialize(model, seed=SEED)
    oracle = stock(kind, recipe.removesuffix(", longer"), hidden=hidden)
    counts = {"init": compare(model, oracle, "init"), "steps": 0, "gathered": 0}
    if group == "fsdp after init":
        use_stock_amax_group(model, meshes)
    step = Stepper(model, recipe_of(recipe.removesuffix(", longer")), meshes, False)
    te_fsdp.main_weights(model, step.optimizer)
    compare_initial_main_weights(model, step.optimizer, oracle)
    batch = batch_of(hidden)
    for number in range(steps_of(recipe) if steps is None else steps):
        step(*batch)
        values = {
            name: gathered(module, own, step.optimizer.state[parameter]["master_param"])
            for name, module, own, parameter in named_weights(model)
        }
        requantize(oracle, values)
        counts["steps"] += compare(model, oracle, f"step {number + 1}")
        counts["gathered"] = compare_unsharded(model, oracle)
        if "/" in recipe:
            same_outputs(model, oracle, recipe, batch[0])
    return counts


def trainings(kind: str, recipes: Sequence[str], **options: Any) -> dict[str, int]:
    """Run :func:`training` under several recipes for two steps; return how many buffers each compared in a step."""
    return {name: training(kind, name, steps=2, **options)["steps"] // 2 for name in recipes}


def same_outputs(model: nn.Module, oracle: nn.Module, recipe: str, x: torch.Tensor) -> None:
    """Check that forward's unsharded weights have stock TE's size: no scale belongs to a different weight.

    The weights have the same bytes (compared elsewhere), so that the least-squares gain differs from one by the
    rounding of bf16 outputs alone: 2^-9 at most for each element, far less on average over all of them; with tp also
    by that of partial sums and of inputs that each rank quantizes for itself. A wrong scale was off by 1 to 4 %.
    """
    import transformer_engine.pytorch as te

    from te_fsdp.upstream import te as _te

    names, whole = {id(p): name for name, p in model.named_parameters()}, dict(oracle.named_parameters())
    for module in model.modules():
        for own, parameter in module._parameters.items():
            if parameter is not None and not _te.is_quantized(parameter._local_tensor):
                whole[names[id(parameter)]].data.copy_(gathered(module, own, parameter.detach()))
    with torch.no_grad(), te.autocast(enabled=True, recipe=recipe_of(recipe)):
        output, expected = model(x).double(), oracle(x).double()
    gain = float((output * expected).sum() / expected.square().sum())
    assert abs(gain - 1) < 2e-3, f"gain {gain}"


def compare_initial_main_weights(model: nn.Module, optimizer: Any, oracle: nn.Module) -> None:
    """Check that main weights start at the values that the stock model was drawn with, which are then dropped."""
    checks, drawn = harness.Comparisons(), dict(oracle.named_parameters())
    for name, module, own, parameter in named_weights(model):
        main = gathered(module, own, optimizer.state[parameter]["master_param"])
        checks.bitwise_equal(
            f"main weight of {name}", main, drawn[name].get_high_precision_init_val().float()
        )
        assert not hasattr(parameter._local_tensor, "_high_precision_init_val")
    checks.require(2)


def named_weights(model: nn.Module) -> list[tuple[str, nn.Module, str, torch.Tensor]]:
    """Return full name, owner, name and parameter of every quantized weight."""
    names = {id(p): n for n, p in model.named_parameters()}
    return [(names[id(p)], module, name, p) for module, name, p in quantized_weights(model)]


def gathered(module: nn.Module, name: str, value: torch.Tensor) -> torch.Tensor:
    """Return the unsharded original tensor of which every rank holds pieces, put together on each rank, bit for bit."""
    from te_fsdp.shard_info import shard_info
    from te_fsdp.upstream import torch_dtensor as _torch

    info, local = shard_info(module, name, value), _torch.local_of(value)
    full = torch.full(info.original_shape, -torch.inf, dtype=local.dtype, device=local.device)
    for box in info.boxes:
        full[box.original_slices()] = local[box.local_slices()]
    dist.all_reduce(full, op=dist.ReduceOp.MAX)  # pieces meet only minus infinity, and equal replicas
    assert torch.isfinite(full).all()
    return full


def draws_are_fp32() -> bool:
    """Return whether a bf16 tensor is drawn as an fp32 one and then rounded.

    Up to torch 2.11 the CPU draws it from few values instead: other ones, and the largest is the same in every part.
    """
    drawn = []
    for dtype in (torch.float32, torch.bfloat16):
        generator = torch.Generator(harness.device()).manual_seed(SEED)
        drawn.append(torch.empty(4096, dtype=dtype, device=harness.device()).normal_(generator=generator))
    return torch.equal(drawn[0].bfloat16(), drawn[1])


def requantize(oracle: nn.Module, values: dict[str, torch.Tensor]) -> None:
    """Run one process's step: scales from the amaxes so far, then one quantization of each weight."""
    import transformer_engine_torch as tex

    from te_fsdp.upstream import te as _te

    for module in oracle.modules():
        if _te.delayed_states(module) is not None:
            state = module.fp8_meta["scaling_fwd"]
            recipe, newest = state.recipe, state.amax_history[0].clone()
            algorithm, dtype = recipe.amax_compute_algo, forward_dtype(recipe)
            tex.fused_amax_and_scale_update_after_reduction(
                newest, [state.amax_history], [state.scale], algorithm, dtype, recipe.margin
            )
    weights = dict(oracle.named_parameters())
    for name, value in values.items():
        with torch.no_grad():
            weights[name].quantize_(value)


def forward_dtype(recipe: Any) -> Any:
    """Return TE's name of the format of weights."""
    from transformer_engine.pytorch.quantization import get_fp8_te_dtype

    return get_fp8_te_dtype(recipe, True)


def compare(model: nn.Module, oracle: nn.Module, when: str) -> int:
    """Compare every buffer of every quantized weight bit for bit; raise on all ranks; return their number."""
    whole = dict(oracle.named_parameters())
    checks = harness.Comparisons()
    count = 0
    with raise_on_all_ranks(when):
        for name, module, own, parameter in named_weights(model):
            count += same_buffers(checks, f"{when}: {name}", module, own, parameter, whole[name])
            owner = oracle.get_submodule(name.rpartition(".")[0])
            same_history(checks, f"{when}: {name}", module, own, owner)
    checks.require(count)
    return count


@contextmanager
def raise_on_all_ranks(when: str) -> Iterator[None]:
    """Raise a difference that one rank finds on all ranks. Collective over the world."""
    found: AssertionError | None = None
    try:
        yield
    except AssertionError as error:
        found = error
    failed = torch.tensor([found is not None], dtype=torch.int32, device=harness.device())
    dist.all_reduce(failed, op=dist.ReduceOp.MAX)
    if found is not None:
        raise found
    assert not int(failed), f"{when}: differs in bits on another rank"


def same_buffers(
    checks: harness.Comparisons, label: str, module: nn.Module, own: str, parameter: torch.Tensor, whole: Any
) -> int:
    """Compare the buffers of one weight: this rank's are its part of the whole one's."""
    from te_fsdp.shard_info import shard_info
    from te_fsdp.upstream import torch_dtensor as _torch

    local, info = _torch.local_of(parameter), shard_info(module, own, parameter)
    expected = {c.name: c for c in buffers_of(whole, label)}
    result = buffers_of(local, label)
    for component in result:
        other = expected[component.name]
        if component.block is None:
            checks.bitwise_equal(f"{label} {component.name}", component.tensor, other.tensor)
            continue
        for box in component.boxes(info.boxes, label):
            actual, theirs = component.tensor[box.local_slices()], other.tensor[box.original_slices()]
            checks.bitwise_equal(f"{label} {component.name}", actual.contiguous(), theirs.contiguous())
    if getattr(local, "_transpose", None) is not None and not local._transpose_invalid:
        checks.bitwise_equal(f"{label} transpose", local._transpose, local._data.t().contiguous())
    return len(result)


def buffers_of(local: Any, label: str) -> list[Any]:
    """Return the components of a quantized tensor; of a hybrid one those of both parts, by their own names."""
    from te_fsdp.quantized.components import Component, components_of

    if type(local).__name__ != "HybridQuantizedTensor":
        return components_of(local, label)
    results = []
    for way, part in (("row", local._rowwise_storage), ("column", local._columnwise_storage)):
        if type(part).__name__ == "IdentityTensor":
            results.append(Component(f"{way}: high precision", part._hp_data, (1, 1)))
        else:
            results += [Component(f"{way}: {c.name}", c.tensor, c.block) for c in components_of(part, label)]
    return results


def same_history(
    checks: harness.Comparisons, label: str, module: nn.Module, own: str, oracle: nn.Module
) -> None:
    """Compare delayed scaling's scale and amax history of a weight with one process's, on every rank."""
    from te_fsdp.upstream import te as _te

    if _te.delayed_states(module) is None:
        return
    index = module.param_init_meta[own].fp8_meta_index
    actual, expected = module.fp8_meta["scaling_fwd"], oracle.fp8_meta["scaling_fwd"]
    checks.bitwise_equal(f"{label} scale", actual.scale[index], expected.scale[index])
    rows = len(expected.amax_history)
    checks.bitwise_equal(
        f"{label} amax history", actual.amax_history[:rows, index], expected.amax_history[:, index]
    )
    assert not actual.amax_history[rows:].any(), "a longer history, before training cuts it"


def compare_unsharded(model: nn.Module, oracle: nn.Module) -> int:
    """Check the kernels' input after FSDP2's gather, the tp-local shard of the weight; return the number of weights."""
    from torch.distributed.fsdp import FSDPModule

    units = [m for m in model.modules() if isinstance(m, FSDPModule)]
    for unit in units:
        unit.unshard()
    checks, whole, count = harness.Comparisons(), dict(oracle.named_parameters()), 0
    for name, module, own, parameter in named_weights(model):
        same_buffers(checks, f"gathered: {name}", module, own, parameter, whole[name])
        count += 1
    for unit in units:
        unit.reshard()
    checks.require(count)
    return count


def use_stock_amax_group(model: nn.Module, meshes: Any) -> None:
    """Negative control: the amax group that stock TE's gather sets, FSDP2's shard axis."""
    from te_fsdp.quantized.shards import attach_amax_group
    from te_fsdp.records import binding_of

    for module in model.modules():
        binding = binding_of(module)
        if binding is not None:
            binding.weight_mesh = meshes.device_mesh["dp_shard"]
            for own_module, _, parameter in quantized_weights(module):
                if own_module is module:
                    attach_amax_group(parameter._local_tensor, binding)
