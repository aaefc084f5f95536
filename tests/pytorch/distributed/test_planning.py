"""Plans against what ranks that train really hold: parameters row by row, gradients, and the optimizer's state."""

from __future__ import annotations

import harness
import pytest
import torch
import torch.distributed as dist
from torch import nn

import te_fsdp
from te_fsdp._torch import local_of
from te_fsdp.planning import Job, Sizes, plan

HIDDEN, FFN, TOKENS = 128, 256, 64


class Model(nn.Module):
    """Two layers and a head of 10 rows, which divide among no ranks but two and five."""

    def __init__(self, meshes: te_fsdp.Meshes) -> None:
        super().__init__()
        import transformer_engine.pytorch as te

        cut = {**meshes.te_kwargs(), "set_parallel_mode": True, "sequence_parallel": meshes.tp is not None}
        options = {"params_dtype": torch.bfloat16, "device": "meta", "bias": False}
        self.layers = nn.ModuleList(
            te.LayerNormMLP(HIDDEN, FFN, activation="swiglu", **options, **cut) for _ in range(2)
        )
        self.head = nn.Linear(HIDDEN, 10, bias=False, dtype=torch.bfloat16, device="meta")
        self.head.weight.sequence_parallel = meshes.tp is not None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def size_of(tensor: torch.Tensor) -> int:
    local = local_of(tensor)
    return local.numel() * local.element_size()


def body(sizes: dict, options: dict, policy: bool) -> dict:
    """Train a step as the job says, then end it, and plan it."""
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
def test_two_orders_of_float8(pool, arch):
    """Hopper keeps float8 weights in rows and in columns."""
    check(pool, "fp8-tp")


@pytest.mark.ranks(4)
@pytest.mark.parametrize("case", ["mxfp8-hfsdp", "uneven"])
def test_a_plan_is_what_ranks_hold(pool, case):
    check(pool, case)


def check(pool, case):
    sizes, options, policy = CASES[case]
    first, *_ = pool.run(body, 4, init_group=False, sizes=sizes, options=options, policy=policy)
    assert first["rows"] == [] and first["costs"][0] == first["costs"][1]
    for what in ("gradients", "state"):
        real, planned = first[what]
        assert planned == pytest.approx(real, rel=0.01), (what, real, planned)
