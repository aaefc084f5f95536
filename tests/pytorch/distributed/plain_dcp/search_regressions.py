"""Bodies: checkpoints at states that the random search reached."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import harness
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp


def saved_after_a_complete_backward(strategy: str) -> dict[str, Any]:
    """Save after an incomplete microbatch, which raises, and after the backward that completes it."""
    import transformer_engine.pytorch as te

    import te_fsdp

    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder, 0)
    meshes = te_fsdp.Meshes.build(dp_shard=-1, device_type=harness.device_type())
    model = torch.nn.Sequential(te.Linear(32, 32, device="meta"))
    te_fsdp.fully_shard(model, meshes, strategy=strategy)
    te_fsdp.materialize(model, seed=3)
    contexts = {
        "no_sync": lambda: te_fsdp.no_sync(model),
        "microbatch": lambda: te_fsdp.microbatch(model, is_last=False),
    }
    x, saved, refused = torch.ones(4, 32, device=harness.device()), 0, 0
    for name, context in contexts.items():
        for complete in (lambda: model(x).sum().backward(), lambda: te_fsdp.finish_grad_reduce(model)):
            with context():
                model(x).sum().backward()
            try:
                te_fsdp.checkpoint.save(Path(folder[0], "refused"), model)
            except te_fsdp.errors.OrderError:
                refused += 1
            complete()
            te_fsdp.checkpoint.save(Path(folder[0], f"{name}{saved}"), model)
            saved += 1
            te_fsdp.zero_grad(model)
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder[0])
    return {"saved": saved, "refused": refused}


def clipped_by_torch(dtype: torch.dtype, checks: str) -> dict[str, Any]:
    """Clip by torch sharded gradients and those of a no_shard module over tp, with the norm that te_fsdp computes."""
    import transformer_engine.pytorch as te

    import te_fsdp

    meshes = te_fsdp.Meshes.build(dp_shard=1, tp=2, device_type=harness.device_type())
    options = {"parallel_mode": "column", "params_dtype": dtype, "device": "meta", **meshes.te_kwargs()}
    model = torch.nn.Sequential(te.Linear(32, 32, **options), te.Linear(32, 32, **options))
    te_fsdp.fsdp_no_shard(model[0])
    te_fsdp.fully_shard(model, meshes, units=[te.Linear], checks=checks)
    te_fsdp.materialize(model, seed=3)
    x = torch.ones(4, 32, device=harness.device(), dtype=dtype)
    for layer in model:
        layer(x).float().square().mean().backward()
    ours = te_fsdp.clip_grad_norm_(model, float("inf"))
    theirs = harness.full(torch.nn.utils.clip_grad_norm_(model.parameters(), ours.item() / 2)).float()
    after = te_fsdp.clip_grad_norm_(model, float("inf"))
    return {"ours": ours.item(), "theirs": theirs.item(), "after": after.item()}


def states_of_unused_optimizers(strategy: str, grads: torch.dtype | None) -> dict[str, Any]:
    """Let torch initialize the states of an optimizer whose bf16 parameters take fp32 gradients, in reads and loads."""
    import transformer_engine.pytorch as te
    from torch.distributed.checkpoint import state_dict

    import te_fsdp

    meshes = te_fsdp.Meshes.build(dp_shard=-1, device_type=harness.device_type())
    model = torch.nn.Sequential(te.Linear(32, 32, params_dtype=torch.bfloat16, device="meta"))
    policy = te_fsdp.MixedPrecisionPolicy(main_params_dtype=None, main_grads_dtype=grads)
    te_fsdp.fully_shard(model, meshes, strategy=strategy, precision=policy)
    te_fsdp.materialize(model, seed=3)
    before = [harness.full(parameter).clone() for parameter in model.parameters()]
    read, loaded = (torch.optim.AdamW(model.parameters(), lr=0.1) for _ in range(2))
    states = state_dict.get_optimizer_state_dict(model, read)
    state_dict.set_optimizer_state_dict(model, loaded, states)
    for parameter, value in zip(model.parameters(), before, strict=True):
        assert torch.equal(harness.full(parameter), value)
    x = torch.ones(4, 32, device=harness.device(), dtype=torch.bfloat16)
    model(x).float().square().mean().backward()
    dtypes = {str(parameter.grad.dtype) for parameter in model.parameters()}
    loaded.step()
    moved = sum(
        not torch.equal(harness.full(p), value) for p, value in zip(model.parameters(), before, strict=True)
    )
    return {"dtypes": dtypes, "states": len(states["state"]), "moved": moved}


def resumed_by_plain_dcp(sharder: str, weights: str, outer: str) -> dict[str, Any]:
    """Load a trained optimizer's states by plain DCP into a new one, which has main weights or empty states only.

    The optimizers are built, and read, as scripts of plain FSDP2 do. Another mesh loads unless HFSDP saved.
    """
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder, 0)
    meshes = [{"dp_replicate": 2, "dp_shard": -1}, {"dp_shard": 2, "tp": 2}]
    saved, loaded = (_job(axes, sharder, weights, outer) for axes in (meshes[0], meshes[outer == "no_shard"]))
    values = []
    for step in range(3):
        values.append(_stepped(*saved, step))
        if step == 1:
            model, optimizer = get_state_dict(*saved)
            dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=folder[0])
    initial = [harness.full(p.full_tensor()) for p in loaded[0].parameters()]
    if weights == "fp32":
        assert not any(loaded[1].state[p] for p in loaded[0].parameters())  # reading adds empty entries
    model, optimizer = get_state_dict(*loaded)
    read = [harness.full(p.full_tensor()) for p in loaded[0].parameters()]
    state = {"model": model, "optimizer": optimizer}
    dcp.load(state, checkpoint_id=folder[0])
    set_state_dict(*loaded, model_state_dict=model, optim_state_dict=optimizer)
    values.append(_stepped(*loaded, 2))
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder[0])
    return {
        "read": all(map(torch.equal, initial, read)),
        "after": max(_distance(a, b) for a, b in zip(values[3], values[2], strict=True)),
        "control": max(_distance(a, b) for a, b in zip(values[1], values[2], strict=True)),
    }


def _distance(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).norm() / other.norm())


def _job(axes: dict[str, int], sharder: str, weights: str, outer: str) -> tuple[torch.nn.Module, Any]:
    """Return a sharded layer and its AdamW, which has main weights."""
    import contextlib

    import transformer_engine.pytorch as te
    from torch.distributed.fsdp import fully_shard
    from transformer_engine.common.recipe import Float8CurrentScaling

    import te_fsdp

    meshes = te_fsdp.Meshes.build(**axes, device_type=harness.device_type())
    quantized = te.quantized_model_init(recipe=Float8CurrentScaling())
    dtype = torch.float32 if weights == "fp32" else torch.bfloat16
    options = {"params_dtype": dtype, "device": "meta", **meshes.te_kwargs()}
    with quantized if weights == "quantized" else contextlib.nullcontext():
        model = torch.nn.Sequential(te.Linear(64, 64, parallel_mode="column", **options))
    if sharder == "torch":
        te_fsdp.set_device_mesh(model, meshes.tp, meshes.weight)
        fully_shard(model, mesh=meshes.fsdp)
    else:
        te_fsdp.fully_shard(model, meshes, outer_strategy=outer)
    te_fsdp.materialize(model, seed=3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3)
    te_fsdp.main_weights(model, optimizer)
    return model, te_fsdp.shard_optimizer(optimizer) if outer == "optim" else optimizer


def _stepped(model: torch.nn.Module, optimizer: Any, step: int) -> list[torch.Tensor]:
    """Step with gradients of ones, which are equal on every mesh; return the main weights of all ranks."""
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter) + (step + 1)
    optimizer.step()
    optimizer.zero_grad()
    mains = [optimizer.state[parameter].get("master_param", parameter) for parameter in model.parameters()]
    return [harness.full(main.detach().full_tensor()) for main in mains]
