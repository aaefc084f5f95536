"""Bodies: checkpoints of all stages in one directory, loaded at other numbers of stages, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import harness
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from pipelines.models import HIDDEN, LAYERS, WORDS, batch, meshes_of, optimizer_of, stage_of


def _built(meshes: Any, per_rank: int = 1, **options: Any) -> tuple[Any, torch.optim.Optimizer]:
    """Return the stages of this rank: several are assigned in turn, as interleaved schedules require."""
    pp = 1 if meshes.pp is None else meshes.pp.size()
    place = 0 if meshes.pp is None else meshes.pp.get_local_rank()
    numbers = range(place, pp * per_rank, pp)
    parts = [stage_of(meshes, number, pp * per_rank, **options) for number in numbers]
    optimizer = optimizer_of(parts, options.get("quantized", False))
    return (parts if per_rank > 1 else parts[0]), optimizer


def trained(directory: str, name: str, **options: Any) -> list[str]:
    """Train the unsharded model in one process and save it."""
    import te_fsdp

    model, optimizer = _built(meshes_of(1), **options)
    for step in range(2):
        words, then = batch(step, 1, 1)
        nn.functional.cross_entropy(model(words[0]), then[0]).backward()
        optimizer.step()
        optimizer.zero_grad()
    te_fsdp.checkpoint.save(f"{directory}/{name}", model, optimizer, extra={"step": 2})
    return sorted(model.state_dict())


def load_on_different_stages(
    directory: str, source: str, target: str, axes: dict[str, int], **options: Any
) -> dict[str, Any]:
    """Load on other stages and save again, twice: the second save uses the plan of the first."""
    import te_fsdp

    model, optimizer = _built(meshes_of(**axes), **options)
    loaded = te_fsdp.checkpoint.load(f"{directory}/{source}", model, optimizer, verify=True)
    te_fsdp.checkpoint.save(f"{directory}/{target} before", model, optimizer, extra=loaded)
    handle = te_fsdp.checkpoint.save(
        f"{directory}/{target}", model, optimizer, extra=loaded, asynchronous=True
    )
    handle.result()
    return {"left": loaded.left, "converted": loaded.converted, "step": loaded["step"]}


def compare_checkpoints(directory: str, names: list[str], **options: Any) -> int:
    """Check in one process that checkpoints have the same bits of weights, optimizer and delayed-scaling state."""
    import te_fsdp

    results = []
    for name in names:
        model, optimizer = _built(meshes_of(1), **options)
        te_fsdp.checkpoint.load(f"{directory}/{name}", model, optimizer)
        named = dict(model.named_parameters())
        bits = {**model.state_dict(), **{n: p.detach() for n, p in named.items()}}
        for n, p in named.items():
            bits |= {f"{n}.{k}": v for k, v in optimizer.state[p].items() if isinstance(v, torch.Tensor)}
        results.append({n: v for n, v in bits.items() if isinstance(v, torch.Tensor) and v.numel()})
    checks = harness.Comparisons()
    for name, bits in zip(names[1:], results[1:], strict=True):
        assert bits.keys() == results[0].keys()
        for key, value in bits.items():
            checks.bitwise_equal(f"{name}: {key}", *(_bytes(v) for v in (value, results[0][key])))
    return checks.require(3 * LAYERS * (len(names) - 1)) and len(results[0])


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the data of a tensor; for a quantized one its rowwise bytes and scales."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    parts = [
        getattr(local, name, None) for name in ("_data", "_rowwise_data", "_scale_inv", "_rowwise_scale_inv")
    ]
    parts = [part.contiguous().view(torch.uint8).flatten() for part in parts if part is not None]
    return torch.cat(parts) if parts else local


# --- mistakes


def errors_of_mismatched_stages(directory: str, what: str) -> str:
    """Return the error of two stages that do not fit together, or a checkpoint: the same text on all ranks."""
    import te_fsdp

    meshes = meshes_of(2, dp=2)
    number = meshes.pp.get_local_rank()
    model = stage_of(meshes, number, 2)
    optimizer = optimizer_of(model)
    if what == "counted from 0":
        model = stage_of(meshes, 0, 2)
        optimizer = None
    elif what == "other groups" and number:
        optimizer = torch.optim.AdamW(model.parameters())
    elif what == "missing" and number:
        model = te_fsdp.materialize(te_fsdp.fully_shard(_Head(), meshes))
        optimizer = None
    with pytest.raises(te_fsdp.CheckpointError) as caught:
        if what == "missing":
            te_fsdp.checkpoint.load(f"{directory}/whole", model)
        else:
            te_fsdp.checkpoint.save(f"{directory}/{what}", model, optimizer)
    dist.barrier()
    assert {p.name for p in Path(directory).iterdir()} == {"whole"}
    return str(caught.value)


class _Head(nn.Module):
    """Return the last stage of a model whose second half is on no rank."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(HIDDEN, WORDS, device="meta")


class _Tied(nn.Module):
    """A stage of a model whose embedding is its head as well."""

    def __init__(self, stage: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(12, 32, device="meta")
        self.layers = nn.ModuleDict({str(stage): nn.Linear(32, 32, device="meta")})


def tied(directory: str) -> dict[str, str]:
    """Save parameters shared by two stages: rejected; named and equal; named and not equal; then loaded on both."""
    import te_fsdp

    meshes = meshes_of(2, dp=2)
    model = te_fsdp.fully_shard(_Tied(meshes.pp.get_local_rank()), meshes)
    te_fsdp.materialize(model, seed=1)
    texts = {}
    with pytest.raises(te_fsdp.CheckpointError) as caught:
        te_fsdp.checkpoint.save(f"{directory}/unnamed", model)
    texts["unnamed"] = str(caught.value)
    te_fsdp.checkpoint.save(f"{directory}/tied", model, shared=["embedding.*"])
    weight = model.embedding.weight
    expected = weight.detach().clone()
    with torch.no_grad():
        weight.add_(float(dist.get_rank() == 3))
    with pytest.raises(te_fsdp.CheckpointError) as caught:
        te_fsdp.checkpoint.save(f"{directory}/unequal", model, shared=["embedding.*"])
    texts["unequal"] = str(caught.value)
    te_fsdp.checkpoint.load(f"{directory}/tied", model)
    harness.assert_bitwise_equal("embedding", model.embedding.weight, expected)
    return texts
