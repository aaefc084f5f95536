"""Bodies: clipped gradients against torch's clipping of the unsharded model."""

from __future__ import annotations

from typing import Any

import harness
import torch

from parity.models import KINDS, Build
from parity.runs import RTOL, WHY, Findings, _gradient, compare_shards, shards

MAX_NORM = 0.5


def clipping(
    axes: dict[str, int], norm_type: float, *, kind: str = "language_model", lacking: bool = False
) -> dict:
    """Check that the norm and the clipped gradients equal those of one process.

    Gradients are drawn, not computed: what is tested is the arithmetic over meshes. The model holds weights cut by tp
    and fsdp, norms cut by fsdp alone, and (vocabulary of 3 rows) empty shards.

    Args:
        axes: mesh sizes.
        norm_type: order of the norm.
        kind: which of `KINDS`.
        lacking: parameters whose shard is empty have no gradient on their ranks.
    """
    import te_fsdp

    meshes = te_fsdp.Meshes.build(**axes, device_type=harness.device_type())
    reference, subject = _models(meshes, kind)
    fill(reference, subject, lacking)
    total = te_fsdp.clip_grad_norm_(subject, MAX_NORM, norm_type)
    expected = torch.nn.utils.clip_grad_norm_(reference.parameters(), MAX_NORM, norm_type)
    checks = Findings()
    checks.attempt(checks.close, "norm", total, expected, RTOL, WHY)
    if not lacking:
        compare_shards(checks, "clipped", subject, reference, _gradient)
    again = te_fsdp.clip_grad_norm_(subject.parameters(), MAX_NORM, norm_type)
    checks.attempt(checks.close, "norm after clipping", again, torch.full_like(again, MAX_NORM), RTOL, WHY)
    return {**checks.settle(minimum=2), "total": float(total), "local": local_norm(subject, norm_type)}


def _models(meshes: Any, kind: str) -> tuple[torch.nn.Module, torch.nn.Module]:
    """Return the unsharded and the sharded model, each with a parameter that has nothing to do with TE or tp."""
    import te_fsdp

    reference = KINDS[kind](Build(harness.device())).module
    subject = KINDS[kind](Build(harness.device(), **meshes.te_kwargs())).module
    for module in (reference, subject):
        module.extra = torch.nn.Parameter(torch.ones(3, 5, device=harness.device()))
    return reference, te_fsdp.fully_shard(subject, meshes)


def fill(reference: torch.nn.Module, subject: torch.nn.Module, lacking: bool) -> None:
    """Draw a gradient for every parameter, and give each rank its rectangles of it."""
    generator = torch.Generator().manual_seed(23)
    whole = {}
    for name, parameter in reference.named_parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(harness.device())
        whole[name] = parameter.grad
    for name, parameter, info in shards(subject):
        parameter.grad = torch.zeros_like(parameter)
        local: Any = parameter.grad
        local = local.to_local() if hasattr(local, "to_local") else local
        for box in info.boxes:
            local[box.local_slices()] = whole[name][box.original_slices()]
        if lacking and local.numel() == 0:
            parameter.grad = None


def local_norm(model: torch.nn.Module, norm_type: float) -> float:
    """Return the norm that one rank would compute from its own gradients."""
    parts = [p.grad for p in model.parameters() if p.grad is not None]
    flat = torch.cat([(g.to_local() if hasattr(g, "to_local") else g).flatten() for g in parts])
    return float(torch.linalg.vector_norm(flat, norm_type))


def unreduced(axes: dict[str, int]) -> None:
    """Clip a gradient of which each rank has a part that must be summed."""
    from torch.distributed.tensor import DTensor, Partial, Replicate

    import te_fsdp

    mesh = te_fsdp.Meshes.build(**axes, device_type=harness.device_type()).device_mesh["dp_shard"]
    value = torch.ones(4, 3, device=harness.device())
    gate = torch.nn.Module()
    gate.weight = torch.nn.Parameter(DTensor.from_local(value, mesh, [Replicate()]))
    gate.weight.grad = DTensor.from_local(value, mesh, [Partial()])
    te_fsdp.clip_grad_norm_([gate.weight], MAX_NORM)


