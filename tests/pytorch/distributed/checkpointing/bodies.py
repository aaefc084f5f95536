"""Bodies: save, load into a model that was initialised differently, compare everything, go on training."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from harness import wire
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from checkpointing.models import Case, Run

BEFORE, AFTER = 1, 2  # the first loss shows the weights that were loaded, the second the optimizer's state
EXTRA = {"step": 7, "betas": (0.9, 1e-30), "data": {"order": [3, 1, 2], "name": "a/b", "none": None}}


def first_steps(recipe: str) -> int:
    """Return steps before a save: two with delayed scaling, of which only the second reads a history."""
    return 2 if recipe == "delayed" else BEFORE


def save_through(route: str, run: Run, path: str) -> None:
    """Save by te_fsdp.checkpoint or by plain DCP."""
    import te_fsdp

    if route == "te_fsdp":
        te_fsdp.checkpoint.save(path, run.model, run.optimizer, extra={**EXTRA, "noise": torch.arange(5.0)})
        return
    model, optimizer = get_state_dict(run.model, run.optimizer)
    dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=path)


def load_through(route: str, run: Run, path: str) -> None:
    """Load by te_fsdp.checkpoint or by plain DCP."""
    import te_fsdp

    if route == "te_fsdp":
        extra = te_fsdp.checkpoint.load(path, run.model, run.optimizer)
        assert torch.equal(extra.pop("noise"), torch.arange(5.0))
        assert extra == EXTRA and type(extra["betas"]) is tuple, extra
        return
    model, optimizer = get_state_dict(run.model, run.optimizer)
    state = {"model": model, "optimizer": optimizer}
    dcp.load(state, checkpoint_id=path)
    set_state_dict(run.model, run.optimizer, model_state_dict=model, optim_state_dict=optimizer)


def local_state(run: Run) -> dict[str, torch.Tensor]:
    """Return every raw tensor of this rank: quantized weights as bytes and scales, optimizer state, buffers."""
    from te_fsdp.upstream import te as _te, torch_dtensor as _torch

    results: dict[str, torch.Tensor] = {}
    names = {}
    for name, parameter in run.model.named_parameters():
        local, names[id(parameter)] = _torch.local_of(parameter), name
        if _te.is_quantized(local):
            buffers = local.get_metadata().items()
            # The cached transpose of float8 is made from the bytes when needed.
            kept = {k: b for k, b in buffers if isinstance(b, torch.Tensor) and k != "data_transpose"}
            results |= {f"{name}:{k}": _crop(k, b, local).clone() for k, b in kept.items()}
        else:
            results[name] = local.detach().clone()
    results |= {name: buffer.clone() for name, buffer in run.model.named_buffers()}
    for parameter, state in run.optimizer.state.items():
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                results[f"{names[id(parameter)]}.{key}"] = _torch.local_of(value).detach().clone()
    for name, module in run.model.named_modules():
        for key, state in (_te.delayed_states(module) or {}).items():
            results[f"{name}:{key}.scale"] = state.scale.clone()
            # The newest row is each rank's own until the next forward takes the maximum over ranks.
            results[f"{name}:{key}.amax_history"] = state.amax_history[1:].clone()
    return results


def _crop(name: str, buffer: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """Return a scale buffer without the padding, which kernels leave as they find it."""
    if "scale_inv" not in name or buffer.numel() == 1:
        return buffer
    from te_fsdp.quantized.components import components_of

    return next(c.tensor for c in components_of(local, name) if c.name == name)


def options(run: Run) -> list[dict[str, Any]]:
    """Return options of the optimizer's groups."""
    return [{k: v for k, v in group.items() if k != "params"} for group in run.optimizer.param_groups]


