"""Attention by each backend of TransformerEngine on this machine. Sharded training equals unsharded training.

The emulation has the unfused one alone. On GPUs: fused (cuDNN), and flash where flash-attn is installed.
"""

from __future__ import annotations

import os

import harness
import pytest
import torch

import te_fsdp
from te_fsdp.upstream import te_modules as _te_modules

BACKENDS = {"flash": "NVTE_FLASH_ATTN", "fused": "NVTE_FUSED_ATTN", "unfused": "NVTE_UNFUSED_ATTN"}
HEADS, GROUPS, HEAD_DIM, SEQUENCE = 4, 2, 64, 128


def backend_environment(backend: str) -> dict[str, str]:
    """Return variables that leave TransformerEngine one backend."""
    return {variable: str(int(name == backend)) for name, variable in BACKENDS.items()}


def chosen_backend() -> dict:
    """Return the backend that TransformerEngine would choose."""
    return _te_modules.attention_backend_for(heads=HEADS, groups=GROUPS, head_dim=HEAD_DIM, sequence=SEQUENCE)


def trained(meshes: te_fsdp.Meshes | None, inputs: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return unsharded output and gradients of a layer by name, sharded over the meshes or stock in one process."""
    import transformer_engine.pytorch as te

    layer = te.TransformerLayer(
        HEADS * HEAD_DIM,
        256,
        HEADS,
        num_gqa_groups=GROUPS,
        bias=False,  # the gradient of a key's is zero but for rounding
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=torch.bfloat16,
        device="meta",
        **({} if meshes is None else {"set_parallel_mode": True, **meshes.te_kwargs()}),
    )
    if meshes is not None:
        te_fsdp.fully_shard(layer, meshes)
    te_fsdp.materialize(layer, seed=0)
    mine = inputs.detach().clone().requires_grad_()
    output = layer(mine)
    output.float().square().mean().backward()
    found = {name: harness.full(parameter.grad) for name, parameter in layer.named_parameters()}
    return {"output": output.detach(), "gradient of the input": mine.grad, **found}


def by_one_backend(backend: str) -> dict:
    """Compare the layer by one backend, sharded and stock, with the unfused one."""
    from transformer_engine.pytorch.attention.dot_product_attention import _attention_backends

    meshes = te_fsdp.Meshes.build(dp_shard=1, tp=2)
    torch.manual_seed(1)
    inputs = torch.randn(SEQUENCE, 2, HEADS * HEAD_DIM, dtype=torch.bfloat16).to(harness.device())
    stock, sharded = trained(None, inputs), trained(meshes, inputs)
    os.environ.update(backend_environment("unfused"))
    _attention_backends["backend_selection_requires_update"] = True
    unfused = trained(None, inputs)
    checks = harness.Comparisons()
    # Roundings to bf16 (2^-9 each) of scores, probabilities, their gradients and the products around them: some ten in
    # a row in each, of which attention's differ between backends, the sums over tp between sharded and stock.
    for name, expected in unfused.items():
        checks.close(
            f"{backend} against unfused: {name}", stock[name], expected, 2**-5, "ten roundings to bf16"
        )
        checks.close(f"{backend} sharded: {name}", sharded[name], stock[name], 2**-5, "ten roundings to bf16")
    wrong = unfused["output"].flip(0)
    with pytest.raises(AssertionError, match="relative error"):
        harness.assert_close("the control", stock["output"], wrong, 2**-5, "rows of other tokens")
    return checks.require(2 * len(unfused))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("backend", BACKENDS)
def test_attention_backends_equal_unfused(pool, backend):
    found = pool.run(chosen_backend, 1, env=backend_environment(backend), init_group=False)[0]
    if found["backend"] != backend:
        why = [text for text in found["reasons"] if text.lower().startswith(f"disabling {backend}")]
        pytest.skip(f"TransformerEngine has no {backend} attention here: {'; '.join(why) or 'not installed'}")
    pool.run(by_one_backend, 2, env=backend_environment(backend), backend=backend)
