"""Bodies: meshes that the user built, for a full model or a pipeline stage, compared with one process."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import harness
import pytest
import torch
import torch.distributed as dist
from strategies.bodies import RTOL, WHY, compare, gradients, loss_of, parameters
from strategies.models import HIDDEN, SEED, Model, batch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

STEPS = 2


def _stage(number: int, device: Any, **kwargs: Any) -> nn.Module:
    """Return a stage with as many blocks as its number, so that stages have different parameters."""
    return Model(device, blocks=number + 1, **kwargs)


def _mesh(axes: dict[str, int]) -> DeviceMesh:
    return init_device_mesh(harness.device_type(), tuple(axes.values()), mesh_dim_names=tuple(axes))


def _shard(stage: int, mesh: Any, tp: DeviceMesh | None, strategy: str) -> nn.Module:
    import te_fsdp

    kwargs: dict[str, Any] = {}
    if tp is not None:
        kwargs = {"tp_group": tp.get_group(), "tp_size": tp.size(), "set_parallel_mode": True}
    model = _stage(stage, "meta", **kwargs)
    te_fsdp.fully_shard(model, mesh, units="blocks.*", strategy=strategy)
    return te_fsdp.materialize(model, seed=SEED + stage)


def training(
    axes: dict[str, int],
    strategy: str = "optim_grads_params",
    names: dict[str, str | None] | None = None,
    sliced: bool = False,
) -> int:
    """Compare two steps of this rank's stage, on torch's mesh, with the same stage in one process.

    Args:
        axes: Name -> size, in the mesh's order; the first one may be stages, the last one may be ``"tp"``.
        strategy: For all units.
        names: Arguments of :meth:`te_fsdp.Meshes.from_device_mesh`; ``None``: ``fully_shard`` gets the mesh itself.
        sliced: Whether the stages' axis is sliced away before.
    """
    import te_fsdp

    mesh = _mesh(axes)
    first, *others = axes
    stage = mesh.get_local_rank(first) if first in ("pp", "tiers") else 0
    data = [name for name in axes if name not in ("pp", "tiers", "tp")]
    tp = mesh["tp"] if "tp" in axes else None
    given: Any = mesh[tuple(others)] if sliced else mesh
    if names is not None:
        given = te_fsdp.Meshes.from_device_mesh(given, names=names)
        assert tp is None or given.te_kwargs()["tp_size"] == tp.size()
    model = _shard(stage, given, tp, strategy)
    torch.manual_seed(SEED + stage)
    reference = _stage(stage, harness.device())
    ours = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    wanted = torch.optim.SGD([p for p in reference.parameters() if p.requires_grad], lr=0.1)
    copies, place = 1, 0
    for name in data:
        copies, place = (
            copies * mesh.size(list(axes).index(name)),
            place * axes[name] + mesh.get_local_rank(name),
        )
    checks = harness.Comparisons()
    for step in range(STEPS):
        inputs = batch(10 * stage + step, copies, 1)[0]
        loss_of(model, inputs[place]).backward()
        for x in inputs:
            (loss_of(reference, x) / copies).backward()
        compare(checks, f"step {step}: gradient of", gradients(model), gradients(reference))
        # Stages are of one model if the mesh has a pipeline axis, else separate models.
        expected = torch.nn.utils.get_total_norm(list(gradients(reference).values()))
        if first == "pp" and not sliced:
            squares = expected.square()
            dist.all_reduce(squares, group=mesh.get_group("pp"))
            checks.close(f"step {step}: norm of the stage", _norm_of_one(model), expected, RTOL, WHY)
            expected = squares.sqrt()
        norm = te_fsdp.clip_grad_norm_(model.parameters(), 0.05)
        torch.nn.utils.clip_grads_with_norm_(reference.parameters(), 0.05, expected)
        checks.close(f"step {step}: norm", norm, expected, RTOL, WHY)
        for optimizer in (ours, wanted):
            optimizer.step()
            optimizer.zero_grad()
        compare(checks, f"step {step}: updated", parameters(model), parameters(reference))
    checks.require(STEPS * 6)
    return stage


def _norm_of_one(model: nn.Module) -> torch.Tensor:
    """Compute the norm of a stage alone; leave gradients as they are."""
    import te_fsdp

    return te_fsdp.clip_grad_norm_(model, math.inf, pp_mesh=False)


def groups_created_by_ranks() -> int:
    """Check that process groups which the ranks of a stage create consist of these ranks, in every stage."""
    import te_fsdp
    from te_fsdp.collectives.groups import separate_group

    meshes = te_fsdp.Meshes.build(pp=2, dp_shard=2, device_type=harness.device_type())
    assert meshes.pp is not None
    group = separate_group(meshes.device_mesh, "dp_shard", "test")
    number = torch.tensor(float(dist.get_rank()), device=harness.device())
    dist.all_reduce(number, group=group)
    return int(number)


def checkpoint_of_a_stage(directory: str) -> list[str]:
    """Check that saving a model of some ranks as the entire job's is refused on all ranks, and nothing appears."""
    import te_fsdp

    mesh = _mesh({"models": 2, "dp_shard": dist.get_world_size() // 2})
    meshes = te_fsdp.Meshes.from_device_mesh(mesh, names={"models": None})
    model = _shard(0, meshes, None, "optim_grads_params")
    texts = []
    with pytest.raises(te_fsdp.CheckpointError) as caught:
        te_fsdp.checkpoint.save(f"{directory}/stage", model)
    texts.append(str(caught.value))
    dist.barrier()
    assert not list(Path(directory).iterdir())
    return texts


def error_of_mismatched_submeshes() -> None:
    """Return the error of meshes that cover a part of the ranks, one of a different shape than the others."""
    import te_fsdp

    mesh = _mesh({"pp": 2, "dp_shard": 2})
    alone = DeviceMesh(harness.device_type(), [0], mesh_dim_names=("dp_shard",), _init_backend=False)
    te_fsdp.Meshes.from_device_mesh(alone if dist.get_rank() == 0 else mesh["dp_shard"])


def forward_before_materialize(strategy: str, how: str) -> dict[str, str]:
    """Run a forward of the model, of a unit or of a method before ``materialize``; afterwards all works.

    Args:
        strategy: Of all units.
        how: ``"fully_shard"``, or ``"set_device_mesh"`` alone.
    """
    import te_fsdp

    meshes = te_fsdp.Meshes.build(device_type=harness.device_type())
    model = Model("meta")
    x = torch.ones(4, HIDDEN, device=harness.device())
    if how == "fully_shard":
        te_fsdp.fully_shard(model, meshes, units="blocks.*", strategy=strategy)
        te_fsdp.register_forward_method(model, "score")
    else:
        te_fsdp.set_device_mesh(model)
    calls = {
        "model": model,
        "unit": model.blocks[0],
        "method": model.score if how == "fully_shard" else model,
    }
    texts = {}
    for name, call in calls.items():
        with pytest.raises(te_fsdp.OrderError) as caught:
            call(x)
        texts[name] = str(caught.value)
    te_fsdp.materialize(model, seed=SEED)
    model(x).sum().backward()
    torch.manual_seed(SEED)
    reference = Model(harness.device())
    reference(x).sum().backward()
    checks = harness.Comparisons()
    compare(checks, "gradient of", gradients(model), gradients(reference))
    checks.require(4)
    return texts
