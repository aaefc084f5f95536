"""Bodies: gradients after a forward that is run again equal those of stock TE in one process that does the same.

Every rank runs the reference itself, unsharded and without tensor parallelism, on the inputs that its part of the
sharded model gets; the mean of the references' gradients over data parallelism is what the sharded model must have.
Weights are equal to the bit, and every product is formed from the same numbers: what is left are sums over ranks, and
with tensor parallelism sums of partial products.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import harness
import torch
import torch.distributed as dist
from harness.collectives import recorded
from matrix.models import recipe_of
from parity.runs import Findings, shards
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from recomputing.models import BATCH, NARROW, SEQUENCE, WIDE, Net, Way

SEED = 3
#: Two backwards: what the first has shown is used in the second.
ROUNDS = 2
#: fp32: up to ten chained sums of at most 512 products and of 2 ranks, added in a different order (test_parity's).
FP32 = 1e-5
#: bf16 gradients: the mean over two ranks is rounded once (2^-9), as is each sum of two gradients of one weight (also
#: where it is used twice), in a different order than in one process: four roundings at most.
BF16 = 4 * 2.0**-9
FROZEN = ("blocks.0.mlp.fc1_weight", "blocks.1.mlp.layer_norm_weight", "blocks.1.scale")


def trained(
    strategy: str,
    axes: dict[str, int],
    *,
    place: str = "",
    kind: str = "",
    twice: str = "",
    recipe: str = "none",
    weights: str = "fp32",
    frozen: str = "",
    fused: bool = False,
    broken: str = "",
) -> dict[str, Any]:
    """Run forward and backward twice; return outputs, gradients of the input and of every parameter.

    Args:
        strategy: of te_fsdp.fully_shard; "bound": set_device_mesh alone; "torch": with a tp mesh of one rank, so that
            parameters are DTensors, and then torch's fully_shard on each unit.
        axes: sizes of the mesh.
        place: position of the checkpoint.
        kind: whose checkpoint.
        twice: what is used twice.
        recipe: by name.
        weights: "fp32", "bf16" or "quantized".
        frozen: "first": some weights are never trained; "then": they are no longer after the first backward.
        fused: TE's fuse_wgrad_accumulation, in the sharded model alone.
        broken: "gradient" spoils one gradient, for the negative control.
    """
    import te_fsdp
    from te_fsdp.upstream import torch_dtensor as _torch

    meshes = te_fsdp.Meshes.build(**axes, device_type=harness.device_type())
    way = Way(place, kind, twice)
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    torch.manual_seed(SEED)
    hidden = WIDE if recipe == "block" else NARROW
    reference = _built(way, recipe, weights, harness.device(), group=alone, hidden=hidden)
    options = {"fuse_wgrad_accumulation": True} if fused else {}
    model = _built(way, recipe, weights, "meta", hidden=hidden, **meshes.te_kwargs(), **options)
    _shard(model, meshes, strategy)
    findings = Findings()
    # Delayed scaling reduces amaxes over all ranks: equal data give the reference equal ones.
    place_of_data = 0 if recipe == "delayed" else dist.get_rank() // meshes.size("tp")
    for turn in range(ROUNDS):
        for item in (model, reference):
            for name in FROZEN if frozen == "first" or (frozen and turn) else ():
                item.get_parameter(name).requires_grad_(False)
        x = torch.randn(SEQUENCE, BATCH, hidden, generator=torch.Generator().manual_seed(place_of_data))
        _compare(findings, f"round {turn}", model, reference, x, strategy, broken)
    trained_names = {name for name, p in reference.named_parameters() if p.requires_grad}
    assert {name for name, p in model.named_parameters() if p.requires_grad} == trained_names
    if strategy == "bound":
        of_te = [p for name, p in model.named_parameters() if not name.endswith("scale")]
        assert all(_torch.local_of(p).requires_grad == p.requires_grad for p in of_te)
    return findings.settle(ROUNDS * (2 + len(trained_names)))


def _shard(model: Any, meshes: Any, strategy: str) -> None:
    """Shard a model as `trained` says, and initialise it."""
    import te_fsdp

    if strategy == "bound":
        te_fsdp.set_device_mesh(model, meshes.tp, meshes.weight)
    elif strategy == "torch":
        mesh = init_device_mesh(harness.device_type(), (2, 1), mesh_dim_names=("dp", "tp"))
        te_fsdp.set_device_mesh(model, mesh["tp"], mesh["dp"])
        for unit in (*model.blocks, model):
            fully_shard(unit, mesh=mesh["dp"])
    else:
        te_fsdp.fully_shard(model, meshes, units="blocks.*", strategy=strategy)
    te_fsdp.materialize(model, seed=SEED)


def _built(way: Way, recipe: str, weights: str, device: Any, **kwargs: Any) -> nn.Module:
    import transformer_engine.pytorch as te

    made, quantized = recipe_of(recipe), weights == "quantized"
    options = {"params_dtype": torch.float32 if weights == "fp32" else torch.bfloat16, "device": device}
    with te.quantized_model_init(enabled=True, recipe=made) if quantized else nullcontext():
        return Net(way, made, **options, **kwargs)


def _compare(
    findings: Findings,
    when: str,
    model: nn.Module,
    reference: nn.Module,
    x: torch.Tensor,
    strategy: str,
    broken: str,
) -> None:
    """Compare one forward and backward of both on this rank's data."""
    import te_fsdp
    from te_fsdp.upstream import torch_dtensor as _torch

    dtype = next(reference.parameters()).dtype
    tolerance, why = (
        (FP32, "fp32 sums in a different order") if dtype == torch.float32 else (BF16, "bf16 roundings")
    )
    seen = []
    for item in (model, reference):
        own = x.to(harness.device(), dtype, copy=True).requires_grad_()
        output = item(own)
        output.float().square().mean().mul(output.shape[-1]).backward()
        seen.append((output.detach(), own.grad))
    for what, actual, stock in zip(("output", "input gradient"), *seen, strict=True):
        findings.attempt(findings.close, f"{when}: {what}", actual, stock, tolerance, why)
    expected = {
        name: p.grad.double() if strategy == "bound" else _mean(p.grad)
        for name, p in reference.named_parameters()
        if p.requires_grad
    }
    for name, parameter, info in shards(model):
        if name not in expected:
            assert parameter.grad is None, name
            continue
        assert parameter.grad is not None, f"{when}: {name} has no gradient"
        gradient = _torch.local_of(parameter.grad)
        if broken == "gradient" and name.endswith("fc1_weight"):
            gradient.mul_(1.05)
        for box in info.boxes:
            pair = gradient[box.local_slices()], expected[name][box.original_slices()]
            findings.attempt(findings.close, f"{when}: {name}", *pair, tolerance, why)
    if strategy in ("bound", "torch"):
        model.zero_grad()
    else:
        te_fsdp.zero_grad(model)
    reference.zero_grad()


def _mean(gradient: torch.Tensor) -> torch.Tensor:
    """Average over data-parallel ranks. Collective over the world; ranks along tp have equal values."""
    total = gradient.double()
    dist.all_reduce(total)
    return total / dist.get_world_size()


def gathers(place: str = "", kind: str = "") -> list[list[int]]:
    """Return the bytes of each all-gather of MXFP8 weights, in each of three rounds."""
    import te_fsdp

    meshes = te_fsdp.Meshes.build(dp_shard=2, device_type=harness.device_type())
    model = _built(Way(place, kind), "mxfp8", "quantized", "meta", hidden=WIDE)
    te_fsdp.fully_shard(model, meshes, units="blocks.*", transport="nccl")
    te_fsdp.materialize(model, seed=SEED)
    results = []
    for _ in range(3):
        with recorded() as calls:
            x = torch.ones(SEQUENCE, BATCH, WIDE, dtype=torch.bfloat16, device=harness.device())
            model(x.requires_grad_()).sum().backward()
        results.append([call.bytes for call in calls if call.kind == "all_gather"])
        te_fsdp.zero_grad(model)
    return results
