"""Bodies about initialisation: the logical weights of stock TE in one process, bit for bit, on any mesh."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import harness
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from parity.models import HIDDEN, KINDS, VOCABULARY, Build, language_model
from parity.runs import Cut, Findings, compare_shards, tied

SEED = 5


class Waves(nn.Module):
    """A user's module: a random parameter, a constant one, and buffers that `reset_parameters` computes."""

    def __init__(self, device: Any) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.empty(HIDDEN, device=device))
        self.shift = nn.Parameter(torch.empty(3, HIDDEN, device=device))
        self.register_buffer("frequencies", torch.empty(HIDDEN, device=device))
        self.register_buffer("positions", torch.empty(4, dtype=torch.int64, device=device), persistent=False)
        self.register_buffer("mask", torch.empty(4, dtype=torch.bool, device=device))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.uniform_(self.gain, 0.5, 1.5)
        nn.init.zeros_(self.shift)
        with torch.no_grad():
            self.frequencies.copy_(10.0 ** torch.linspace(0, -3, HIDDEN))
            self.positions.copy_(torch.arange(4))
            self.mask.fill_(True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.gain + self.shift.sum(0) + self.frequencies


class MixedModules(nn.Module):
    """TE modules between modules outside of TE."""

    def __init__(self, build: Build) -> None:
        super().__init__()
        self.model = language_model(build, activation="swiglu", groups=4, qk_norm_type="RMSNorm").module
        self.waves = Waves(build.device)
        self.out = nn.Linear(VOCABULARY, 5, device=build.device)
        self.norm = nn.LayerNorm(5, device=build.device)


def build(kind: str, options: dict[str, Any], how: Build) -> nn.Module:
    """Return a module of `parity.models`, or the `MixedModules`."""
    return MixedModules(how) if kind == "zoo" else KINDS[kind](how, **options).module


def equals_stock(kind: str, options: dict[str, Any], axes: dict[str, int], route: str) -> dict[str, Any]:
    """Initialize on a mesh by one of the routes; every shard is bitwise equal to the stock module's.

    Args:
        kind: see `build`.
        options: its options.
        axes: mesh sizes.
        route: "seed" or "manual_seed" for `materialize` after `fully_shard`, "before" for `materialize` first.
    """
    import te_fsdp

    torch.manual_seed(SEED)
    reference = build(kind, options, Build(harness.device()))
    end_state = torch.get_rng_state() if harness.device_type() == "cpu" else torch.cuda.get_rng_state()
    meshes = te_fsdp.Meshes.build(**axes, device_type=harness.device_type())
    torch.manual_seed(99 if route == "seed" else SEED)
    outer = torch.get_rng_state()
    model = build(kind, options, Build("meta", **meshes.te_kwargs()))
    if route == "before":
        te_fsdp.set_device_mesh(model, tp_mesh=meshes.tp, weight_mesh=meshes.weight)
        te_fsdp.materialize(model)
        te_fsdp.fully_shard(model, meshes)
    else:
        te_fsdp.fully_shard(model, meshes)
        te_fsdp.materialize(model, **({"seed": SEED} if route == "seed" else {}))
    if route == "seed":
        assert torch.equal(torch.get_rng_state(), outer), "the caller's random state changed"
    else:
        state = torch.get_rng_state() if harness.device_type() == "cpu" else torch.cuda.get_rng_state()
        assert torch.equal(state, end_state), "other random numbers were drawn than stock TE draws"
    return check_bits(model, reference)


def check_bits(model: nn.Module, reference: nn.Module) -> dict[str, Any]:
    """Compare every shard and buffer with the reference's, bit for bit, and dtype, device and requires_grad."""
    checks = Findings()
    compare_shards(checks, "initial", model, reference, lambda p: p.detach(), bits=True, skip=tied(reference))
    buffers = dict(reference.named_buffers())
    assert buffers.keys() == dict(model.named_buffers()).keys()
    for name, buffer in model.named_buffers():
        checks.attempt(checks.bitwise_equal, name, buffer, buffers[name])
    for name, parameter in reference.named_parameters():
        mine = model.get_parameter(name)
        assert (mine.dtype, mine.requires_grad) == (parameter.dtype, parameter.requires_grad), name
        assert not mine.is_meta and mine.device == parameter.device, name
    return checks.settle(minimum=1)


def te_reset(
    kind: str,
    options: dict[str, Any],
    shape: tuple[int, ...],
    names: tuple[str, ...],
    tp: str | None,
    device: str,
) -> dict[str, Any]:
    """Initialize as TE's users do: set_device_mesh, torch's fully_shard, `reset_parameters()` by module; then train.

    Args:
        kind: see `build`.
        options: its options.
        shape: mesh shape.
        names: its axis names.
        tp: which axis is the tensor-parallel one; `None`: none.
        device: "meta", or "real" for parameters that exist already and hold other values.
    """
    import te_fsdp

    torch.manual_seed(SEED)
    reference = build(kind, options, Build(harness.device()))
    mesh = init_device_mesh(harness.device_type(), shape, mesh_dim_names=names)
    how: dict[str, Any] = {"device": "meta" if device == "meta" else harness.device()}
    if tp is not None:
        how |= {"tp_group": mesh.get_group(tp), "tp_size": mesh[tp].size()}
    torch.manual_seed(SEED + 1)
    model = build(kind, options, Build(**how))
    harness.shift_rows_by_rank(model, how.get("tp_group"))
    tp_mesh = mesh[tp] if tp is not None else None
    te_fsdp.set_device_mesh(model, tp_mesh=tp_mesh, weight_mesh=_weight_mesh(mesh, names, tp))
    data_parallel = tuple(name for name in names if name != tp)
    for unit in (*model.children(), model):
        if not isinstance(unit, nn.ModuleList):
            fully_shard(unit, mesh=mesh[data_parallel])
    torch.manual_seed(SEED)
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    counts = check_bits(model, reference)
    _same_output(kind, options, model, reference)
    return counts


def _weight_mesh(mesh: DeviceMesh, names: tuple[str, ...], tp: str | None) -> DeviceMesh:
    """Return the last two axes, flattened, of a mesh ([replicas,] shards[, tp])."""
    shard = [name for name in names if name != tp][-1]
    return mesh[shard] if tp is None else mesh[shard, tp]._flatten("weight_of_test")


def _same_output(kind: str, options: dict[str, Any], model: nn.Module, reference: nn.Module) -> None:
    """Check that the initialized model is the one that runs."""
    if kind == "zoo":
        return
    subject = KINDS[kind](Build("meta"), **options)
    x = torch.randn(subject.inputs["x"].shape, generator=torch.Generator().manual_seed(3)).to(
        harness.device()
    )
    output = subject.call(model, x)
    expected = subject.call(reference, x)
    harness.assert_close("output", output, expected, 1e-5, "fp32: ten chained sums in a different order")
    output.sum().backward()


def different_seeds(axes: dict[str, int], argument: bool, odd_rank: int | None = None) -> None:
    """Initialize ranks with different seeds, which raises on every rank.

    Args:
        axes: mesh sizes.
        argument: whether the seed is given to `materialize`.
        odd_rank: the one rank whose seed differs; `None`: all differ.
    """
    import te_fsdp

    meshes = te_fsdp.Meshes.build(**axes, device_type=harness.device_type())
    model = build("language_model", {"layers": 1}, Build("meta", **meshes.te_kwargs()))
    te_fsdp.fully_shard(model, meshes)
    seed = dist.get_rank() if odd_rank is None else int(dist.get_rank() == odd_rank)
    torch.manual_seed(seed)
    te_fsdp.materialize(model, seed=seed if argument else None)


def differing_values(axes: dict[str, int]) -> None:
    """Build parameters on the device from a different seed on one rank. Every rank raises."""
    import te_fsdp

    meshes = te_fsdp.Meshes.build(**axes, device_type=harness.device_type())
    torch.manual_seed(int(dist.get_rank() == dist.get_world_size() - 1))
    model = build("language_model", {"layers": 1}, Build(harness.device(), **meshes.te_kwargs()))
    te_fsdp.fully_shard(model, meshes)


class NoReset(nn.Module):
    """Its parameter and its buffer are never initialized."""

    def __init__(self) -> None:
        super().__init__()
        self.lost = nn.Parameter(torch.empty(4, device="meta"))
        self.register_buffer("table", torch.empty(4, device="meta"))


class OmitsTensors(nn.Module):
    """Its `reset_parameters` forgets a parameter and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(4, 4, device="meta"))
        self.forgotten = nn.Parameter(torch.empty(4, device="meta"))
        self.register_buffer("kept", torch.empty(4, device="meta"))
        self.register_buffer("blank", torch.empty(4, device="meta"))

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)
        self.kept.zero_()


MODULES: dict[str, Callable[[], nn.Module]] = {"no_reset": NoReset, "forgetful": OmitsTensors}


def never_initialised(axes: dict[str, int], which: list[str]) -> None:
    """Materialize a model some of whose tensors nothing fills, which raises on every rank."""
    import transformer_engine.pytorch as te

    import te_fsdp

    meshes = te_fsdp.Meshes.build(**axes, device_type=harness.device_type())
    model = nn.Module()
    for name in which:
        model.add_module(name, MODULES[name]())
    model.fine = te.LayerNormMLP(32, 64, set_parallel_mode=True, **Build("meta", **meshes.te_kwargs()).kwargs)
    te_fsdp.fully_shard(model, meshes)
    te_fsdp.materialize(model, seed=0)


def stays_tied(axes: dict[str, int], route: str) -> None:
    """Check that embedding and head are one parameter before and after, and train as one."""
    import te_fsdp

    meshes = te_fsdp.Meshes.build(**axes, device_type=harness.device_type())
    how = Build(harness.device() if route == "device" else "meta", **meshes.te_kwargs())
    model = build("language_model", {"layers": 1, "tied": True}, how)
    if route == "before":
        te_fsdp.set_device_mesh(model, tp_mesh=meshes.tp, weight_mesh=meshes.weight)
        te_fsdp.materialize(model, seed=0)
    te_fsdp.fully_shard(model, meshes)
    if route == "after":
        te_fsdp.materialize(model, seed=0)
    assert model.embedding.weight is model.head.weight
    assert sum(p is model.head.weight for p in model.parameters()) == 1
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    ids = torch.randint(VOCABULARY, (8, 4), generator=torch.Generator().manual_seed(1)).to(harness.device())
    model(Cut.of(meshes).take(ids, None)).square().sum().backward()
    optimizer.step()
    assert model.embedding.weight is model.head.weight
    model(ids)
    assert model.embedding.weight is model.head.weight
