"""Bodies: weights whose rows do not divide into full blocks, or not at all, over the FSDP ranks."""

from __future__ import annotations

import time
from typing import Any

import harness
import torch
import torch.distributed as dist
from torch import nn

from quantization import bodies
from quantization.models import SEQUENCE, recipe_of


class Pair(nn.Module):
    """Column-parallel then row-parallel linear: weights (middle, hidden) and (hidden, middle)."""

    def __init__(self, hidden: int, middle: int, device: Any, **kwargs: Any) -> None:
        super().__init__()
        import transformer_engine.pytorch as te

        common = {"params_dtype": torch.bfloat16, "device": device, "bias": True, **kwargs}
        self.first = te.Linear(hidden, middle, parallel_mode="column", **common)
        self.second = te.Linear(middle, hidden, parallel_mode="row", **common)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


def pair(recipe: str, hidden: int, middle: int, device: Any, **kwargs: Any) -> Pair:
    """Return a pair with quantized weights, from the current random state unless on meta."""
    import transformer_engine.pytorch as te

    with te.quantized_model_init(enabled=True, recipe=recipe_of(recipe)):
        return Pair(hidden, middle, device, **kwargs)


def training(
    recipe: str,
    hidden: int,
    middle: int,
    *,
    dp_replicate: int = 1,
    tp: int = 1,
    meta: bool = True,
    reshard: bool = True,
    steps: int = bodies.STEPS,
) -> dict[str, Any]:
    """Train stock TE in one process, and a sharded pair.

    Returns:
        Losses of both, the tolerances, placements and notes of the report, and numbers of bit-exact comparisons: of
        the initial bytes with stock TE's, of gathered weights with the quantized gathered main weights.
    """
    import te_fsdp

    if harness.device_type() == "cpu":
        # Uninitialized memory is NaN then: in it a rank without rows could find the right scale by chance.
        torch.use_deterministic_algorithms(True, warn_only=True)
    meshes = te_fsdp.Meshes.build(dp_replicate=dp_replicate, tp=tp, device_type=harness.device_type())
    torch.manual_seed(bodies.SEED)
    reference = pair(recipe, hidden, middle, harness.device())
    if meta:
        model = pair(recipe, hidden, middle, "meta", **meshes.te_kwargs())
        te_fsdp.fully_shard(model, meshes, reshard_after_forward=reshard)
        te_fsdp.materialize(model, seed=bodies.SEED)
    else:
        assert tp == 1, "stock TE draws another initialisation on every tp rank"
        torch.manual_seed(bodies.SEED)
        model = pair(recipe, hidden, middle, harness.device())
        te_fsdp.fully_shard(model, meshes, reshard_after_forward=reshard)
    rows = {row.name: row for row in te_fsdp.report(model)}
    outcome: dict[str, Any] = {
        "placements": {name: row.placements for name, row in rows.items() if name.endswith("weight")},
        "local": {name: row.local_shape for name, row in rows.items() if name.endswith("weight")},
        "notes": {name: row.note for name, row in rows.items() if name.endswith("weight")},
        "initial": _initial_weights_agree(model, reference),
        "losses": [],
        "gathered": 0,
    }
    step = bodies.Stepper(model, recipe, meshes, False)
    batch = _batch(hidden, meshes.size("dp_replicate") * meshes.size("dp_shard"))
    outcome["reference"] = bodies.losses_of_one_process(reference, recipe, batch, steps)
    for _ in range(steps):
        outcome["losses"].append(step(*batch))
        outcome["gathered"] += _gathered_weights_agree(model)
    outcome["tolerances"] = bodies.tolerances(outcome["reference"], hidden)
    return outcome


