"""Bodies: state dicts, whose values are all tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import harness
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from checkpointing.bodies import differing, local_state, logical_state
from checkpointing.models import Case, Run
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.tensor import DTensor

#: Operations of scripts on values of a state dict that are not parameters.
CHANGES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "clone": torch.Tensor.clone,
    "bf16": torch.Tensor.bfloat16,
    "float": torch.Tensor.float,
}


def _entries(model: Any) -> dict[str, Any]:
    return {key: value for key, value in model.state_dict().items() if key.endswith("_extra_state")}


def use_all_entries(case: Case, axes: dict[str, int], directory: str) -> dict[str, Any]:
    """Count, clone and cast all values; write the entries to files, and load each kind of them back.

    Returns:
        Shapes of the entries, and how many of them have a state that came back bit for bit.
    """
    run = Run(case, axes, seed=0)
    run.steps(2)
    state = run.model.state_dict()
    assert all(isinstance(value, torch.Tensor) for value in state.values())
    entries = _entries(run.model)
    assert entries and sum(value.numel() for value in state.values()) > 0
    assert all(entry.dtype == torch.uint8 and entry.device.type == "cpu" for entry in entries.values())
    before = {k: v for k, v in local_state(run).items() if ":scaling_" in k}
    for name, change in CHANGES.items():
        changed = {key: change(value) for key, value in entries.items()}
        path = f"{directory}/{name}-{dist.get_rank()}.pt"
        torch.save(changed, path)
        other = Run(case, axes, seed=0)
        fresh = {k: v for k, v in local_state(other).items() if ":scaling_" in k}
        assert not before or differing(before, fresh), "the control"
        other.model.load_state_dict({**other.model.state_dict(), **torch.load(path, weights_only=True)})
        after = {k: v for k, v in local_state(other).items() if ":scaling_" in k}
        assert differing(before, after) == [], name
    return {"shapes": {key: tuple(value.shape) for key, value in entries.items()}, "states": len(before)}


def round_trip_of_offloaded(
    case: Case, axes: dict[str, int], directory: str, other: dict[str, int] | None
) -> int:
    """Save ``get_model_state_dict`` on the CPU by plain DCP, and load it, also onto a different mesh.

    Returns:
        Number of tensors compared.
    """
    run = Run(case, axes, seed=0)
    options = StateDictOptions(cpu_offload=True)
    dcp.save(
        {"model": get_model_state_dict(run.model, options=options)}, checkpoint_id=f"{directory}/offloaded"
    )
    fresh = Run(case, other or axes, seed=1)
    view = local_state if other is None else logical_state
    saved, untouched = view(run), view(fresh)
    state = get_model_state_dict(fresh.model)
    assert differing(saved, untouched)
    dcp.load({"model": state}, checkpoint_id=f"{directory}/offloaded")
    set_model_state_dict(fresh.model, state)
    assert differing(saved, view(fresh)) == []
    return len(saved)


def call_hooks_by_hand(recipe: str, tp: int) -> dict[str, int]:
    """Run operations of TE scripts on shards: hooks called without a module; a manual gather for comparison."""
    from te_fsdp.upstream import te as _te

    case = Case(optimizer="fused", recipe=recipe, quantized=True)
    run = Run(case, {"dp_shard": dist.get_world_size() // tp, "tp": tp}, seed=0)
    run.steps(1)
    counts = {"hooks": 0, "gathered": 0}
    whole = {}
    for name, parameter in run.model.named_parameters():
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        if not _te.is_quantized(local):
            continue
        # Stock hooks of formats that look into the module raise their own error; ours must not raise a different one
        # before.
        reached: Any = None
        try:
            local.fsdp_pre_all_gather(
                mesh=None,
                orig_size=local.shape,
                contiguous_orig_stride=local.stride(),
                module=None,
                mp_policy=None,
            )
        except (AttributeError, NotImplementedError, RuntimeError) as error:
            reached = error.__traceback__
            while reached.tb_next is not None:
                reached = reached.tb_next
            assert "transformer_engine" in reached.tb_frame.f_code.co_filename, error
        counts["hooks"] += 1
        whole[name] = harness.full(parameter)
    run.model.layer.unshard()
    for name, parameter in run.model.named_parameters():
        if name in whole:
            assert torch.equal(harness.full(parameter), whole[name]), name
            counts["gathered"] += 1
    run.model.layer.reshard()
    run.steps(1)
    return counts
