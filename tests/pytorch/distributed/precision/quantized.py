"""Bodies: the policy over quantized weights. Their main weights are the optimizer's, in fp32, whatever was drawn."""

from __future__ import annotations

from typing import Any

import harness
import torch
import torch.distributed as dist
from quantization.models import build
from quantization.weight_bytes import (
    HIDDEN,
    SEED,
    compare,
    gathered,
    meshes_of,
    named_weights,
    recipe_of,
    requantize,
    stock,
)
from torch import nn

from precision.bodies import ADAM, dtypes
from precision.oracle import Arithmetic

KIND, TOKENS, MICROBATCHES, STEPS = "mlp_swiglu", 32, 2, 2


def training(recipe: str, policy: dict[str, Any], meta: bool) -> dict[str, int]:
    """Compare two AdamW steps of two microbatches with quantized weights and a policy with one process.

    Gradients, main weights and the bytes of the quantized weights are equal, bit for bit.

    Returns:
        Numbers of comparisons: of buffers of quantized weights, and of other tensors.
    """
    import transformer_engine.pytorch as te

    import te_fsdp

    meshes = meshes_of(1, 1)
    model = stock(KIND, recipe, "meta") if meta else stock(KIND, recipe)
    options = te_fsdp.MixedPrecisionPolicy(**dtypes(policy))
    te_fsdp.fully_shard(model, meshes, precision=options, transport="nccl")  # the communication is recorded
    if meta:
        te_fsdp.materialize(model, seed=SEED)
    oracle = stock(KIND, recipe)
    main = _drawn(oracle, meta)
    fill(oracle, main)
    # On a GPU torch's loop over parameters multiplies by a number's reciprocal. Its foreach kernels divide.
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False, **ADAM)
    te_fsdp.main_weights(model, optimizer)
    twin = torch.optim.AdamW(main.values(), foreach=False, **ADAM)
    rule = Arithmetic(torch.float32, torch.bfloat16, torch.float32, options.grad_comm_dtype or torch.float32)
    counts = {"buffers": compare(model, oracle, "beginning"), "values": 0}
    generator = torch.Generator().manual_seed(4)
    for step in range(STEPS):
        batch = torch.randn((2, MICROBATCHES, dist.get_world_size(), TOKENS, 1, HIDDEN), generator=generator)
        x, seed = batch.bfloat16().to(harness.device())
        for number in range(MICROBATCHES):
            with te.autocast(recipe=recipe_of(recipe)):
                output = model(x[number, dist.get_rank()])
            output.backward(seed[number, dist.get_rank()])
        results = [_gradients(oracle, recipe, x[m], seed[m]) for m in range(MICROBATCHES)]
        checks = harness.Comparisons()
        for name, parameter in model.named_parameters():
            main[name].grad = rule.reduced([[rank[name] for rank in microbatch] for microbatch in results])
            checks.bitwise_equal(f"step {step} gradient {name}", parameter.grad, main[name].grad)
        optimizer.step()
        twin.step()
        for name, module, own, parameter in named_weights(model):
            kept = optimizer.state[parameter]["master_param"]
            checks.bitwise_equal(f"step {step} main {name}", gathered(module, own, kept), main[name].detach())
        fill(oracle, main)
        optimizer.zero_grad()
        counts["buffers"] += compare(model, oracle, f"step {step}")
        counts["values"] += checks.require(len(main) + len(named_weights(model)))["real"]
    return counts


def _drawn(oracle: nn.Module, meta: bool) -> dict[str, nn.Parameter]:
    """Return the initial main weights: unrounded fp32 draws, or the bf16 values that the model was built with."""
    torch.manual_seed(SEED)
    dtype = torch.float32 if meta else torch.bfloat16
    plain = build(KIND, HIDDEN, harness.device(), params_dtype=dtype)
    return {name: nn.Parameter(p.detach().float()) for name, p in plain.named_parameters()}


def fill(oracle: nn.Module, main: dict[str, nn.Parameter]) -> None:
    """Compute weights of one process from main weights: quantized once, or rounded."""
    quantized = {name for name, p in oracle.named_parameters() if hasattr(p, "_quantizer")}
    requantize(oracle, {name: main[name].detach() for name in quantized})
    with torch.no_grad():
        for name, parameter in oracle.named_parameters():
            if name not in quantized:
                parameter.copy_(main[name])


def _gradients(
    oracle: nn.Module, recipe: str, x: torch.Tensor, seed: torch.Tensor
) -> list[dict[str, torch.Tensor]]:
    """Return one process' gradients of each rank's part of a microbatch."""
    import transformer_engine.pytorch as te

    results = []
    for rank in range(x.shape[0]):
        oracle.zero_grad()
        with te.autocast(recipe=recipe_of(recipe)):
            output = oracle(x[rank])
        output.backward(seed[rank])
        results.append({name: p.grad.clone() for name, p in oracle.named_parameters()})
    return results