def differing(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> list[str]:
    """Return the names that are missing on a side, or whose dtype, shape or bytes differ."""
    wrong = sorted(left.keys() ^ right.keys())
    for name in left.keys() & right.keys():
        a, b = left[name], right[name]
        same = a.dtype == b.dtype and a.shape == b.shape
        if not same or not torch.equal(_bytes(a), _bytes(b)):
            wrong.append(name)
    return wrong


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().reshape(-1).clone(memory_format=torch.contiguous_format).view(torch.uint8)


def same_mesh(case: Case, axes: dict[str, int], route: str, directory: str) -> dict[str, Any]:
    """Save, load into a differently initialised model: all state, the next loss and all state after it, bit for bit.

    Returns:
        Number of tensors compared, how many differed without the load, losses of the three runs.
    """
    run = Run(case, axes, seed=0)
    run.steps(first_steps(case.recipe))
    path = f"{directory}/{route}"
    saved = local_state(run)
    save_through(route, run, path)
    assert not differing(saved, local_state(run)), "saving changed the model"
    position, losses = run.position, run.steps(1)
    trained = local_state(run)  # before the other model trains: TE rolls the amax histories of both
    other = Run(case, axes, seed=1)
    other.position = position
    fresh = differing(saved, local_state(other))
    without = other.loss()
    load_through(route, other, path)
    wrong = differing(saved, local_state(other))
    outcome = {"wrong": wrong, "tensors": len(saved), "fresh": len(fresh), "losses": losses}
    outcome["options"] = options(other)
    outcome["loaded"], outcome["unloaded"] = other.steps(1), without
    outcome["trained"] = differing(trained, local_state(other))
    return outcome


def logical_state(run: Any) -> dict[str, torch.Tensor]:
    """Return original tensors put together from the shards of all ranks, quantized weights dequantized. Collective."""
    from te_fsdp.shard_info import shard_info
    from te_fsdp.upstream import te as _te, torch_dtensor as _torch

    results: dict[str, torch.Tensor] = {}
    cut: list[tuple[str, torch.Tensor, Any]] = []
    names = {id(p): n for n, p in run.model.named_parameters()}
    for module in run.model.modules():
        for own, parameter in module._parameters.items():
            if parameter is None:
                continue
            name, info = names[id(parameter)], shard_info(module, own, parameter)
            local = _torch.local_of(parameter)
            values = {name: local.dequantize() if _te.is_quantized(local) else local.detach()}
            for key, state in run.optimizer.state.get(parameter, {}).items():
                if isinstance(state, torch.Tensor):
                    values[f"{name}.{key}"] = _torch.local_of(state).detach()
            for label, value in values.items():
                if value.shape == torch.Size() or tuple(value.shape) != info.local_shape:
                    results[label] = value.cpu().clone()
                else:
                    cut.append((label, value, info))
    return results | assemble(cut)


def assemble(shards: Iterable[tuple[str, torch.Tensor, Any]]) -> dict[str, torch.Tensor]:
    """Return original tensors by label from all ranks' shards with their places, by one collective for all."""
    originals: dict[str, torch.Tensor] = {}
    mine: dict[str, list[tuple[Any, torch.Tensor]]] = {}
    for label, local, info in shards:
        originals[label] = torch.empty(info.original_shape, dtype=local.dtype)
        mine[label] = [(box.original_slices(), local[box.local_slices()].cpu()) for box in info.boxes]
    everyone = wire.gather(mine)
    for label, original in originals.items():
        written = torch.zeros(original.shape, dtype=torch.bool)
        for slices, values in (piece for pieces in everyone for piece in pieces[label]):
            if written[slices].any():  # a replica
                assert torch.equal(_bytes(original[slices]), _bytes(values)), f"{label}: replicas differ"
            original[slices], written[slices] = values, True
        assert written.all(), f"{label}: holes"
    return originals


def save_for_different_mesh(
    case: Case, axes: dict[str, int] | None, directory: str, routes: tuple[str, ...]
) -> list[float]:
    """Train, save by each route, write down the logical state, train on; returns the further losses."""
    run = Run(case, axes, seed=0)
    run.steps(BEFORE)
    expected = logical_state(run)
    for route in routes:
        save_through(route, run, f"{directory}/{route}")
    if not dist.is_initialized() or dist.get_rank() == 0:
        torch.save(expected, f"{directory}/expected.pt")
    return run.steps(AFTER)


def load_on_different_mesh(
    case: Case,
    axes: dict[str, int] | None,
    directory: str,
    route: str,
    *,
    train: bool = True,
) -> dict[str, Any]:
    """Load the checkpoint of a different mesh, compare logical values bit for bit, and train.

    Args:
        case: As saved.
        axes: This mesh.
        directory: Where `save_for_different_mesh` wrote.
        route: Which of its checkpoints.
        train: Whether to train on.
    """
    run = Run(case, axes, seed=1)
    run.position = BEFORE
    load_through(route, run, f"{directory}/{route}")
    expected = torch.load(f"{directory}/expected.pt", weights_only=True)
    wrong = differing(expected, logical_state(run))
    return {"wrong": wrong, "tensors": len(expected), "losses": run.steps(AFTER if train else 0)}


@contextmanager
def ignore_stacked_layouts(run: Any) -> Iterator[None]:
    """Treat every sharded parameter as one block, and disable the comparison that detects this."""
    from te_fsdp.checkpoint import compare
    from te_fsdp.layout import PLAIN
    from te_fsdp.records import binding_of

    bindings = [b for b in map(binding_of, run.model.modules()) if b is not None]
    rules = [binding.rules for binding in bindings]
    for binding in bindings:
        binding.rules = {name: replace(rule, layout=PLAIN) for name, rule in binding.rules.items()}
    stock, compare.compare_model = compare.compare_model, lambda *args: compare.Differences()
    try:
        yield
    finally:
        compare.compare_model = stock
        for binding, own in zip(bindings, rules, strict=True):
            binding.rules = own


def resave(case: Case, axes: dict[str, int], directory: str, name: str, to: str) -> None:
    """Load a checkpoint and save it again under a different name."""
    import te_fsdp

    run = Run(case, axes, seed=2)
    te_fsdp.checkpoint.load(f"{directory}/{name}", run.model, run.optimizer)
    te_fsdp.checkpoint.save(f"{directory}/{to}", run.model, run.optimizer)


def compare_after_round_trip(
    case: Case, axes: dict[str, int], directory: str, name: str, raw: str
) -> list[str]:
    """Compare this rank's raw local state after a load with its record from before the saves on other meshes.

    Args:
        case: As saved.
        axes: The mesh of the beginning.
        directory: Folder of the files.
        name: Checkpoint to load; "" to train and write down instead.
        raw: File name of what is written down.
    """
    import te_fsdp

    run = Run(case, axes, seed=1 if name else 0)
    path = Path(directory, f"{raw}.{dist.get_rank()}")
    if not name:
        run.steps(first_steps(case.recipe))
        te_fsdp.checkpoint.save(f"{directory}/te_fsdp", run.model, run.optimizer)
        torch.save({k: v.cpu() for k, v in local_state(run).items()}, path)
        return []
    te_fsdp.checkpoint.load(f"{directory}/{name}", run.model, run.optimizer)
    expected = torch.load(path, weights_only=True)
    return differing(expected, {k: v.cpu() for k, v in local_state(run).items()})
