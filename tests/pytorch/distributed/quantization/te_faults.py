"""Bodies: faults of TE 2.20.2 on one device, shown on stock TE, then with te_fsdp's workaround.

docs/upstream.md describes them. A test that shows a fault fails when TE is mended: drop the workaround then.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Iterator
from typing import Any

import harness
import torch
from torch import nn

from quantization import models

SIZE = 128
#: Relative rms error of a GEMM of two tensors rounded to e4m3 and e5m2, see `bodies.tolerances`, with a margin.
QUANTIZED_GEMM = 0.15
#: Error of a GEMM with an unrelated weight of the same size: two independent directions.
UNRELATED = 0.5


def linear(recipe: Any, **kwargs: Any) -> nn.Module:
    """Return a stock linear layer with a quantized weight."""
    import transformer_engine.pytorch as te

    with te.quantized_model_init(recipe=recipe):
        kwargs = {"bias": False, "params_dtype": torch.bfloat16, "device": harness.device(), **kwargs}
        return te.Linear(SIZE, SIZE, **kwargs)


def recipe_of(name: str) -> Any:
    """Return delayed scaling with a short history, or current scaling."""
    from transformer_engine.common import recipe

    if name == "delayed":
        return recipe.DelayedScaling(amax_history_len=1, amax_compute_algo="most_recent")
    return recipe.Float8CurrentScaling()


class Probe:
    """Runs a layer forward and backward and measures the error of the input's gradient."""

    def __init__(self, layer: nn.Module, recipe: Any) -> None:
        self.layer, self.recipe = layer, recipe
        self.x, self.dy = (
            torch.randn(SIZE, SIZE, dtype=torch.bfloat16, device=harness.device()) for _ in range(2)
        )

    def __call__(self, weight: Any) -> float:
        """Return relative error of dx = dy @ weight, for the quantized weight that the layer holds."""
        import transformer_engine.pytorch as te

        expected = self.dy.float() @ harness.full(weight).float().to(harness.device())
        x = self.x.clone().requires_grad_()
        with te.autocast(enabled=True, recipe=self.recipe):
            y = self.layer(x)
        y.backward(self.dy)
        assert x.grad is not None
        return float((x.grad.float() - expected).norm() / expected.norm())


def after_fused_adam(bound: bool) -> dict[str, Any]:
    """Return the cached transpose of a delayed-scaling weight after a FusedAdam step, and the next backward's error."""
    from transformer_engine.pytorch.optimizers import FusedAdam

    import te_fsdp

    recipe = recipe_of("delayed")
    layer = linear(recipe)
    if bound:
        te_fsdp.set_device_mesh(layer)
    optimizer = FusedAdam(layer.parameters(), lr=0.5, master_weights=True)
    probe, weight = Probe(layer, recipe), layer.weight
    probe(weight)
    optimizer.step()
    valid = weight._transpose is not None and not weight._transpose_invalid
    same = valid and torch.equal(weight._transpose, weight._data.t())
    return {"marked valid": valid, "right": same, "error": probe(weight)}


def first_steps(bound: bool) -> list[float]:
    """Return error of the input's gradient in three steps under FSDP2 on two ranks that gathers once per step."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    import te_fsdp

    recipe = recipe_of("current")
    layer = linear(recipe)
    mesh = init_device_mesh(harness.device_type(), (2,), mesh_dim_names=("dp_shard",))
    if bound:
        te_fsdp.set_device_mesh(layer)
    fully_shard(layer, mesh=mesh, reshard_after_forward=False)
    probe = Probe(layer, recipe)
    with contextlib.nullcontext() if bound else stock_hooks():
        return [probe(layer.weight) for _ in range(3)]


@contextlib.contextmanager
def stock_hooks() -> Iterator[None]:
    """Restore TE's own all-gather hooks, in a process in which te_fsdp has bound a model before."""
    from te_fsdp.upstream import patches as _patches

    names = ("fsdp_pre_all_gather", "fsdp_post_all_gather")
    mended = [(cls, name, getattr(cls, name)) for cls in _patches.gathering_tensors() for name in names]
    try:
        for cls, name, hook in mended:
            setattr(cls, name, inspect.unwrap(hook))
        yield
    finally:
        for cls, name, hook in mended:
            setattr(cls, name, hook)


def as_strided() -> dict[str, bool]:
    """Run the identity ``as_strided`` on a float8 tensor with a transpose."""
    weight = linear(recipe_of("current")).weight.detach()
    weight.update_usage(rowwise_usage=True, columnwise_usage=True)
    result = torch.as_strided(weight, weight.shape, weight.stride())
    before = torch.equal(weight._transpose, weight._data.t())
    same = torch.equal(result._transpose, result._data.t())
    return {"right before": before, "marked valid": not result._transpose_invalid, "right": same}


