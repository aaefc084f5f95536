"""Bodies: loads into optimizers that are not passed, or have no separate main weights."""

from __future__ import annotations

from typing import Any

import harness
import torch
import torch.distributed as dist
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
            assert any("its main weights are set to the loaded weights" in note for note in loaded.notes)
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


def _three_layers(dtype: torch.dtype, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a sharded model, and AdamW without main weights."""
    import te_fsdp

    torch.manual_seed(seed)
    model = nn.Sequential(*(nn.Linear(16, 16, dtype=dtype, device=harness.device()) for _ in range(3)))
    te_fsdp.fully_shard(model, te_fsdp.Meshes.build(dp_shard=2, device_type=harness.device_type()))
    return model, torch.optim.AdamW(model.parameters(), lr=0.05)


def _step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Run a step with gradients that each dtype represents."""
    for parameter in model.parameters():
        assert isinstance(parameter, DTensor)
        local = torch.arange(parameter.to_local().numel(), device=harness.device()) % 7 / 8 - 0.25
        parameter.grad = DTensor.from_local(
            local.reshape(parameter.to_local().shape).to(parameter.dtype),
            parameter.device_mesh,
            parameter.placements,
            run_check=False,
        )
    optimizer.step()
    optimizer.zero_grad()


def _state(optimizer: torch.optim.Optimizer, key: str) -> list[torch.Tensor]:
    return [state[key].full_tensor().clone() for state in optimizer.state.values()]


def not_kept(directory: str, only_rank: int | None) -> dict[str, Any]:
    """Load main weights into optimizers that keep none: over BF16 weights (perhaps of one rank), and over FP32."""
    import te_fsdp
    from checkpointing.mistakes import error_of

    saved, optimizer = _three_layers(torch.bfloat16, SEED)
    te_fsdp.main_weights(saved, optimizer)
    _step(saved, optimizer)
    path = f"{directory}/a"
    te_fsdp.checkpoint.save(path, saved, optimizer)

    low, without = _three_layers(torch.bfloat16, SEED + 1)
    if only_rank not in (None, dist.get_rank()):
        te_fsdp.main_weights(low, without)
    before, states = [p.full_tensor().clone() for p in low.parameters()], len(without.state)
    outcome: dict[str, Any] = {"refused": error_of(lambda: te_fsdp.checkpoint.load(path, low, without))}
    outcome["changed"] = (
        [
            not torch.equal(p.full_tensor(), old) for p, old in zip(low.parameters(), before, strict=True)
        ].count(True)
        + len(without.state)
        - states
    )

    low, without = _three_layers(torch.bfloat16, SEED + 1)
    outcome["left"] = list(te_fsdp.checkpoint.load(path, low, without, strict=False).left)
    pairs = zip(low.parameters(), saved.parameters(), strict=True)
    outcome["weights"] = all(torch.equal(a.full_tensor(), b.full_tensor()) for a, b in pairs)
    _step(low, without)

    full, own = _three_layers(torch.float32, SEED + 1)
    loaded = te_fsdp.checkpoint.load(path, full, own)
    outcome["converted"] = loaded.converted["optimizer.state.0.weight.master_param"]
    outcome["keys"] = sorted({key for state in own.state.values() for key in state})
    # The same FP32 values and moments, so the same steps.
    for _ in range(2):
        mains = _state(optimizer, "master_param")
        outcome["same"] = all(
            torch.equal(p.full_tensor(), main) for p, main in zip(full.parameters(), mains, strict=True)
        ) and all(
            torch.equal(a, b)
            for key in ("exp_avg", "exp_avg_sq")
            for a, b in zip(_state(own, key), _state(optimizer, key), strict=True)
        )
        _step(full, own)
        _step(saved, optimizer)
    return outcome
