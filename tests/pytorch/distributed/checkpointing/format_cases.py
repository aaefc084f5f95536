"""Bodies: quantized weights where something does not fit: the recipe, the history, the blocks."""

from __future__ import annotations

from typing import Any

import torch

from checkpointing.bodies import first_steps
from checkpointing.format_models import QuantizedTraining
from checkpointing.formats import values_of


def unfit_delayed_scaling_state(directory: str) -> dict[str, Any]:
    """Load delayed scaling's state of other FP8 formats, and none: an error, or fitting statement and scales."""
    import json
    from unittest import mock

    import te_fsdp
    from te_fsdp.checkpoint import saving
    from te_fsdp.upstream import te as _te, torch_dtensor as _torch

    axes = {"dp_shard": 1}
    run = QuantizedTraining("delayed", axes, seed=0)
    run.steps(first_steps("delayed"))
    te_fsdp.checkpoint.save(f"{directory}/step", run.model, run.optimizer)
    other = QuantizedTraining("delayed", axes, seed=1)
    other.steps(1)
    for module in other.model.modules():
        for state in (_te.delayed_states(module) or {}).values():
            state.recipe = type(state.recipe)(fp8_format=_te_format("E4M3"), amax_history_len=4)
    try:
        te_fsdp.checkpoint.load(f"{directory}/step", other.model, other.optimizer)
        refused = ""
    except te_fsdp.CheckpointError as error:
        refused = str(error)
    left = te_fsdp.checkpoint.load(
        f"{directory}/step", other.model, other.optimizer, allow=["mlp", "attention.*"]
    )
    # A checkpoint that never had the state.
    with mock.patch.object(saving, "delayed_state", lambda model: ({}, {})):
        te_fsdp.checkpoint.save(f"{directory}/without", run.model, run.optimizer)
    fresh = QuantizedTraining("delayed", axes, seed=1)
    loaded = te_fsdp.checkpoint.load(f"{directory}/without", fresh.model, fresh.optimizer)
    wrong = []
    for (name, a), b in zip(run.model.named_parameters(), fresh.model.parameters(), strict=True):
        actual, expected = _torch.local_of(a), _torch.local_of(b)
        if _te.is_quantized(actual):
            scale = 1.0 / actual.get_metadata()["fp8_scale_inv"].reshape(())
            same = torch.equal(actual.dequantize(), expected.dequantize())
            wrong += [] if same and torch.equal(scale, _te.quantizer_of(expected).scale) else [name]
    return {"refused": refused, "left": json.dumps(left.left), "notes": loaded.notes, "wrong": wrong}


def _te_format(name: str) -> Any:
    from transformer_engine.common.recipe import Format

    return Format[name]


class Narrow(torch.nn.Module):
    """Weights of three blocks of 32 rows. Most meshes shard unquantized ones within blocks."""

    def __init__(self, device: Any, **tp: Any) -> None:
        super().__init__()
        import transformer_engine.pytorch as te

        options = {"params_dtype": torch.bfloat16, "device": device, "set_parallel_mode": True, **tp}
        self.mlp = te.LayerNormMLP(64, 96, activation="swiglu", **options)


def load_partial_blocks(
    axes: dict[str, int], directory: str, recipes: list[str], *, save: bool
) -> dict[str, Any]:
    """Load quantized weights of one process into bf16 ones whose shards begin and end inside blocks.

    Args:
        axes: This mesh.
        directory: Folder of the checkpoints.
        recipes: Formats.
        save: Whether to save, in one process, instead of loading.
    """
    import harness
    import transformer_engine.pytorch as te

    import te_fsdp
    from checkpointing.models import recipe_of
    from te_fsdp.shard_info import shard_info
    from te_fsdp.upstream import torch_dtensor as _torch

    meshes = te_fsdp.Meshes.build(**axes, device_type=harness.device_type())
    outcomes: dict[str, Any] = {}
    for recipe in recipes:
        path = f"{directory}/{recipe}"
        if save:
            with te.quantized_model_init(recipe=recipe_of(recipe)):
                model = te_fsdp.fully_shard(Narrow("meta"), meshes)
                te_fsdp.materialize(model, seed=0)
            te_fsdp.checkpoint.save(path, model)
            values = {n: values_of(_torch.local_of(p), n)[n] for n, p in model.named_parameters()}
            torch.save({n: v.cpu() for n, v in values.items()}, f"{path}.pt")
            continue
        model = te_fsdp.fully_shard(Narrow("meta", **meshes.te_kwargs()), meshes)
        te_fsdp.materialize(model, seed=1)
        loaded = te_fsdp.checkpoint.load(path, model)
        expected, wrong, cut = torch.load(f"{path}.pt", weights_only=True), [], 0
        for name, parameter in model.named_parameters():
            info = shard_info(model.mlp, name.removeprefix("mlp."), parameter)
            local, whole = parameter.to_local().cpu(), expected[name].to(parameter.dtype)
            cut += any(box.original[0] % 32 or box.sizes[0] % 32 for box in info.boxes)
            if not all(torch.equal(whole[b.original_slices()], local[b.local_slices()]) for b in info.boxes):
                wrong.append(name)
        outcomes[recipe] = {"wrong": wrong, "cut": cut, "converted": loaded.converted}
    return outcomes