def clone_shares_scale() -> bool:
    """Return whether a clone changes when new values are written into what it was cloned from."""
    weight = linear(recipe_of("current")).weight.detach()
    clone = weight.clone()
    before = clone.dequantize()
    weight.quantize_(torch.full_like(before, 100.0))
    return not torch.equal(clone.dequantize(), before)


def clones_that_change(recipes: list[str], strategy: str, meta: bool) -> list[str]:
    """Return recipes under which a clone of a weight, of its state dict or of a clone follows the next write."""
    import transformer_engine.pytorch as te

    import te_fsdp

    meshes, results = te_fsdp.Meshes.build(dp_shard=2, device_type=harness.device_type()), []
    for name in recipes:
        torch.manual_seed(0)
        with te.quantized_model_init(recipe=models.recipe_of(name)):
            device = "meta" if meta else harness.device()
            layer = te.Linear(SIZE, 2 * SIZE, bias=False, params_dtype=torch.bfloat16, device=device)
        te_fsdp.materialize(te_fsdp.fully_shard(layer, meshes, strategy=strategy), seed=0)
        with torch.no_grad():
            weight, before = layer.weight, _values(layer.weight)
            clones = [weight.detach().clone(), layer.state_dict()["weight"].clone()]
            clones.append(clones[0].clone())
            weight.mul_(0.3)
        assert not torch.equal(_values(weight), before)
        if not all(torch.equal(_values(clone), before) for clone in clones):
            results.append(name)
    return results


def _values(weight: torch.Tensor) -> torch.Tensor:
    local = getattr(weight, "_local_tensor", weight).detach()
    return local.dequantize().float() if hasattr(local, "get_metadata") else local.float()


def zero_weight(recipe: str) -> list[bool]:
    """Return whether a weight is zero after ``zero_``, and after zeros were copied into it."""
    weight, results = linear(models.recipe_of(recipe)).weight.detach(), []
    for write in (weight.zero_, lambda: weight.copy_(torch.zeros(weight.shape, device=harness.device()))):
        write()
        results.append(not weight.dequantize().any())
    return results


def can_copy_after_gather(bound: bool) -> bool:
    """Return whether a weight can be deep copied once FSDP2 has gathered it."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    import te_fsdp

    layer = linear(recipe_of("current"))
    if bound:
        te_fsdp.set_device_mesh(layer)
    mesh = init_device_mesh(harness.device_type(), (1,), mesh_dim_names=("dp_shard",))
    fully_shard(layer, mesh=mesh)
    layer.unshard()
    layer.reshard()
    try:
        copy.deepcopy(layer.weight._local_tensor)
    except TypeError as error:
        assert "ProcessGroup" in str(error)
        return False
    return True


def no_main_weights() -> bool:
    """Return whether FusedAdam without main weights changes a delayed-scaling weight at all."""
    from transformer_engine.pytorch.optimizers import FusedAdam

    recipe = recipe_of("delayed")
    layer = linear(recipe)
    optimizer = FusedAdam(layer.parameters(), lr=0.5)
    Probe(layer, recipe)(layer.weight)
    before = layer.weight._data.clone()
    optimizer.step()
    return not torch.equal(layer.weight._data, before)


def gradients_under_torch_autocast(kind: str, recipe: str | None, bound: bool) -> dict[str, bool]:
    """Return for each gradient whether it equals one process bit for bit, with the same batch on all ranks.

    FP32 weights under ``torch.autocast``, or weights that are quantized with ``recipe`` and used without it.
    """
    import transformer_engine.pytorch as te
    from torch.distributed.fsdp import fully_shard
    from transformer_engine.common import recipe as recipes

    import te_fsdp

    sizes = (64, 128) if kind == "LayerNormMLP" else (64, 64)
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        with te.quantized_model_init(
            enabled=recipe is not None, recipe=recipe and getattr(recipes, recipe)()
        ):
            layers = (
                getattr(te, kind)(*sizes, params_dtype=torch.float32, device=harness.device()) for _ in "ab"
            )
            models.append(torch.nn.Sequential(*layers))
    sharded, single = models
    if bound:
        te_fsdp.fully_shard(sharded, te_fsdp.Meshes.build(dp_shard=-1, device_type=harness.device_type()))
    else:
        fully_shard(sharded)
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(1)).to(harness.device())
    for model in models:
        with torch.autocast(harness.device_type(), torch.bfloat16):
            output = model(x)
        output.float().square().sum().backward()
    assert all(parameter.grad.any() for parameter in single.parameters())
    expected = dict(single.named_parameters())
    return {n: harness.full(p.grad).equal(expected[n].grad.cpu()) for n, p in sharded.named_parameters()}
