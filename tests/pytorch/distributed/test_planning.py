"""Plans, compared with the measured memory of ranks that train.

Parameters are compared row by row, then gradients, then the optimizer's state.
"""

from __future__ import annotations

import os
import weakref

import harness
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import te_fsdp
from te_fsdp.planning import Job, Sizes, plan
from te_fsdp.upstream import fsdp2_patches as _fsdp2_patches
from te_fsdp.upstream.torch_dtensor import local_of

HIDDEN, FFN, TOKENS = 128, 256, 64


class Model(nn.Module):
    """Two layers and a head of 10 rows, which divide among no ranks but two and five."""

    def __init__(self, meshes: te_fsdp.Meshes) -> None:
        super().__init__()
        import transformer_engine.pytorch as te

        cut = {**meshes.te_kwargs(), "set_parallel_mode": True, "sequence_parallel": meshes.size("tp") > 1}
        options = {"params_dtype": torch.bfloat16, "device": "meta", "bias": False}
        self.layers = nn.ModuleList(
            te.LayerNormMLP(HIDDEN, FFN, activation="swiglu", **options, **cut) for _ in range(2)
        )
        self.head = nn.Linear(HIDDEN, 10, bias=False, dtype=torch.bfloat16, device="meta")
        self.head.weight.sequence_parallel = meshes.size("tp") > 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def size_of(tensor: torch.Tensor) -> int:
    local = local_of(tensor)
    return local.numel() * local.element_size()


