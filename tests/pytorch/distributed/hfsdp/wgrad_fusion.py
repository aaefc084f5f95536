"""Bodies: TE's fused accumulation of weight gradients under FSDP2, compared with one process without it."""

from __future__ import annotations

import contextlib
from typing import Any

import harness
import torch
from torch import nn

from hfsdp.bodies import CLOSE

HIDDEN, SEQUENCE, BATCH = 32, 8, 8


class Model(nn.Module):
    """Modules of every kind with a supported option, together with norms and biases."""

    def __init__(self, device: Any, dtype: torch.dtype, fuse: bool, **kwargs: Any) -> None:
        super().__init__()
        import transformer_engine.pytorch as te

        options = {"params_dtype": dtype, "device": device, "fuse_wgrad_accumulation": fuse, **kwargs}
        self.layer = te.TransformerLayer(
            HIDDEN,
            2 * HIDDEN,
            4,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            set_parallel_mode=True,
            fuse_qkv_params=True,
            **options,
        )
        options.pop("tp_group", None), options.pop("tp_size", None)
        self.last = te.Linear(HIDDEN, HIDDEN, **options)
        self.experts: Any = te.GroupedLinear(2, HIDDEN, HIDDEN, bias=False, **options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layer(x)
        if self.experts is not None:
            tokens = x.shape[0] * x.shape[1]
            x = self.experts(x.flatten(0, 1), [tokens // 2, tokens - tokens // 2]).view(x.shape)
        return self.last(x)


def training(
    axes: dict[str, int],
    microbatches: int = 1,
    contexts: bool = False,
    dtype: torch.dtype = torch.float32,
    strategy: str = "optim_grads_params",
    outer: str = "no_shard",
) -> dict[str, Any]:
    """Compare two SGD steps with one process.

    Returns:
        Comparisons; bytes of unsharded gradients that are left behind on weights after the last step.
    """
    import te_fsdp

    meshes = te_fsdp.Meshes.build(**axes, device_type=harness.device_type())
    model = Model("meta", dtype, True, **meshes.te_kwargs())
    te_fsdp.fully_shard(model, meshes, strategy=strategy, outer_strategy=outer)
    assert model.last.fuse_wgrad_accumulation
    te_fsdp.materialize(model, seed=4)
    torch.manual_seed(4)
    oracle = Model(harness.device(), dtype, False)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.5, momentum=0.9) for m in (model, oracle)]
    te_fsdp.shard_optimizer(optimizers[0])
    count = meshes.size("dp_replicate") * meshes.size("dp_shard")
    mesh = meshes.device_mesh
    place = mesh.get_local_rank("dp_replicate") * meshes.size("dp_shard") + mesh.get_local_rank("dp_shard")
    for step in range(2):
        for number in range(microbatches):
            generator = torch.Generator().manual_seed(10 * step + number)
            x = torch.randn(SEQUENCE, BATCH, HIDDEN, generator=generator).to(harness.device(), dtype)
            last = te_fsdp.microbatch(model, is_last=number == microbatches - 1)
            with last if contexts else contextlib.nullcontext():
                part = x.chunk(count, dim=1)[place].contiguous()
                model(part).float().square().mean().backward()
            oracle(x).float().square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    checks = harness.Comparisons()
    for (name, actual), expected in zip(model.named_parameters(), oracle.parameters(), strict=True):
        if "key_value" in name or name.endswith("qkv.bias"):
            continue  # the gradient of a key's bias is rounding noise
        checks.close(name, actual, expected, **CLOSE)
    left = [getattr(t, "main_grad", None) for m in model.modules() for t in gathered(m)]
    return {"compared": checks.require(8), "left": sum(b is not None for b in left)}


def gathered(module: nn.Module) -> list[torch.Tensor]:
    """Return local tensors of the parameters as TE saw them."""
    from te_fsdp.upstream import fsdp2_state as _fsdp2, fsdp2_units, torch_dtensor as _torch

    if not fsdp2_units.is_fsdp_module(module):
        return []
    return [_torch.local_of(parameter) for parameter, _ in _fsdp2.unsharded_parameters(module)]


def without_reduction(axes: dict[str, int]) -> str:
    """Negative control: TE adds to buffers that FSDP2 does not manage."""
    from te_fsdp.upstream import fsdp2_state as _fsdp2, torch_dtensor as _torch

    stock = _fsdp2.find_unreduced_gradient
    _fsdp2.find_unreduced_gradient = lambda managed, group: torch.zeros_like(
        _torch.local_of(managed._unsharded_param)
    )
    try:
        training(axes)
    except AssertionError as error:
        return str(error)
    finally:
        _fsdp2.find_unreduced_gradient = stock
    return ""


def error_outside_fsdp2() -> None:
    """Return the error of a fused module outside of FSDP2."""
    import te_fsdp

    meshes = te_fsdp.Meshes.build(device_type=harness.device_type())
    model = Model("meta", torch.float32, True)
    te_fsdp.fsdp_no_shard(model.last)
    try:
        te_fsdp.fully_shard(model, meshes)
    finally:
        assert model.last.fuse_wgrad_accumulation


def with_te_that_always_adds(axes: dict[str, int]) -> dict[str, int]:
    """Run :func:`compare_with_unfused` with a TE that always accumulates instead of overwriting a gradient."""
    from te_fsdp.features import wgrad_fusion

    stock = wgrad_fusion._MainGradBuffer.__bool__
    wgrad_fusion._MainGradBuffer.__bool__ = lambda self: False
    try:
        return compare_with_unfused(axes)
    finally:
        wgrad_fusion._MainGradBuffer.__bool__ = stock


def compare_with_unfused(
    axes: dict[str, int], microbatches: int = 1, policy: bool = False, recipe: str = "none"
) -> dict[str, int]:
    """Compare bf16 weights, plain or quantized, with and without the option, on the same mesh."""
    # New memory is filled with NaN, so that reads of uninitialized memory are detected.
    torch.use_deterministic_algorithms(True, warn_only=True)
    import transformer_engine.pytorch as te
    from quantization.models import recipe_of

    import te_fsdp

    meshes = te_fsdp.Meshes.build(**axes, device_type=harness.device_type())
    quantized = recipe != "none"
    chosen = recipe_of(recipe) if quantized else None
    models, optimizers = [], []
    for fuse in (True, False):
        with te.quantized_model_init(recipe=chosen) if quantized else contextlib.nullcontext():
            model = Model("meta", torch.bfloat16, fuse, **meshes.te_kwargs())
        te_fsdp.fully_shard(model, meshes, precision=te_fsdp.MixedPrecisionPolicy() if policy else None)
        models.append(te_fsdp.materialize(model, seed=4))
        optimizers.append(torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9))
        te_fsdp.main_weights(model, optimizers[-1])
    for step in range(2):
        for number in range(microbatches):
            generator = torch.Generator().manual_seed(10 * step + number + meshes.device_mesh.get_rank())
            x = torch.randn(2 * SEQUENCE, 4, HIDDEN, generator=generator).to(harness.device(), torch.bfloat16)
            for model in models:
                with (
                    te_fsdp.microbatch(model, is_last=number == microbatches - 1),
                    te.autocast(enabled=quantized, recipe=chosen),
                ):
                    loss = model(x).float().square().mean()
                loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    checks = harness.Comparisons()
    for (name, fused), plain in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        if (
            microbatches == 1 and harness.device_type() == "cpu"
        ):  # cuBLAS may choose a different kernel for sums
            checks.bitwise_equal(name, fused, plain)
        elif not name.endswith("qkv.bias"):
            why = (
                "bf16: without the option each microbatch's gradient is rounded before it is added; two steps"
            )
            checks.close(name, fused, plain, rtol=2**-7, why=why)
    return {"compared": checks.require(8)}


