"""Bodies that make a mistake: each returns the error's class with its text."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import harness
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict

from checkpointing.bodies import differing, local_state
from checkpointing.models import Case, Run

AXES = {"dp_shard": 2}


class Small(nn.Module):
    """A few parameters, to be wrong about."""

    def __init__(self, width: int = 8, extra: str = "", dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        options = {"dtype": dtype, "device": harness.device()}
        self.first = nn.Linear(4, width, **options)
        self.second = nn.Linear(width, 3, **options)
        if extra:
            setattr(self, extra, nn.Linear(2, 2, **options))


def shard(model: nn.Module) -> nn.Module:
    import te_fsdp

    return te_fsdp.fully_shard(model, te_fsdp.Meshes.build(**AXES, device_type=harness.device_type()))


def adam(model: nn.Module) -> torch.optim.Optimizer:
    """Return an AdamW that has made a step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


def error_of(call: Callable[[], Any]) -> tuple[str, str]:
    """Return the class and text of the error that a call raises."""
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error)
    raise AssertionError("nothing was raised")


def _values(model: nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def load_into_another_model(directory: str, kind: str) -> tuple[str, str]:
    """Load a checkpoint of Small into a model or optimizer that differs; nothing may change."""
    import te_fsdp

    model = shard(Small())
    te_fsdp.checkpoint.save(f"{directory}/step-1", model, adam(model))
    options: dict[str, Any] = {
        "names": {"extra": "third"},
        "shapes": {"width": 6},
        "dtype": {"dtype": torch.bfloat16},
        "one rank": {"extra": "third" if dist.get_rank() == 1 else ""},
    }.get(kind, {})
    different = Small(**options)
    # The models of the ranks differ, which sharding itself would notice.
    other = different if kind == "one rank" else shard(different)
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(other.parameters(), lr=0.5)
    if kind == "groups":
        optimizer = torch.optim.AdamW([{"params": list(m.parameters())} for m in other.children()])
    elif kind == "class":
        optimizer = torch.optim.SGD(other.parameters(), lr=0.5)
    before = _values(other)
    options = {"convert": kind != "dtype"}
    result = error_of(lambda: te_fsdp.checkpoint.load(f"{directory}/step-1", other, optimizer, **options))
    assert all(torch.equal(a, b) for a, b in zip(before, _values(other), strict=True))
    assert not optimizer.state and optimizer.param_groups[0]["lr"] != 0.1
    return result


def load_partially(directory: str, allow: list[str] | None) -> dict[str, Any]:
    """Take what fits and name the rest: in a warning and in the result."""
    import te_fsdp

    model = shard(Small())
    te_fsdp.checkpoint.save(f"{directory}/step-1", model, adam(model), extra={"step": 1})
    other = shard(Small(extra="third"))
    before = _values(other.third)
    optimizer = torch.optim.AdamW(other.parameters(), lr=0.5)
    options: dict[str, Any] = {"strict": False} if allow is None else {"allow": allow}
    with warnings_of_te_fsdp() as warnings:
        loaded = te_fsdp.checkpoint.load(f"{directory}/step-1", other, optimizer, **options)
    same = all(torch.equal(a, b) for a, b in zip(_values(model), _values(other), strict=False))
    untouched = all(torch.equal(a, b) for a, b in zip(before, _values(other.third), strict=True))
    names = {id(p): n for n, p in other.named_parameters()}
    return {
        "extra": dict(loaded),
        "left": loaded.left,
        "same": same,
        "untouched": untouched,
        "warnings": warnings,
        "states": {names[id(p)]: float(state["step"]) for p, state in optimizer.state.items()},
        "lr": optimizer.param_groups[0]["lr"],
    }


@contextmanager
def warnings_of_te_fsdp() -> Iterator[list[str]]:
    """Record messages of the logger in the context."""
    heard: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("te_fsdp")
    log.addHandler(handler)
    try:
        yield heard
    finally:
        log.removeHandler(handler)


def load_groups_partially(directory: str) -> dict[str, Any]:
    """Load groups other than the saved ones: state by parameter, options if the saved group is clear."""
    import te_fsdp

    def split(model: nn.Module, *names: str) -> list[dict[str, Any]]:
        return [{"params": list(getattr(model, name).parameters())} for name in names]

    model = shard(Small(extra="third"))
    saved = torch.optim.AdamW(split(model, "first", "second"), lr=0.1)
    saved.param_groups[1]["lr"] = 0.2
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    saved.step()
    te_fsdp.checkpoint.save(f"{directory}/step-1", model, saved)
    other = shard(Small(extra="third"))
    optimizer = torch.optim.AdamW(split(other, "second", "third", "first"), lr=0.5)
    refused = error_of(lambda: te_fsdp.checkpoint.load(f"{directory}/step-1", other, optimizer))
    assert not optimizer.state
    loaded = te_fsdp.checkpoint.load(f"{directory}/step-1", other, optimizer, strict=False)
    names = {id(p): n for n, p in other.named_parameters()}
    return {
        "refused": refused,
        "lr": [group["lr"] for group in optimizer.param_groups],
        "states": sorted(names[id(p)] for p in optimizer.state),
        "left": sorted(loaded.left),
        "notes": loaded.notes,
    }


def load_main_weights_partially(directory: str) -> dict[str, float]:
    """Check that an optimizer outside of a partial load does not undo it: its main weights follow the loaded ones."""
    import te_fsdp
    from te_fsdp.upstream import torch_dtensor as _torch

    saved, other = (Run(Case(optimizer="fused"), AXES, seed=seed) for seed in (0, 1))
    saved.steps(1)
    te_fsdp.checkpoint.save(f"{directory}/weights", saved.model)
    other.steps(1)
    te_fsdp.checkpoint.load(f"{directory}/weights", other.model, other.optimizer, strict=False)
    for group in other.optimizer.param_groups:
        group["lr"] = 0.0
    other.steps(1)
    pairs = zip(saved.model.parameters(), other.model.parameters(), strict=True)
    wrong = sum(not torch.equal(_torch.local_of(a), _torch.local_of(b)) for a, b in pairs)
    return {"wrong": wrong, "state": len(other.optimizer.state)}


def optimizer_before_sharding(directory: str, only_rank: int | None) -> list[tuple[str, str]]:
    """Return the error of an optimizer over the parameters before sharding, on all ranks or on one."""
    import te_fsdp
    from te_fsdp.features.main_weights import check_optimizer

    model = Small()
    early = torch.optim.AdamW(model.parameters())
    shard(model)
    late = adam(model)
    te_fsdp.checkpoint.save(f"{directory}/step-1", model, late)
    wrong = early if only_rank in (None, dist.get_rank()) else late
    results = [
        error_of(lambda: te_fsdp.checkpoint.save(f"{directory}/step-2", model, wrong)),
        error_of(lambda: te_fsdp.checkpoint.load(f"{directory}/step-1", model, wrong)),
        error_of(lambda: check_optimizer(model, early)),
    ]
    check_optimizer(model, late)
    assert not Path(directory, "step-2").exists()
    return results


def load_damaged(directory: str, kind: str) -> tuple[str, str]:
    """Load a directory that is not a complete checkpoint on any rank; nothing may change."""
    import te_fsdp

    model = shard(Small())
    path = Path(directory, "step-1")
    te_fsdp.checkpoint.save(path, model, adam(model))
    if dist.get_rank() == 0:
        data = next(path.glob("__0_*.distcp"))
        if kind == "truncated":
            data.write_bytes(data.read_bytes()[:-100])
        elif kind == "missing file":
            data.unlink()
        elif kind == "manifest":
            manifest = path / "te_fsdp.json"
            manifest.write_text(manifest.read_text()[:-100])
        elif kind == "no manifest":
            (path / "te_fsdp.json").unlink()
    dist.barrier()
    target = {"no path": Path(directory, "step-11"), "parent": Path(directory)}.get(kind, path)
    before = _values(model)
    result = error_of(lambda: te_fsdp.checkpoint.load(target, model))
    assert all(torch.equal(a, b) for a, b in zip(before, _values(model), strict=True))
    newest = te_fsdp.checkpoint.latest(directory)
    assert newest == (path if kind in ("no path", "parent") else None)
    return result


def save_with_write_error(directory: str) -> dict[str, Any]:
    """Check that all ranks raise if rank 1 cannot write, nothing stays behind, and the next save works."""
    import te_fsdp
    from te_fsdp.checkpoint import planner

    model = shard(Small())
    optimizer = adam(model)
    te_fsdp.checkpoint.save(f"{directory}/step-1", model, optimizer)
    original = planner.RankWriter.blocks

    def broken(self: Any) -> Any:
        raise OSError(28, "No space left on device")

    if dist.get_rank() == 1:
        planner.RankWriter.blocks = broken
    result = error_of(lambda: te_fsdp.checkpoint.save(f"{directory}/step-2", model, optimizer))
    planner.RankWriter.blocks = original
    dist.barrier()
    left = sorted(p.name for p in Path(directory).iterdir())
    newest = te_fsdp.checkpoint.latest(directory)
    dist.barrier()
    te_fsdp.checkpoint.save(f"{directory}/step-2", model, optimizer)
    again = error_of(lambda: te_fsdp.checkpoint.save(f"{directory}/step-2", model, optimizer))
    after = sorted(p.name for p in Path(directory).iterdir())
    return {"error": result, "left": left, "newest": str(newest), "again": again, "after": after}


def save_different_values(directory: str, what: str) -> tuple[str, str]:
    """Save values that differ between ranks although they are written once for all."""
    import te_fsdp
    from te_fsdp.upstream import te as _te, torch_dtensor as _torch

    if what == "scale":
        run = Run(Case(optimizer="fused", recipe="current", quantized=True), AXES, seed=0)
        model: nn.Module = run.model
        local = next(x for p in model.parameters() if _te.is_quantized(x := _torch.local_of(p)))
        local.get_metadata()["fp8_scale_inv"].mul_(1 + dist.get_rank())
    elif what == "unsharded":
        torch.manual_seed(dist.get_rank())
        model = Small()
    else:
        model = Small(extra="third" if dist.get_rank() else "")
    result = error_of(lambda: te_fsdp.checkpoint.save(f"{directory}/step-1", model))
    assert not Path(directory, "step-1").exists()
    return result


def load_different_format(directory: str) -> list[tuple[str, str]]:
    """Load formats and main weights that need a disallowed conversion. The model is unchanged."""
    from transformer_engine.pytorch.optimizers import FusedAdam

    import te_fsdp

    quantized, plain = Case(optimizer="fused", recipe="mxfp8", quantized=True), Case(optimizer="fused")
    results = []
    for saved, loaded in ((quantized, plain), (plain, quantized)):
        run, other = Run(saved, AXES, seed=0), Run(loaded, AXES, seed=1)
        run.steps(1)
        path = f"{directory}/{saved.recipe}"
        te_fsdp.checkpoint.save(path, run.model, run.optimizer)
        before = local_state(other)

        def load(path: str = path, run: Run = other) -> Any:
            return te_fsdp.checkpoint.load(path, run.model, run.optimizer, convert=False)

        results.append(error_of(load))
        assert not differing(before, local_state(other))
    trained = [p for p in run.model.parameters() if p.requires_grad]
    groups = [{"params": trained[:3]}, {"params": trained[3:]}]
    without = FusedAdam(groups, master_weights=False)
    results.append(error_of(lambda: te_fsdp.checkpoint.load(path, run.model, without, convert=False)))
    remainders = FusedAdam(groups, master_weights=True, store_param_remainders=True)
    results.append(error_of(lambda: te_fsdp.checkpoint.load(path, run.model, remainders)))
    eight = FusedAdam(groups, exp_avg_dtype=torch.uint8)
    results.append(error_of(lambda: te_fsdp.checkpoint.save(f"{directory}/x", run.model, eight)))
    return results


def load_different_checkpoints(directory: str) -> dict[str, tuple[str, str]]:
    """Load a different checkpoint of the same model on each rank, and one that a rank cannot read."""
    import te_fsdp

    model, rank = shard(Small()), dist.get_rank()
    results = {}
    for step in (0, 1):
        te_fsdp.checkpoint.save(f"{directory}/ours-{step}", model)
        dcp.save(get_model_state_dict(model), checkpoint_id=f"{directory}/plain-{step}")
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1.0)
    before = _values(model)
    for kind, names in {
        "ours": ("ours-0", "ours-1"),
        "plain": ("plain-0", "plain-1"),
        "absent": ("ours-0", "ours-2"),
    }.items():
        path = f"{directory}/{names[rank]}"
        results[kind] = error_of(lambda path=path: te_fsdp.checkpoint.load(path, model))
    assert all(torch.equal(a, b) for a, b in zip(before, _values(model), strict=True)), "nothing has changed"
    te_fsdp.checkpoint.load(
        f"{directory}/{'.' * (rank + 1)}/{Path(directory).name if rank else ''}/ours-0", model
    )
    return results


def save_hybrid_weights(directory: str) -> bool:
    """Check that saving weights of two formats at once raises; return whether there are files."""
    from quantization.weight_bytes import meshes_of, sharded

    import te_fsdp

    model = sharded("mlp_gelu", "e4m3/mxfp8", meshes_of(1, 1))
    te_fsdp.materialize(model)
    try:
        te_fsdp.checkpoint.save(Path(directory) / "step-1", model)
    finally:
        dist.barrier()
        assert not list(Path(directory).iterdir()), "something was written"
    return True
