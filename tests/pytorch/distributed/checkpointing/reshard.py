"""Bodies of the resharding matrix: save on one mesh, load what all others saved, compare, train on."""

from __future__ import annotations

import functools
import math
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist

from checkpointing.bodies import ignore_stacked_layouts, logical_state
from checkpointing.reshard_models import Training

BEFORE, AFTER = 1, 2  # the first loss shows the weights that were loaded, the second the optimizer's state
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def save_all(axes: dict[str, int] | None, directory: str, name: str) -> dict[str, list[float]]:
    """Train, save, write down the logical state, train on; for weights of each dtype.

    Args:
        axes: The mesh; None for stock TE in one process.
        directory: Folder of the checkpoints of all meshes.
        name: Of this mesh.

    Returns:
        The further losses per dtype.
    """
    import te_fsdp

    losses = {}
    for dtype in DTYPES:
        run = Training(DTYPES[dtype], axes, seed=0)
        run.steps(BEFORE)
        expected = logical_state(run)
        te_fsdp.checkpoint.save(
            f"{directory}/{name}-{dtype}", run.model, run.optimizer, extra={"step": BEFORE}
        )
        if not dist.is_initialized() or dist.get_rank() == 0:
            torch.save(expected, f"{directory}/{name}-{dtype}.pt")
        losses[dtype] = run.steps(AFTER)
    return losses


def load_all(
    axes: dict[str, int] | None,
    directory: str,
    names: list[str],
    train: list[str],
    *,
    spoil: bool = False,
) -> dict[str, dict[str, Any]]:
    """Load what each of the other meshes saved, one after the other, into one model that is trained in between.

    Args:
        axes: This mesh.
        directory: Where `save_all` wrote.
        names: Of the meshes to load.
        train: Those after which to train on, and those of which bf16 weights are loaded too.
        spoil: Negative control: stacked rows are loaded as if they were plain.

    Returns:
        Per mesh and dtype: what differs, number of tensors compared, further losses.
    """
    import te_fsdp

    outcomes = {}
    for dtype in DTYPES:
        run = Training(DTYPES[dtype], axes, seed=1)
        for name in names if dtype == "fp32" else train:
            path = f"{directory}/{name}-{dtype}"
            with ignore_stacked_layouts(run) if spoil else nullcontext():
                loaded = te_fsdp.checkpoint.load(path, run.model, run.optimizer)
            assert loaded == {"step": BEFORE} and not loaded.left and not loaded.converted
            run.position = BEFORE
            wrong, count = compare(run, _originals(path))
            losses = run.steps(AFTER if name in train else 0)
            outcomes[f"{name}-{dtype}"] = {"wrong": wrong, "tensors": count, "losses": losses}
    return outcomes


@functools.cache
def _originals(path: str) -> dict[str, torch.Tensor]:
    """Return the values that `save_all` recorded, read once in each process for several meshes."""
    return torch.load(f"{path}.pt", weights_only=True)


def compare(run: Any, expected: dict[str, torch.Tensor]) -> tuple[list[str], int]:
    """Compare this rank's parameters and optimizer state with their places in the originals, bit for bit. Local.

    Returns:
        Names of those that differ or that are missing on either side, and the number of tensors compared.
    """
    from te_fsdp.shard_info import shard_info
    from te_fsdp.upstream import torch_dtensor as _torch

    wrong, seen = [], set()
    names = {id(p): n for n, p in run.model.named_parameters()}
    for module in run.model.modules():
        for own, parameter in module._parameters.items():
            if parameter is None:
                continue
            name, info = names[id(parameter)], shard_info(module, own, parameter)
            assert sum(math.prod(box.sizes) for box in info.boxes) == math.prod(info.local_shape), name
            values = {name: _torch.local_of(parameter).detach()}
            for key, state in run.optimizer.state.get(parameter, {}).items():
                if isinstance(state, torch.Tensor):
                    values[f"{name}.{key}"] = _torch.local_of(state).detach()
            for label, value in values.items():
                seen.add(label)
                if not _same(expected.get(label), value.cpu(), info):
                    wrong.append(label)
    return sorted({*wrong, *(expected.keys() - seen)}), len(seen)


def _same(original: torch.Tensor | None, local: torch.Tensor, info: Any) -> bool:
    if original is None or original.dtype != local.dtype:
        return False
    if tuple(local.shape) != info.local_shape:  # a value for the unsharded parameter, such as its step
        return torch.equal(original, local)
    if tuple(original.shape) != info.original_shape:
        return False
    boxes = info.boxes
    return all(torch.equal(original[b.original_slices()], local[b.local_slices()]) for b in boxes)
