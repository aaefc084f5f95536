"""Bodies: 2-D MXFP8 weights, whose rowwise and columnwise data are one buffer in shards and all-gathers."""

from __future__ import annotations

import contextlib
from typing import Any
from unittest import mock

import harness
import torch
from harness.collectives import recorded
from torch import nn

from quantization import bodies
from quantization.alignment import pair
from quantization.models import build, recipe_of

STEPS = 3


@torch.no_grad()
def wide_range(weight: torch.Tensor) -> torch.Tensor:
    """Initialize a weight whose values differ by powers of two, so that the size of a block changes their rounding."""
    exponents = torch.rand_like(weight, dtype=torch.float32).mul_(-12).floor_()
    return torch.nn.init.normal_(weight, std=0.1).mul_(torch.exp2(exponents).to(weight.dtype))


class Recomputed(nn.Module):
    """A module whose forward runs again in backward."""

    def __init__(self, inner: nn.Module, recipe: str) -> None:
        super().__init__()
        self.inner, self.recipe = inner, recipe

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run the module in a checkpoint of torch."""
        import transformer_engine.pytorch as te

        def inner(x: torch.Tensor) -> torch.Tensor:
            with te.autocast(enabled=True, recipe=recipe_of(self.recipe)):
                return self.inner(x)

        return torch.utils.checkpoint.checkpoint(inner, x, use_reentrant=False)


def training(
    kind: str,
    axes: dict[str, int],
    *,
    recipe: str = "mxfp8_2d",
    planes: int = 1,
    reshard: bool = True,
    recompute: bool = False,
) -> dict[str, Any]:
    """Train a model with quantized weights.

    Args:
        kind: Of `models.build`; "columns": two linear layers that FSDP2 shards along columns.
        axes: The mesh.
        recipe: Name of the recipe.
        planes: 2: store and all-gather both directions, as for other MXFP8 weights.
        reshard: FSDP2's `reshard_after_forward`.
        recompute: Whether the forward runs again in backward.

    Returns:
        Losses, those of stock TE in one process, the uint8 bytes that a step all-gathers, the bytes of the quantized
        shards, and their values.
    """
    import te_fsdp
    from te_fsdp.upstream import te as _te, torch_dtensor as _torch

    meshes = te_fsdp.Meshes.build(**axes, device_type=harness.device_type())
    separate = mock.patch.object(_te, "row_for", lambda row, quantizer: row)
    hidden = 384 if kind == "columns" else 256
    with separate if planes == 2 else contextlib.nullcontext():
        torch.manual_seed(bodies.SEED)
        # Without biases all gathered bytes are those of quantized weights.
        plain = {"bias": False, "init_method": wide_range}
        reference = _model(kind, recipe, hidden, harness.device(), **plain)
        model = _model(kind, recipe, hidden, "meta", **plain, **meshes.te_kwargs())
        wrapped = Recomputed(model, recipe) if recompute else model
        te_fsdp.fully_shard(wrapped, meshes, reshard_after_forward=reshard)
        te_fsdp.materialize(wrapped, seed=bodies.SEED)
        compared = bodies.compare_with_reference(model, reference)
        step = bodies.Stepper(wrapped, recipe, meshes, False)
        batch = bodies.batch_of(hidden)
        losses = [step(*batch) for _ in range(STEPS)]
        with recorded() as sent:
            losses.append(step(*batch))
        shards = [_torch.local_of(parameter) for _, _, parameter in bodies.quantized_weights(model)]
        stored = {b.data_ptr(): b.untyped_storage().nbytes() for s in shards for b in _te.buffers_of(s)}
        values = [shard.dequantize(dtype=torch.float32) for shard in shards]
        expected = bodies.losses_of_one_process(reference, recipe, batch, STEPS + 1)
    return {
        "losses": losses,
        "reference": expected,
        "tolerances": bodies.tolerances(expected, hidden),
        "compared": compared,
        "weights": len(shards),
        "sent": sum(one.bytes for one in sent if one.kind == "all_gather" and one.dtype == "uint8"),
        "stored": sum(stored.values()),
        "values": values,
        "usages": [shard.get_usages() for shard in shards],
    }


def _model(kind: str, recipe: str, hidden: int, device: Any, **options: Any) -> nn.Module:
    import transformer_engine.pytorch as te

    if kind == "columns":
        return pair(recipe, hidden, 352, device, **options)
    with te.quantized_model_init(recipe=recipe_of(recipe)):
        return build(kind, hidden, device, **options)
