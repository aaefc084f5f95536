"""Bodies: checkpoints between sharding strategies."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import harness
import torch
import torch.distributed as dist

from checkpointing.bodies import BEFORE, differing
from checkpointing.models import Case, Model, Run


@dataclass(frozen=True)
class Sharding:
    """How a model is sharded.

    Attributes:
        name: of the way.
        axes: mesh axes.
        options: of `fully_shard`.
        kept: names of modules that `fsdp_no_shard` leaves unsharded.
        wide: whether a precision policy makes bf16 parameters fp32 main weights.
    """

    name: str
    axes: dict[str, int]
    options: dict[str, Any] = field(default_factory=dict)
    kept: tuple[str, ...] = ()
    wide: bool = False


class Sharded(Run):
    """A run sharded in some way, with AdamW; over bf16 parameters it has main weights."""

    def __init__(self, case: Case, way: Sharding, seed: int) -> None:
        import te_fsdp

        self.case, self.recipe, self.position = case, None, 0
        self.meshes = te_fsdp.Meshes.build(**way.axes, device_type=harness.device_type())
        self.model = Model(case, "meta", **self.meshes.te_kwargs())
        te_fsdp.fsdp_no_shard([self.model.get_submodule(name) for name in way.kept])
        policy = te_fsdp.MixedPrecisionPolicy() if way.wide else None
        te_fsdp.fully_shard(self.model, self.meshes, precision=policy, **way.options)
        te_fsdp.materialize(self.model, seed=seed)
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=2e-3)
        if way.options.get("outer_strategy") == "optim":
            te_fsdp.shard_optimizer(self.optimizer)
        elif case.dtype == torch.bfloat16 and not way.wide:
            te_fsdp.main_weights(self.model, self.optimizer)


def whole_state(run: Run) -> dict[str, torch.Tensor]:
    """Return main weights (or parameters without them) and state, unsharded, by name. Collective."""
    results = {}
    for name, parameter in run.model.named_parameters():
        state = run.optimizer.state.get(parameter, {})
        results[name] = harness.full(state.get("master_param", parameter.detach()))
        results |= {
            f"{name}.{key}": harness.full(v) for key, v in sorted(state.items()) if key != "master_param"
        }
    return results


def save_and_load_each(case: Case, ways: list[Sharding], directory: str) -> dict[str, Any]:
    """Save in each way, load what the one before saved, compare logical values bit for bit."""
    import te_fsdp

    for way in ways:
        run = Sharded(case, way, seed=0)
        run.steps(BEFORE)
        te_fsdp.checkpoint.save(f"{directory}/{way.name}", run.model, run.optimizer)
        expected = whole_state(run)
        if dist.get_rank() == 0:
            torch.save(expected, f"{directory}/{way.name}.pt")
    results = {}
    dist.barrier()
    for source, target in zip([ways[-1], *ways], ways, strict=False):
        expected = torch.load(f"{directory}/{source.name}.pt", weights_only=True)
        run = Sharded(case, target, seed=1)
        fresh = differing(expected, whole_state(run))
        loaded = te_fsdp.checkpoint.load(f"{directory}/{source.name}", run.model, run.optimizer)
        outcome = {"wrong": differing(expected, whole_state(run)), "fresh": len(fresh), "left": loaded.left}
        outcome["converted"] = loaded.converted
        results[f"{source.name} -> {target.name}"] = outcome
    return results
