"""Bodies: delayed scaling of BF16 weights, saved while ranks have different newest amaxes."""

from __future__ import annotations

import copy
from typing import Any

import harness
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from plain_dcp import continued

HIDDEN = 128


class Model(nn.Module):
    """A layer under delayed scaling; ``experts`` is the number of local experts, 0 for a dense layer."""

    def __init__(self, experts: int, **tp: Any) -> None:
        super().__init__()
        import transformer_engine.pytorch as te

        size = {"device": "meta", "params_dtype": torch.bfloat16}
        self.experts = experts
        self.inner = (
            te.GroupedLinear(experts, HIDDEN, HIDDEN, bias=False, **size)
            if experts
            else te.LayerNormMLP(HIDDEN, 2 * HIDDEN, set_parallel_mode=True, **size, **tp)
        )

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        import transformer_engine.pytorch as te
        from transformer_engine.common.recipe import DelayedScaling

        with te.autocast(enabled=True, recipe=DelayedScaling(amax_history_len=4)):
            return self.inner(batch, [16] * self.experts) if self.experts else self.inner(batch)


class Job:
    """A sharded layer in BF16, a ``GroupedLinear`` for ``experts``, and its optimizer."""

    def __init__(
        self,
        axes: dict[str, int],
        seed: int,
        *,
        experts: bool = False,
        strategy: str = "optim_grads_params",
    ) -> None:
        import te_fsdp

        self.meshes = meshes = te_fsdp.Meshes.build(**axes, device_type=harness.device_type())
        tp = {} if meshes.tp is None else {"tp_size": meshes.tp.size(), "tp_group": meshes.tp.get_group()}
        self.model = Model(4 // axes.get("ep", 1) if experts else 0, **tp)
        te_fsdp.fully_shard(self.model, meshes, strategy=strategy)
        te_fsdp.materialize(self.model, seed=seed)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)

    def forward(self, position: int, power: int = 1) -> torch.Tensor:
        generator = torch.Generator().manual_seed(100 * position + self.meshes.data_rank)
        rows = 16 * max(1, self.model.experts)
        batch = torch.randn(rows, HIDDEN, generator=generator).to(harness.device(), torch.bfloat16)
        return self.model(batch**power)

    def step(self, position: int) -> dict[str, torch.Tensor]:
        """Return the weights and histories after a step."""
        self.forward(position).float().pow(2).mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        found = {name: harness.full(p.detach()) for name, p in self.model.named_parameters()}
        return found | continued.histories(self.model)

    def state(self, options: StateDictOptions) -> dict[str, Any]:
        model = get_model_state_dict(self.model, options=options)
        return {
            "model": model,
            "optimizer": get_optimizer_state_dict(self.model, self.optimizer, options=options),
        }


def full_state_on_one_rank(fp8: bool) -> str:
    """Return the error if rank 0 alone requests the unsharded state of a replicated model; empty without one."""
    import te_fsdp

    job = Job({"dp_shard": 2}, 0, strategy="no_shard")
    if fp8:
        job.step(0)
    te_fsdp.set_collective_timeout(1)
    try:
        if dist.get_rank() == 0:
            get_model_state_dict(job.model, options=StateDictOptions(full_state_dict=True))
    except te_fsdp.CollectiveError as error:
        return str(error)
    finally:
        te_fsdp.set_collective_timeout(1800)
    return ""


def resume(
    axes: dict[str, int], form: str, directory: str, *, evaluate: bool, **model: Any
) -> dict[str, Any]:
    """Save, take two more steps, and compare with the steps of a job that loads.

    Args:
        axes: Axes of the mesh.
        form: ``dcp``, ``async`` and ``cached`` save by DCP; ``full`` keeps rank 0's unsharded state dict.
        directory: Of the checkpoints.
        evaluate: Whether an evaluation precedes the save, whose amaxes TE has not reduced yet.
        model: Further arguments of :class:`Job`.

    Returns:
        How many histories have a newest row that differs between ranks ("unequal"), or that is not zero ("newest"), and
        names that differ after the steps.
    """
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager

    job = Job(axes, 1, **model)
    job.step(0)
    options = StateDictOptions(full_state_dict=form == "full")
    caching = DefaultSavePlanner(enable_plan_caching=True)
    if form == "cached":  # the later plan is unchanged, so that the coordinator uses the plan of this save
        dcp.save(job.state(options), checkpoint_id=f"{directory}/earlier", planner=caching)
    job.step(1)
    if evaluate:
        with torch.no_grad():
            job.forward(2, power=3 + 2 * job.meshes.data_rank)  # the last rank has the largest values
    rows = {k: v[0] for k, v in continued.histories(job.model).items() if k.endswith("history")}
    own = [row.tolist() for row in rows.values()]
    by_rank: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(by_rank, own)
    state = copy.deepcopy(job.state(options)) if form == "full" else job.state(options)
    if form == "async":
        group = dist.new_group(backend="gloo")
        dcp.async_save(state, checkpoint_id=f"{directory}/it", process_group=group).result()
    elif form != "full":
        planner = caching if form == "cached" else None
        dcp.save(state, checkpoint_id=f"{directory}/it", planner=planner)
    expected = [job.step(3), job.step(4)]
    FP8GlobalStateManager.reset()  # models would roll each other's amax histories
    job = Job(axes, 5, **model)
    if form != "full":
        state = job.state(options)
        dcp.load(state, checkpoint_id=f"{directory}/it")
    elif dist.get_rank():
        state = {"model": {}, "optimizer": {}}
    options.broadcast_from_rank0 = form == "full"
    set_model_state_dict(job.model, state["model"], options=options)
    set_optimizer_state_dict(job.model, job.optimizer, state["optimizer"], options=options)
    found = [job.step(3), job.step(4)]
    FP8GlobalStateManager.reset()
    return {
        "unequal": sum(len({str(o[n]) for o in by_rank}) > 1 for n in range(len(own))),
        "newest": sum(any(row) for row in own),
        "differ": [k for a, b in zip(expected, found, strict=True) for k in a if not torch.equal(a[k], b[k])],
    }