def body(sizes: dict, options: dict, policy: bool) -> dict:
    """Train a step of the job, then end it, and plan it."""
    dist.init_process_group(harness.backend())
    rank = dist.get_rank()
    precision = te_fsdp.MixedPrecisionPolicy() if policy else None
    job = Job(Model, units=("layers.*",), sequence=TOKENS, precision=precision, **options)
    import transformer_engine.common.recipe as recipes
    import transformer_engine.pytorch as te

    names = {"current": "Float8CurrentScaling", "mxfp8": "MXFP8BlockScaling"}
    recipe = getattr(recipes, names[job.recipe])() if job.recipe != "none" else None
    meshes = te_fsdp.Meshes.build(**sizes, device_type=harness.device_type())
    with te.quantized_model_init(enabled=job.quantized_weights, recipe=recipe):
        model = Model(meshes)
    te_fsdp.fully_shard(
        model,
        meshes,
        units=job.units,
        strategy=job.strategy,
        outer_strategy=job.outer_strategy,
        precision=precision,
    )
    te_fsdp.materialize(model, seed=0)
    if job.optimizer == "adamw":
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters())
    else:
        optimizer = te.optimizers.FusedAdam(model.parameters(), master_weights=True)
    te_fsdp.main_weights(model, optimizer)
    if job.outer_strategy == "optim":
        te_fsdp.shard_optimizer(optimizer)
    torch.manual_seed(torch.distributed.get_rank())  # each rank has other tokens
    x = torch.randn(TOKENS // sizes.get("tp", 1), HIDDEN, device=harness.device(), dtype=torch.bfloat16)
    with te.autocast(enabled=recipe is not None, recipe=recipe):
        y = model(x)
    y.float().sum().backward()
    gradients = sum(size_of(p.grad) for p in model.parameters())
    optimizer.step()
    states = [v for state in optimizer.state.values() for v in state.values() if isinstance(v, torch.Tensor)]
    state = sum(size_of(v) for v in states if v.numel() > 1)
    report = te_fsdp.report(model)
    dist.destroy_process_group()
    if rank:
        return {}
    found = plan(job, Sizes(**{**sizes, "dp_shard": sizes["dp_shard"]}))
    planned = found.held_bytes - sum(
        size for words, size in found.held.items() if words.startswith("weights")
    )
    return {
        "rows": [(mine, theirs) for mine, theirs in zip(report, found.report, strict=True) if mine != theirs],
        "costs": (report.costs, found.report.costs),
        "gradients": (gradients, found.gradients),
        "state": (state, planned),
    }


FP8 = {"recipe": "current", "quantized_weights": True}
CASES = {
    "fp8-tp": ({"dp_shard": 2, "tp": 2}, {**FP8, "optimizer": "fused-adam"}, False),
    "mxfp8-hfsdp": (
        {"dp_replicate": 2, "dp_shard": 2},
        {"recipe": "mxfp8", "quantized_weights": True, "outer_strategy": "optim"},
        True,
    ),
    "uneven": ({"dp_shard": 4}, {"strategy": "optim"}, True),
}


@pytest.mark.ranks(4)
@pytest.mark.arch("9.0", "10.0")
def test_plan_of_float8_transposes(pool, arch):
    """Check Hopper, which keeps float8 weights rowwise and columnwise."""
    check(pool, "fp8-tp")


@pytest.mark.ranks(4)
@pytest.mark.parametrize("case", [pytest.param("mxfp8-hfsdp", marks=pytest.mark.recipe("mxfp8")), "uneven"])
def test_planned_memory_equals_measured_memory(pool, case):
    check(pool, case)


def check(pool, case):
    sizes, options, policy = CASES[case]
    first, *_ = pool.run(body, 4, init_group=False, sizes=sizes, options=options, policy=policy)
    assert first["rows"] == [] and first["costs"][0] == first["costs"][1]
    for what in ("gradients", "state"):
        real, planned = first[what]
        assert planned == pytest.approx(real, rel=0.01), (what, real, planned)


# --- the peak of a step


class Products(nn.Module):
    """Three units of two large products each, and a head: what their weights and gradients take is nearly all."""

    def __init__(self, meshes: te_fsdp.Meshes) -> None:
        super().__init__()
        options = {"bias": False, "dtype": torch.bfloat16, "device": "meta"}
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(FFN, 4 * FFN, **options), nn.Linear(4 * FFN, FFN, **options))
            for _ in range(3)
        )
        self.head = nn.Linear(FFN, 2 * FFN, **options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Memory(TorchDispatchMode):
    """Return the largest total of storages beyond a model's shards, measured after every operation."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.held = {local_of(p).untyped_storage()._cdata for p in model.parameters()}
        self.live: dict[int, weakref.ref] = {}
        self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, torch.Tensor) and tensor.device.type == "cpu":
                storage = tensor.untyped_storage()
                if storage._cdata not in self.held:
                    self.live[storage._cdata] = weakref.ref(storage)
        # FSDP2 empties storages of gathered parameters.
        alive = {key: ref for key, ref in self.live.items() if ref() is not None}
        self.live, self.peak = alive, max(self.peak, sum(ref().nbytes() for ref in alive.values()))
        return made


FP32 = {"main_params_dtype": torch.float32, "main_grads_dtype": torch.float32, "param_dtype": torch.bfloat16}
PEAKS = {
    "bf16": {"microbatches": 2},
    "optim": {"microbatches": 2, "strategy": "optim"},
    "fp32 main weights": {"precision": FP32},
}


def peaks(cases: list[str], copies: bool = False) -> dict[str, tuple[int, int]]:
    """Return for each case the memory of forwards and backwards of a later step: measured, and planned.

    Args:
        cases: Keys of ``PEAKS``.
        copies: Whether weights and gradients of full shards are copied, as FSDP2 alone does.
    """
    sizes = {"dp_replicate": int(os.environ["WORLD_SIZE"]), "dp_shard": 1}
    jobs, measured = {}, {}
    dist.init_process_group("gloo")
    meshes = te_fsdp.Meshes.build(**sizes, device_type="cpu")
    for case in cases:
        fields = dict(PEAKS[case])
        if policy := fields.pop("precision", None):
            fields["precision"] = te_fsdp.MixedPrecisionPolicy(**policy)
        jobs[case] = Job(
            Products, units=("layers.*",), sequence=4, vocabulary=0, optimizer="fused-adam", **fields
        )
        measured[case] = peak_of_a_step(jobs[case], meshes, copies)
    rank = dist.get_rank()
    dist.destroy_process_group()
    plans = {case: plan(job, Sizes(**sizes)) for case, job in jobs.items()} if rank == 0 else {}
    beyond = {case: p.peak.bytes - p.held_bytes - p.peak.parts["workspaces"] for case, p in plans.items()}
    return {case: (measured[case], size) for case, size in beyond.items()}


def peak_of_a_step(job: Job, meshes: te_fsdp.Meshes, copies: bool) -> int:
    model = Products(meshes)
    stock = _fsdp2_patches.alias_single_rank_shards
    if copies:
        _fsdp2_patches.alias_single_rank_shards = lambda unit: None
    try:
        te_fsdp.fully_shard(
            model, meshes, units=job.units, strategy=job.strategy, precision=job.precision, check_inputs=False
        )
    finally:
        _fsdp2_patches.alias_single_rank_shards = stock
    te_fsdp.materialize(model, seed=0)
    for _ in range(2):  # the first one has separate buffers
        for parameter in model.parameters():
            parameter.grad = None
        with Memory(model) as memory:
            for number in range(job.microbatches):
                with te_fsdp.microbatch(model, is_last=number == job.microbatches - 1):
                    x = torch.ones(4, FFN, dtype=torch.bfloat16, requires_grad=True)
                    model(x).sum().backward()
    return memory.peak


@pytest.mark.cpu
@pytest.mark.ranks(1)
def test_peak_memory_with_a_shard_axis_of_size_one(pool):
    """Check that neither weights nor gradients are copied or planned."""
    (found,) = pool.run(peaks, 1, init_group=False, cases=list(PEAKS))
    for case, (real, planned) in found.items():
        assert planned == pytest.approx(real, rel=0.01), (case, real, planned)
    (found,) = pool.run(peaks, 1, init_group=False, cases=["bf16"], copies=True)
    real, planned = found["bf16"]
    assert real > 1.3 * planned  # what it looks at sees copies


@pytest.mark.cpu
@pytest.mark.ranks(2)
def test_peak_memory_of_hsdp(pool):
    """Check HSDP's gradient buffers, which are freed when the reduced gradients exist."""
    found, _ = pool.run(peaks, 2, init_group=False, cases=["fp32 main weights"])
    real, planned = found["fp32 main weights"]
    assert planned == pytest.approx(real, rel=0.01), (real, planned)


# --- a plan before training, in the same processes


def planned_then_trained(sizes: dict, plans: bool) -> list[torch.Tensor]:
    """Train a step, after a plan of the same mesh if ``plans``; return the unsharded weights."""
    if plans:
        plan(Job(Products, units=("layers.*",), sequence=4, vocabulary=0), Sizes(**sizes))
    dist.init_process_group(harness.backend())
    meshes = te_fsdp.Meshes.build(**sizes, device_type=harness.device_type())
    model = Products(meshes)
    te_fsdp.fully_shard(model, meshes, units=("layers.*",), check_inputs=False)
    te_fsdp.materialize(model, seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    x = torch.ones(4, FFN, dtype=torch.bfloat16, device=harness.device())
    model(x).float().square().sum().backward()
    optimizer.step()
    weights = [p.full_tensor().detach().cpu() for p in model.parameters()]
    dist.destroy_process_group()
    return weights


@pytest.mark.ranks(2)
def test_training_after_a_plan_of_the_same_mesh(pool):
    """A plan is rank 0's. DTensor's cached results would bring its coordinates into the job's equal mesh."""
    results = [
        pool.run(planned_then_trained, 2, init_group=False, sizes={"dp_shard": 2}, plans=plans)
        for plans in (False, True)
    ]
    (expected, _), (first, second) = results
    assert all(map(torch.equal, first, expected)) and all(map(torch.equal, second, expected))