def compare_experts_with_unfused(axes: dict[str, int]) -> dict[str, Any]:
    """Compare experts over ep, fp32, in two steps with and without the option, on the same mesh.

    Negative control: the weights of the two runs differ after another step of one.
    """
    from experts.model import Mixture

    import te_fsdp

    meshes = te_fsdp.Meshes.build(**axes, device_type=harness.device_type())
    options = {"rows": 1, "bias": False, "single": False, "params_dtype": torch.float32, "device": "meta"}
    options |= meshes.te_kwargs()
    models = [
        Mixture(HIDDEN, 4, meshes=meshes, fuse_wgrad_accumulation=fuse, **options) for fuse in (True, False)
    ]
    for model in models:
        te_fsdp.fully_shard(model, meshes)
        te_fsdp.materialize(model, seed=4)
    assert models[0].up.fuse_wgrad_accumulation
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9) for model in models]

    def step(number: int, place: int) -> None:
        for micro in range(2):
            generator = torch.Generator().manual_seed(10 * number + micro + 100 * meshes.data_rank)
            x = torch.randn(32, HIDDEN, generator=generator).to(harness.device())
            with te_fsdp.microbatch(models[place], is_last=micro == 1):
                models[place](x, torch.arange(32) % 4).square().mean().backward()
        optimizers[place].step()
        optimizers[place].zero_grad()

    for number in range(2):
        step(number, 0)
        step(number, 1)
    checks = harness.Comparisons()
    for (name, fused), plain in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        checks.close(name, fused, plain, **CLOSE)
    step(2, 0)
    pairs = zip(models[0].parameters(), models[1].parameters(), strict=True)
    assert not any(torch.equal(harness.full(fused), harness.full(plain)) for fused, plain in pairs)
    return checks.require(4)


def compare_cast_weights_with_unfused(recipe: str) -> dict[str, Any]:
    """Compare bf16 weights that a recipe quantizes in each forward, with and without the option."""
    import transformer_engine.pytorch as te
    from quantization.models import recipe_of

    import te_fsdp

    meshes = te_fsdp.Meshes.build(dp_shard=-1, device_type=harness.device_type())
    chosen, models = recipe_of(recipe), []
    for fuse in (True, False):
        model = Model("meta", torch.bfloat16, fuse)
        model.experts = None
        models.append(te_fsdp.materialize(te_fsdp.fully_shard(model, meshes), seed=4))
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.5) for model in models]
    generator = torch.Generator().manual_seed(meshes.device_mesh.get_rank())
    for _ in range(2):
        x = torch.randn(2 * SEQUENCE, 4, HIDDEN, generator=generator).to(harness.device(), torch.bfloat16)
        for model, optimizer in zip(models, optimizers, strict=True):
            with te.autocast(enabled=True, recipe=chosen):
                loss = model(x).float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    checks = harness.Comparisons()
    for (name, fused), plain in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        if not name.endswith("qkv.bias"):
            why = "bf16: without the option gradients are rounded before they are sent"
            checks.close(name, fused, plain, rtol=2**-7, why=why)
    return checks.require(8)
