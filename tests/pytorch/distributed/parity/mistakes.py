"""Bodies that make one mistake with meshes each; every rank must raise te_fsdp's own error."""

from __future__ import annotations

from typing import Any

import harness
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from parity.models import HIDDEN, Build


def _mesh() -> DeviceMesh:
    return init_device_mesh(harness.device_type(), (2, 2), mesh_dim_names=("dp", "tp"))


class Model(nn.Module):
    """A column-parallel linear called `up`, so that messages have a name to give."""

    def __init__(self, mesh: DeviceMesh | None, parallel_mode: str | None = "column") -> None:
        super().__init__()
        import transformer_engine.pytorch as te

        tp = {} if mesh is None else {"tp_group": mesh.get_group("tp"), "tp_size": mesh["tp"].size()}
        self.up = te.Linear(
            HIDDEN, HIDDEN, parallel_mode=parallel_mode, **Build(harness.device(), **tp).kwargs
        )
        harness.shift_rows_by_rank(self, tp.get("tp_group"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.up(x)


def _larger_mesh() -> None:
    import te_fsdp

    te_fsdp.set_device_mesh(Model(_mesh()), tp_mesh=init_device_mesh(harness.device_type(), (4,)))


def _no_tp_mesh() -> None:
    import te_fsdp

    te_fsdp.set_device_mesh(Model(_mesh()), weight_mesh=_mesh()["tp"])


def _not_built_for_tp() -> None:
    import te_fsdp

    te_fsdp.set_device_mesh(Model(None), tp_mesh=_mesh()["tp"])


def _two_axes_tp() -> None:
    import te_fsdp

    te_fsdp.set_device_mesh(Model(_mesh()), tp_mesh=_mesh())


def _two_axes_weight() -> None:
    import te_fsdp

    mesh = _mesh()
    te_fsdp.set_device_mesh(Model(mesh), tp_mesh=mesh["tp"], weight_mesh=mesh)


def _keyword() -> None:
    import te_fsdp

    te_fsdp.Linear(HIDDEN, HIDDEN, parallel_mode="column", tp_mesh=_mesh(), device=harness.device())


def _a_group() -> None:
    import te_fsdp

    mesh = _mesh()
    te_fsdp.set_device_mesh(Model(mesh), tp_mesh=mesh.get_group("tp"))


def _weight_without_tp() -> None:
    import te_fsdp

    mesh = _mesh()
    te_fsdp.set_device_mesh(Model(mesh), tp_mesh=mesh["tp"], weight_mesh=mesh["dp"])


def _other_ranks() -> None:
    import te_fsdp

    mesh = _mesh()
    te_fsdp.set_device_mesh(Model(mesh), tp_mesh=mesh["dp"])


def _after_torch_fully_shard() -> None:
    import te_fsdp

    mesh = _mesh()
    model = Model(mesh)
    fully_shard(model, mesh=mesh["dp"])
    te_fsdp.set_device_mesh(model, tp_mesh=mesh["tp"])


def _after_our_fully_shard() -> None:
    import te_fsdp

    model = Model(None, parallel_mode=None)
    te_fsdp.fully_shard(model, te_fsdp.Meshes.build(dp_shard=4, device_type=harness.device_type()))
    te_fsdp.set_device_mesh(model, tp_mesh=_mesh()["tp"])


def _our_fully_shard_after_torchs() -> None:
    import te_fsdp

    model = Model(None, parallel_mode=None)
    meshes = te_fsdp.Meshes.build(dp_shard=4, device_type=harness.device_type())
    fully_shard(model, mesh=meshes.fsdp)
    te_fsdp.fully_shard(model, meshes)


def _other_meshes() -> None:
    import te_fsdp

    mesh = _mesh()
    model = Model(None, parallel_mode=None)
    te_fsdp.set_device_mesh(model, tp_mesh=mesh["tp"])
    te_fsdp.set_device_mesh(model, tp_mesh=mesh["dp"])


def _world_too_small() -> None:
    import te_fsdp

    te_fsdp.Meshes.build(dp_shard=3, tp=2, device_type=harness.device_type())


def _world_not_divisible() -> None:
    import te_fsdp

    te_fsdp.Meshes.build(tp=3, device_type=harness.device_type())


def _without_hooks(tp: int) -> None:
    import te_fsdp

    meshes = te_fsdp.Meshes.build(tp=tp, device_type=harness.device_type())
    model = Model(meshes.device_mesh if tp > 1 else None)
    te_fsdp.fully_shard(model, meshes)
    model.forward(torch.randn(4, HIDDEN, device=harness.device()))


def _without_hooks_tp() -> None:
    _without_hooks(2)


def _without_hooks_dp() -> None:
    _without_hooks(1)


BODIES: dict[str, Any] = {
    name.lstrip("_"): value
    for name, value in list(globals().items())
    if name.startswith("_") and callable(value)
}


def make(which: str) -> None:
    """Make one of the mistakes."""
    BODIES[which]()


def still_works_after(which: str) -> None:
    """Check that a rejected mesh leaves the model unchanged and the ranks synchronized."""
    import te_fsdp

    mesh = _mesh()
    model = Model(mesh)
    before = {name: id(p) for name, p in model.named_parameters()}
    kind = type(model.up)
    wrong = {"two_axes": mesh, "other_ranks": mesh["dp"]}[which]
    try:
        te_fsdp.set_device_mesh(model, tp_mesh=wrong)
    except te_fsdp.MeshError:
        pass
    else:
        raise AssertionError("not refused")
    assert type(model.up) is kind and {name: id(p) for name, p in model.named_parameters()} == before
    te_fsdp.set_device_mesh(model, tp_mesh=mesh["tp"])
    fully_shard(model, mesh=mesh["dp"])
    model(torch.randn(4, HIDDEN, device=harness.device())).sum().backward()
    dist.barrier()