def _batch(hidden: int, copies: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return as many samples as data-parallel ranks; the same on every rank."""
    generator = torch.Generator().manual_seed(5)
    data = torch.randn((2, SEQUENCE, copies, hidden), generator=generator).bfloat16().to(harness.device())
    return data[0], data[1]


def _initial_weights_agree(model: nn.Module, reference: nn.Module) -> int:
    """Compare every shard, if it is not empty, bit for bit with stock TE's quantized weight.

    Returns:
        Number of rectangles compared.
    """
    from te_fsdp.shard_info import shard_info
    from te_fsdp.upstream import torch_dtensor as _torch

    whole, names = dict(reference.named_parameters()), {id(p): n for n, p in model.named_parameters()}
    checks = harness.Comparisons()
    for module, name, parameter in bodies.quantized_weights(model):
        values = whole[names[id(parameter)]].dequantize(dtype=torch.float32)
        local = _torch.local_of(parameter).dequantize(dtype=torch.float32)
        for box in shard_info(module, name, parameter).boxes:
            checks.bitwise_equal(name, local[box.local_slices()], values[box.original_slices()])
    return checks.real


def _gathered_weights_agree(model: Pair) -> int:
    """Check that unsharded weights have equal values and scales on all FSDP ranks, and contain each rank's shard.

    Returns:
        Number of weights compared.
    """
    from te_fsdp.layout import chunk_range
    from te_fsdp.shard_info import shard_info
    from te_fsdp.upstream import torch_dtensor as _torch

    owners = {"first": model.first, "second": model.second}
    shards = {}
    for name, module in owners.items():
        parameter = module._parameters["weight"]
        group = parameter.device_mesh.get_group(
            parameter.device_mesh.ndim - (1 if module.tp_size == 1 else 2)
        )
        local = _torch.local_of(parameter).dequantize(dtype=torch.float32)
        shards[name] = (shard_info(module, "weight", parameter).coordinates, local, group)
    model.unshard()  # type: ignore[operator]
    checks = harness.Comparisons()
    pairs = []
    for name, module in owners.items():
        gathered = _torch.local_of(module._parameters["weight"]).dequantize(dtype=torch.float32)
        first = gathered.clone()
        dist.broadcast(first, group_src=0, group=shards[name][2])
        pairs.append((name, gathered, first))
    for name, gathered, first in pairs:
        at, mine, _ = shards[name]
        checks.bitwise_equal(f"{name} on all ranks", gathered, first)
        low, high = chunk_range(gathered.shape[at.fsdp_dim], at.fsdp_size, at.fsdp_rank)
        checks.bitwise_equal(f"{name} shard", gathered.narrow(at.fsdp_dim, low, high - low), mine)
    model.reshard()  # type: ignore[operator]
    checks.require(len(owners))
    return len(owners)


# ---------------------------------------------------------------------------------------------- what is refused


def outcomes(recipe: str, block: int) -> list[dict[str, Any]]:
    """Build, cut, initialise and step models of every alignment on 4 ranks, by every route to shards.

    Returns:
        For each case its name, the error's type and text (``""`` if there was none), the seconds it took, and
        whether a refused model was left as it was.
    """
    # route, tp, hidden, middle in blocks: the column-parallel weight is (middle, hidden), the row-parallel one
    # (hidden, middle)
    cases = {
        "aligned": ("ours", 1, 4, 4),
        "aligned tp": ("ours", 2, 4, 4),
        "rows unfit, columns fit": ("ours", 1, 4, 3),
        "uneven": ("ours", 1, 3, 3),
        "fewer rows than ranks": ("ours", 1, 1, 1),
        "row-parallel column cut": ("ours", 2, 2, 3),
        "aligned, torch's": ("torch's", 2, 4, 4),
        "rows unfit, torch's": ("torch's", 1, 4, 3),
        "rows unfit, torch's with a placement": ("torch's with a placement", 1, 4, 3),
        "uneven, torch's": ("torch's", 1, 3, 3),
        "aligned tp alone": ("tp", 4, 4, 4),
        "row-parallel column cut, tp alone": ("tp", 4, 4, 6),
    }
    # The first model of each mesh on GPUs waits for TE's kernels and NCCL's communicators.
    for name in ("aligned", "aligned tp", "aligned tp alone") if harness.device_type() == "cuda" else ():
        route, tp, hidden, middle = cases[name]
        _outcome(recipe, route, tp, hidden * block, middle * block)
    results = []
    for name, (route, tp, hidden, middle) in cases.items():
        start = time.monotonic()
        result = {"case": name, "error": "", "text": "", "untouched": None}
        result |= _outcome(recipe, route, tp, hidden * block, middle * block)
        dist.barrier()
        results.append(result | {"seconds": time.monotonic() - start})
    return results


def _outcome(recipe: str, route: str, tp: int, hidden: int, middle: int) -> dict[str, Any]:
    import te_fsdp
    from te_fsdp.records import binding_of

    meshes = te_fsdp.Meshes.build(tp=tp, device_type=harness.device_type())
    model = pair(recipe, hidden, middle, "meta", **meshes.te_kwargs())
    try:
        _shard(model, meshes, route)
        te_fsdp.materialize(model, seed=bodies.SEED)
        torch.manual_seed(bodies.SEED)
        compared = _initial_weights_agree(model, pair(recipe, hidden, middle, harness.device()))
        assert compared >= 2, compared
        loss = bodies.Stepper(model, recipe, meshes, False)(*_batch(hidden, meshes.size("dp_shard")))
        assert 0 < loss < 10, loss
    except te_fsdp.TeFsdpError as error:
        untouched = all(p.is_meta for p in model.parameters()) and binding_of(model.first) is None
        return {"error": type(error).__name__, "text": str(error), "untouched": untouched}
    return {}


def _shard(model: Pair, meshes: Any, route: str) -> None:
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard

    import te_fsdp

    if route == "ours":
        te_fsdp.fully_shard(model, meshes)
        return
    tells = (
        route != "torch's" or meshes.size("tp") > 1
    )  # where it does, a hopeless cut is refused even sooner
    te_fsdp.set_device_mesh(model, tp_mesh=meshes.tp, weight_mesh=meshes.weight if tells else None)
    if route == "tp":
        return
    first = model.first._parameters["weight"]
    told = (
        {"shard_placement_fn": lambda p: Shard(1) if p is first else None}
        if route.endswith("placement")
        else {}
    )
    fully_shard(model, mesh=meshes.fsdp_with_size_one, **told)


# ------------------------------------------------------------------------------------------------- other routes


def train_with_tp_only(recipe: str, hidden: int, middle: int) -> dict[str, Any]:
    """Run :func:`training` on tensor parallelism without FSDP2."""
    import te_fsdp

    meshes = te_fsdp.Meshes.build(tp=dist.get_world_size(), device_type=harness.device_type())
    torch.manual_seed(bodies.SEED)
    reference = pair(recipe, hidden, middle, harness.device())
    model = pair(recipe, hidden, middle, "meta", **meshes.te_kwargs())
    te_fsdp.set_device_mesh(model, tp_mesh=meshes.tp, weight_mesh=meshes.weight)
    te_fsdp.materialize(model, seed=bodies.SEED)
    initial = _initial_weights_agree(model, reference)
    step = bodies.Stepper(model, recipe, meshes, False)
    batch = _batch(hidden, 1)
    expected = bodies.losses_of_one_process(reference, recipe, batch)
    return {
        "losses": [step(*batch) for _ in range(bodies.STEPS)],
        "reference": expected,
        "tolerances": bodies.tolerances(expected, hidden),
        "initial": initial,
        "gathered": 2 * bodies.STEPS,  # nothing is gathered
        "notes": {row.name: row.note for row in te_fsdp.report(model) if row.name.endswith("weight")},
    }


def without_shared_scale() -> None:
    """Keep the scale of a rank without rows, as stock TE's optimizer kernel does."""
    import te_fsdp
    from te_fsdp.quantized import fsdp_hooks
    from te_fsdp.upstream import torch_dtensor as _torch

    meshes = te_fsdp.Meshes.build(device_type=harness.device_type())
    model = pair("delayed", 48, 16, "meta")
    te_fsdp.fully_shard(model, meshes)
    te_fsdp.materialize(model, seed=bodies.SEED)
    stock, fsdp_hooks.share_scale = fsdp_hooks.share_scale, lambda *_: None
    try:
        local = _torch.local_of(model.first._parameters["weight"])
        if local.numel() == 0:
            local.get_metadata()["fp8_scale_inv"].fill_(3.0)
        _gathered_weights_agree(model)
    finally:
        fsdp_hooks.share_scale = stock
    if dist.get_rank() != dist.get_world_size() - 1:
        raise AssertionError("ranks with rows are right")


def on_the_device(recipe: str) -> dict[str, Any]:
    """Call the user's own ``fully_shard`` on quantized weights on the device."""
    from torch.distributed.fsdp import fully_shard

    import te_fsdp

    meshes = te_fsdp.Meshes.build(device_type=harness.device_type())
    torch.manual_seed(bodies.SEED)
    model = pair(recipe, 256, 256, harness.device())  # shards of 64 rows: MXFP8's scales have padding
    torch.manual_seed(bodies.SEED)
    reference = pair(recipe, 256, 256, harness.device())
    te_fsdp.set_device_mesh(model, weight_mesh=meshes.weight)
    try:
        fully_shard(model, mesh=meshes.fsdp)
    except te_fsdp.TeFsdpError as error:
        return {"error": type(error).__name__, "text": str(error)}
    compared = _initial_weights_agree(model, reference)
    _gathered_weights_agree(model)
    return {"error": "", "text": "", "compared": compared}


# -------------------------------------------------------------------------------------------------- checkpoints


def saved(recipe: str, hidden: int, middle: int, directory: str, *, tp: int = 1) -> int:
    """Train, save, and load into a differently initialized model on the same mesh.

    The logical state goes to ``directory`` too, for :func:`loaded`.

    Returns:
        Number of tensors compared bit for bit.
    """
    from checkpointing.bodies import logical_state

    import te_fsdp

    run = _trained(recipe, hidden, middle, tp, steps=2)
    te_fsdp.checkpoint.save(f"{directory}/checkpoint", run.model, run.optimizer)
    state = logical_state(run)
    if dist.get_rank() == 0:
        torch.save(state, f"{directory}/state.pt")
    dist.barrier()
    return loaded(recipe, hidden, middle, directory, tp=tp)


def loaded(recipe: str, hidden: int, middle: int, directory: str, *, tp: int = 1) -> int:
    """Load the checkpoint of :func:`saved` on a different mesh. Logical values are equal, and training continues."""
    from checkpointing.bodies import logical_state

    import te_fsdp

    run = _trained(recipe, hidden, middle, tp, steps=1, seed=99)
    te_fsdp.checkpoint.load(f"{directory}/checkpoint", run.model, run.optimizer)
    expected, checks = torch.load(f"{directory}/state.pt"), harness.Comparisons()
    for name, value in logical_state(run).items():
        if name in expected and value.shape == expected[name].shape and value.numel() > 1:
            checks.bitwise_equal(name, value, expected[name])
    checks.require(8)  # two weights and two biases, main weights and moments of the weights
    assert 0 < run(*_batch(hidden, run.meshes.size("dp_shard"))) < 10
    _gathered_weights_agree(run.model)
    return checks.real


def _trained(recipe: str, hidden: int, middle: int, tp: int, *, steps: int, seed: int = bodies.SEED) -> Any:
    import te_fsdp

    meshes = te_fsdp.Meshes.build(tp=tp, device_type=harness.device_type())
    model = pair(recipe, hidden, middle, "meta", **meshes.te_kwargs())
    te_fsdp.fully_shard(model, meshes)
    te_fsdp.materialize(model, seed=seed)
    run = bodies.Stepper(model, recipe, meshes, False)
    for _ in range(steps):
        run(*_batch(hidden, meshes.size("dp_shard")))
    return run
