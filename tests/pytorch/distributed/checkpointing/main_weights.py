"""Body: a load that is not given the optimizer, over quantized weights; against the same in one process."""

from __future__ import annotations

from typing import Any

import torch
from quantization.bodies import SEED, Stepper, batch_of
from quantization.weight_bytes import (
    HIDDEN,
    compare,
    gathered,
    meshes_of,
    named_weights,
    raise_on_all_ranks,
    recipe_of,
    stock,
)
from torch import nn
from torch.distributed.tensor import DTensor


def _adam(model: nn.Module, kind: str) -> Any:
    import te_fsdp

    if kind == "fused":
        from transformer_engine.pytorch.optimizers import FusedAdam

        optimizer = FusedAdam(model.parameters(), lr=0.05, master_weights=True)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    if kind == "cut":
        te_fsdp.shard_optimizer(optimizer)
    else:
        te_fsdp.main_weights(model, optimizer)
    return optimizer


def _sharded(recipe: str, meshes: Any, kind: str, seed: int) -> nn.Module:
    import te_fsdp

    model = stock("mlp_swiglu", recipe, "meta", **meshes.te_kwargs())
    te_fsdp.fully_shard(model, meshes, **({"outer_strategy": "optim"} if kind == "cut" else {}))
    te_fsdp.materialize(model, seed=seed)
    return model


def _set_zero_learning_rate(optimizer: Any) -> None:
    """Set learning rate and weight decay to 0, so that a step makes each parameter equal its main weight."""
    for group in optimizer.param_groups:
        group["lr"], group["weight_decay"] = 0.0, 0.0


def load_without_optimizer(cases: list[tuple[str, str, int, int]], directory: str) -> list[int]:
    """Load into a model whose optimizer has stepped, step with a learning rate of 0, compare raw buffers.

    Args:
        cases: Recipe, optimizer ("fused", "adamw", or "cut" by ``shard_optimizer``), dp_replicate, tp.
        directory: Shared by the ranks.

    Returns:
        Numbers of buffers that were compared.
    """
    import te_fsdp

    compared = []
    for number, (recipe, kind, dp_replicate, tp) in enumerate(cases):
        meshes, path = meshes_of(dp_replicate, tp), f"{directory}/{number}"
        te_fsdp.checkpoint.save(path, _sharded(recipe, meshes, kind, SEED + 1))
        model = _sharded(recipe, meshes, kind, SEED)
        step = Stepper(model, recipe_of(recipe), meshes, False)
        step.optimizer = _adam(model, kind)
        step(*batch_of(HIDDEN))
        one = stock("mlp_swiglu", recipe)  # in one process, with the full batch
        one_step = Stepper(one, recipe_of(recipe), None, False)
        one_step.optimizer = _adam(one, "adamw" if kind == "cut" else kind)
        one_step(*batch_of(HIDDEN))
        for other in (model, one):
            loaded = te_fsdp.checkpoint.load(path, other)
            assert any("its main weights are those of the loaded weights" in note for note in loaded.notes)
        compare(model, one, f"{recipe} {kind}: as loaded")
        for each in (step, one_step):
            _set_zero_learning_rate(each.optimizer)
            each(*batch_of(HIDDEN))
        compared.append(_same_values(model, one, f"{recipe} {kind}: after the next step"))
    return compared


def _same_values(model: nn.Module, one: nn.Module, when: str) -> int:
    """Compare by value, because the sign of a zero may differ. Return the number of weights."""
    with raise_on_all_ranks(when):
        whole = dict(one.named_parameters())
        weights = named_weights(model)
        for name, module, own, parameter in weights:
            value = DTensor.from_local(
                parameter._local_tensor.dequantize(dtype=torch.float32),
                parameter.device_mesh,
                parameter.placements,
                run_check=False,
                shape=parameter.shape,
                stride=parameter.stride(),
            )
            expected = whole[name].dequantize(dtype=torch.float32)
            assert torch.equal(gathered(module, own, value), expected), (when, name)
    return len(weights)