def unreduced_in_a_model(axes: dict[str, int]) -> None:
    """Clip such a gradient of a parameter that ``fully_shard`` has sharded."""
    from torch.distributed.tensor import DTensor, Partial

    import te_fsdp

    meshes = te_fsdp.Meshes.build(**axes, device_type=harness.device_type())
    layers = torch.nn.Sequential(*(torch.nn.Linear(8, 8, device=harness.device()) for _ in range(2)))
    model = te_fsdp.fully_shard(layers, meshes)
    weight: Any = model[1].weight
    value = torch.ones(8, 8, device=harness.device())
    weight.grad = DTensor.from_local(value, weight.device_mesh, [Partial()])
    te_fsdp.clip_grad_norm_(model.parameters(), MAX_NORM)


def non_finite(axes: dict[str, int]) -> None:
    """Check that every rank raises if one has a NaN."""
    import te_fsdp

    meshes = te_fsdp.Meshes.build(**axes, device_type=harness.device_type())
    model = te_fsdp.fully_shard(torch.nn.Linear(8, 8, device=harness.device()), meshes)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    if torch.distributed.get_rank() == 1:
        model.weight.grad.to_local()[0, 0] = float("nan")
    te_fsdp.clip_grad_norm_(model, 1.0, error_if_nonfinite=True)


def two_meshes(axes: dict[str, int], *, by_torch: bool = False) -> None:
    """Clip a tensor-parallel model with a head that torch's fully_shard shards only over data parallel.

    Args:
        axes: mesh sizes.
        by_torch: clip by torch's function, which te_fsdp extends to several meshes.
    """
    import te_fsdp

    meshes = te_fsdp.Meshes.build(**axes, device_type=harness.device_type())
    reference, model = _models(meshes, "language_model")
    heads = [torch.nn.Linear(6, 4, bias=False, device=harness.device()) for _ in range(2)]
    torch.distributed.fsdp.fully_shard(heads[1], mesh=meshes.fsdp)
    fill(reference, model, lacking=False)
    fill(heads[0], heads[1], lacking=False)
    parameters = [*model.parameters(), *heads[1].parameters()]
    clip = torch.nn.utils.clip_grad_norm_ if by_torch else te_fsdp.clip_grad_norm_
    total = clip(parameters, MAX_NORM)
    whole = [*reference.parameters(), *heads[0].parameters()]
    harness.assert_close("norm", total, torch.nn.utils.clip_grad_norm_(whole, MAX_NORM), RTOL, WHY)


def stages_of_torch(axes: dict[str, int]) -> dict[str, float]:
    """Return norms of two stages without a te_fsdp model. Gradients are the numbers of the stage, from 1."""
    import transformer_engine.pytorch as te

    import te_fsdp

    meshes = te_fsdp.Meshes.build(**axes, device_type=harness.device_type())
    mode = {"parallel_mode": "column", **meshes.te_kwargs()} if meshes.tp is not None else {}
    torch.manual_seed(torch.distributed.get_rank())  # equal shards raise
    stage = te.Linear(16, 16, bias=False, device=harness.device(), **mode)
    te_fsdp.set_device_mesh(stage, meshes.tp, meshes.weight)
    if meshes.fsdp is not None:
        torch.distributed.fsdp.fully_shard(stage, mesh=meshes.fsdp)
    number = meshes.pp.get_local_rank() + 1
    norms = []
    for options in ({}, {"pp_mesh": False}):
        stage.weight.grad = torch.full_like(stage.weight, number).detach()
        norms.append(float(te_fsdp.clip_grad_norm_(stage.parameters(), 1.0, **options)))
    return {"norm": norms[0], "expected": 16 * 5**0.5, "one_stage": norms[1], "own": 16.0 * number}
