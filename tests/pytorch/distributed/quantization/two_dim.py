"""Bodies: 2-D MXFP8 weights, whose two directions share one buffer."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any
from unittest import mock

import harness
import torch
import torch.distributed as dist
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
    directory: Path | None = None,
) -> dict[str, Any]:
    """Train a model with quantized weights.

    Args:
        kind: Of `models.build`; "columns": two linear layers that FSDP2 shards along columns.
        axes: The mesh.
        recipe: Name of the recipe.
        planes: 2: store and all-gather both directions, as for other MXFP8 weights.
        reshard: FSDP2's `reshard_after_forward`.
        recompute: Whether the forward runs again in backward.
        directory: Of a checkpoint to save after the last step.

    Returns:
        Losses, also of stock TE in one process; bytes all-gathered in a step, of shards and of files; values of shards.
    """
    import te_fsdp
    from te_fsdp.upstream import te as _te, torch_dtensor as _torch

    meshes = te_fsdp.Meshes.build(**axes, device_type=harness.device_type())
    separate = mock.patch.object(_te, "row_for", lambda row, quantizer: row)
    hidden = 384 if kind == "columns" else 256
    with separate if planes == 2 else contextlib.nullcontext():
        torch.manual_seed(bodies.SEED)
        plain = {"bias": False, "init_method": wide_range}  # all gathered bytes are of quantized weights
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
        files = 0 if directory is None else _saved_bytes(directory, wrapped)
        expected = bodies.losses_of_one_process(reference, recipe, batch, STEPS + 1)
    return {
        "losses": losses,
        "reference": expected,
        "tolerances": bodies.tolerances(expected, hidden),
        "compared": compared,
        "weights": len(shards),
        "sent": sum(item.bytes for item in sent if item.kind == "all_gather" and item.dtype == "uint8"),
        "stored": sum(stored.values()),
        "files": files,
        "values": [shard.dequantize(dtype=torch.float32) for shard in shards],
        "usages": [shard.get_usages() for shard in shards],
    }


def _saved_bytes(directory: Path, model: nn.Module) -> int:
    """Save a checkpoint and return the bytes of its data. Collective over the world."""
    import te_fsdp

    te_fsdp.checkpoint.save(directory, model)
    return sum(file.stat().st_size for file in directory.rglob("*.distcp"))


def _model(kind: str, recipe: str, hidden: int, device: Any, **options: Any) -> nn.Module:
    import transformer_engine.pytorch as te

    if kind == "columns":
        return pair(recipe, hidden, 352, device, **options)
    with te.quantized_model_init(recipe=recipe_of(recipe)):
        return build(kind, hidden, device, **options)


def _copy(model: nn.Module, source: nn.Module, directory: str) -> None:
    for target, other in zip(model.parameters(), source.parameters(), strict=True):
        target.copy_(other)


def _copy_shards(model: nn.Module, source: nn.Module, directory: str) -> None:
    for target, other in zip(model.parameters(), source.parameters(), strict=True):
        target.to_local().copy_(other.to_local())


def _load(model: nn.Module, source: nn.Module, directory: str) -> None:
    model.load_state_dict(source.state_dict())


def _load_dcp(model: nn.Module, source: nn.Module, directory: str) -> None:
    import torch.distributed.checkpoint as dcp

    saved, loaded = (
        {name: tensor for name, tensor in item.state_dict().items() if "extra" not in name}
        for item in (source, model)
    )
    dcp.save(saved, checkpoint_id=directory)
    dcp.load(loaded, checkpoint_id=directory)


#: Ways to write the weights of one model into a second one.
WAYS = {"copy_": _copy, "copy_ of shards": _copy_shards, "load_state_dict": _load, "dcp": _load_dcp}


def write_1d_into_2d(recipes: tuple[str, str], directory: str) -> dict[str, list[str]]:
    """Write weights with one scale per row of a block into weights with one scale per square block.

    Returns:
        The ways of writing after which forward or backward differ from those of one process that quantizes the values
        of the source; and those that cannot tell the values of the source from the previous ones.
    """
    import te_fsdp

    meshes = te_fsdp.Meshes.build(dp_shard=2, device_type=harness.device_type())
    options = {"bias": False, "init_method": wide_range}

    def sharded(recipe: str, seed: int) -> nn.Module:
        model = _model("linear", recipe, 256, "meta", **options)
        te_fsdp.fully_shard(model, meshes, units=[])
        return te_fsdp.materialize(model, seed=seed)

    with torch.no_grad():  # rowwise data is sufficient: te_fsdp refuses to shard rows of NVFP4 for training
        source = sharded(recipes[0], 1)
    values = {name: full_values(p) for name, p in source.named_parameters()}

    def run(model: nn.Module) -> list[torch.Tensor]:
        import transformer_engine.pytorch as te

        x = bodies.batch_of(256)[0].detach().requires_grad_()
        with te.autocast(enabled=True, recipe=recipe_of(recipes[1])):
            output = model(x)
        output.float().square().mean().backward()
        return [output.detach(), x.grad]

    reference = _model("linear", recipes[1], 256, harness.device(), **options)
    before = run(reference)
    with torch.no_grad():
        for name, parameter in reference.named_parameters():
            parameter.copy_(values[name])
    expected = run(reference)

    wrong, control = [], []
    for name, write in WAYS.items():
        model = sharded(recipes[1], 2)
        run(model)
        with torch.no_grad():
            write(model, source, directory)
        result = run(model)
        wrong += [] if all(torch.equal(a, b) for a, b in zip(result, expected, strict=True)) else [name]
        control += [] if not torch.equal(before[0], expected[0]) else [name]
    return {"wrong": wrong, "control": control}


def full_values(parameter: torch.Tensor) -> torch.Tensor:
    """Return the values of shards of rows in fp32: those of NVFP4 are not exact in bf16."""
    local = parameter.to_local().dequantize(dtype=torch.float32)  # type: ignore[attr-defined]
    parts = [torch.empty_like(local) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, local)
    return torch.cat(parts)
