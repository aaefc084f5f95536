"""Body: FSDP2's public communication settings, changed on te_fsdp's units, compared with one process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import harness
import torch
from torch.distributed.fsdp import FSDPModule

import te_fsdp
from strategies.models import batch, one_process, sharded

MICROBATCHES = 2


def _double(gradient: torch.Tensor) -> None:
    gradient.mul_(2)


#: Calls on every unit, by the name of a case.
SETTINGS: dict[str, dict[str, tuple[Any, ...]]] = {
    "manual finalization": {},  # a call on the root
    "own group of reductions": {"set_separate_reduce_scatter_group": ()},
    "more buffers": {"set_reduce_scatter_max_input_buffers": (3,)},
    "unused parameters": {"set_reduce_scatter_unused_params": (True,)},
    "kept after forward": {"set_reshard_after_forward": (False,)},
    "freed after forward": {"set_reshard_after_forward": (True,)},
    "kept after backward": {"set_reshard_after_backward": (False,)},
    "sums": {"set_gradient_divide_factor": (1.0,), "set_force_sum_reduction_for_comms": (True,)},
    "hook": {"set_all_reduce_hook": (_double,)},
}


def is_available(setting: str) -> bool:
    """Return whether this version of torch has the methods of a case."""
    methods = SETTINGS[setting] or ("set_manual_backward_finalization",)
    return all(hasattr(FSDPModule, method) for method in methods)


def _set(model: Any, setting: str) -> None:
    for unit in model.modules():
        if isinstance(unit, FSDPModule):
            for method, args in SETTINGS[setting].items():
                getattr(unit, method)(*args)
    if not SETTINGS[setting]:
        model.set_manual_backward_finalization(True)


def compare_with_setting(
    setting: str,
    axes: dict[str, int],
    strategy: str | Mapping[str, str],
    forgets: bool = False,
    spoils: bool = False,
) -> dict[str, float]:
    """Train three steps of two microbatches, the second and third with the setting.

    Returns the relative errors of outputs and weights. ``forgets`` leaves out the call of ``finalize_backward``.
    ``spoils`` doubles the reference's gradients.
    """
    meshes = te_fsdp.Meshes.build(**axes, device_type=harness.device_type())
    model: Any = sharded(meshes, strategy)
    reference = one_process()
    ours, theirs = (
        torch.optim.SGD([p for p in m.parameters() if p.requires_grad], lr=0.1) for m in (model, reference)
    )
    errors: dict[str, float] = {}
    factor = 1.0
    for step in range(3):
        if step == 1:
            _set(model, setting)
            factor = {"sums": float(meshes.data_size), "hook": 2.0}.get(setting, 1.0)
            factor *= 1 + spoils
        data = batch(step, meshes.data_size, MICROBATCHES)
        for number, x in enumerate(data):
            with te_fsdp.microbatch(model, is_last=number == MICROBATCHES - 1):
                model(x[meshes.data_rank]).square().mean().backward()
            (reference(x.flatten(0, 1)).square().mean() * factor).backward()
        if step and setting == "manual finalization" and not forgets:
            model.finalize_backward()
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            mine, wanted = model(data[0][0]), reference(data[0][0])
        errors[f"output of step {step}"] = float((mine - wanted).norm() / wanted.norm())
    for (name, p), r in zip(model.named_parameters(), reference.parameters(), strict=True):
        errors[name] = float((harness.full(p.detach()) - harness.full(r)).norm() / harness.full(r).norm())
    return errors
