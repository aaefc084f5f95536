"""Bodies: steps of torch's optimizers with gradients of a different dtype than their parameters."""

from __future__ import annotations

from typing import Any

import harness
import torch

from precision.bodies import ADAM, BF16, FP32, HIDDEN, TOKENS, sharded


def main_weights_of_the_optimizer(options: list[dict[str, Any]], axes: dict[str, int]) -> dict[str, Any]:
    """Compare two steps of bf16 weights with fp32 gradients and main weights with torch's own on fp32 tensors.

    Args:
        options: Of AdamW, for each case.
        axes: Mesh sizes.

    Returns:
        The number of comparisons.
    """
    import te_fsdp

    meshes = te_fsdp.Meshes.build(**axes, device_type=harness.device_type())
    checks = harness.Comparisons()
    policy = {"main_params_dtype": None, "main_grads_dtype": "float32"}
    for kwargs in options:
        model = sharded(policy, meshes, meta=False, params_dtype=BF16)
        optimizer = torch.optim.AdamW(model.parameters(), **ADAM, **kwargs)
        te_fsdp.main_weights(model, optimizer)
        full = {name: harness.full(p).to(FP32) for name, p in model.named_parameters()}
        alone = torch.optim.AdamW(full.values(), **ADAM)
        for step in range(2):
            generator = torch.Generator().manual_seed(step)
            x = torch.randn((TOKENS, HIDDEN), generator=generator).to(harness.device(), BF16)
            model(x).square().mean().backward()
            for name, parameter in model.named_parameters():
                gradient = parameter.grad
                # The outer dtype, which determines operations on DTensors.
                assert gradient.dtype == gradient._spec.tensor_meta.dtype == FP32, (name, gradient._spec)
                full[name].grad = harness.full(gradient)
            optimizer.step()
            alone.step()
            optimizer.zero_grad()
            for name, parameter in model.named_parameters():
                main = optimizer.state[parameter]["master_param"]
                why = (
                    "the same fp32 operations on parts of another length: two of 2^-24 where vector code ends"
                )
                checks.close(f"{kwargs} main weight of {name}", harness.full(main), full[name], 1e-6, why)
                checks.bitwise_equal(f"{kwargs} {name}", parameter.to_local(), main.to_local().to(BF16))
    return checks.require(len(options) * 2 * 2 * 6)
