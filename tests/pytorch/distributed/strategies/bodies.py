"""Bodies: training by every strategy, mesh or loop against one process, by value."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import harness
import torch
import torch.distributed as dist
from torch import nn

from strategies.cases import MESHES, Case
from strategies.models import batch, one_process, optimizer_of, sharded

STEPS = 2
#: Below the norms of the first steps, so that all are clipped.
MAX_NORM = 0.05
RTOL = 1e-5
WHY = "fp32 sums of at most 300 terms in a different order: 300 * 2^-24 = 1.8e-5 at most, their random walk 1e-6"


def training(cases: list[dict[str, Any]], broken: str = "") -> list[dict[str, Any]]:
    """Run several cases one after the other; name the first that fails.

    Args:
        cases: Fields of :class:`Case`.
        broken: Name of a fault to bring in, see :data:`FAULTS`.
    """
    outcomes = []
    for fields in cases:
        case = Case(**fields)
        try:
            outcomes.append(_train(case, broken))
        except AssertionError as error:
            raise AssertionError(f"{case}: {error}") from error
    return outcomes


def _train(case: Case, broken: str) -> dict[str, Any]:
    import te_fsdp

    replicate, shard = MESHES[case.mesh]
    meshes = te_fsdp.Meshes.build(
        dp_replicate=replicate, dp_shard=shard, tp=case.tp, device_type=harness.device_type()
    )
    outer = "optim" if case.outer == "hfsdp" else "no_shard"
    model, reference = sharded(meshes, case.strategy, outer), one_process()
    optimizer, expected = optimizer_of(case.optimizer, model), optimizer_of(case.optimizer, reference)
    if outer == "optim":
        te_fsdp.shard_optimizer(optimizer)
    copies, place = replicate * shard, dist.get_rank() // case.tp
    checks = harness.Comparisons()
    with FAULTS[broken]():
        for step in range(STEPS):
            inputs = batch(step, copies, case.microbatches)
            run(model, inputs[:, place], "more" if broken == "unreduced" else case.loop)
            run_one_process(reference, inputs)
            if broken == "sum":
                te_fsdp.scale_gradients(model, float(copies))
            if outer == "no_shard":
                compare(checks, f"step {step}: gradient of", gradients(model), gradients(reference))
            norm = te_fsdp.clip_grad_norm_(model.parameters(), MAX_NORM)
            wanted = torch.nn.utils.clip_grad_norm_(reference.parameters(), MAX_NORM)
            checks.close(f"step {step}: norm", norm, wanted, RTOL, WHY)
            optimizer.step()
            expected.step()
            optimizer.zero_grad()
            expected.zero_grad()
            compare(checks, f"step {step}: updated", parameters(model), parameters(reference))
    return checks.require(STEPS * (len(list(model.parameters())) + 1))


def run(model: nn.Module, inputs: torch.Tensor, loop: str) -> None:
    """Run forward and backward of all microbatches of one rank.

    Args:
        model: Sharded.
        inputs: Microbatches x rows x hidden.
        loop: ``"plain"``; ``"microbatch"`` or ``"no_sync"``: with a mark of the last one; ``"more"``: marked as if
            follow, which then do not come.
    """
    import te_fsdp

    for index, x in enumerate(inputs):
        last = index == len(inputs) - 1
        context: Any = contextlib.nullcontext()
        if loop == "microbatch":
            context = te_fsdp.microbatch(model, is_last=last)
        elif loop == "more":
            context = te_fsdp.microbatch(model, is_last=False)
        elif loop == "no_sync" and not last:
            context = te_fsdp.no_sync(model)
        with context:
            (loss_of(model, x) / len(inputs)).backward()


def run_one_process(reference: nn.Module, inputs: torch.Tensor) -> None:
    """Run the same for all ranks in one process."""
    for microbatch in inputs:
        for x in microbatch:
            (loss_of(reference, x) / inputs.shape[0] / inputs.shape[1]).backward()


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Return a mean over the rows."""
    return model(x).square().mean()


def parameters(model: nn.Module) -> dict[str, torch.Tensor]:
    """Name -> parameter, as the optimizer has it."""
    from te_fsdp.sharded_model import get_sharded_model

    state = get_sharded_model(model)
    return dict(model.named_parameters()) if state is None else state.parameters()


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    """Name -> gradient."""
    return {name: p.grad for name, p in parameters(model).items() if p.grad is not None}


def compare(
    checks: harness.Comparisons, what: str, ours: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]
) -> None:
    """Require equal names and close values."""
    if ours.keys() != wanted.keys():
        raise AssertionError(f"{what}: names {sorted(ours.keys() ^ wanted.keys())} on one side only")
    for name, value in wanted.items():
        checks.close(f"{what} {name}", ours[name], value, RTOL, WHY)


# --- faults


def _nothing(*args: Any, **kwargs: Any) -> None:
    pass


@contextlib.contextmanager
def patch_attributes(owner: Any, **names: Callable[..., Any]) -> Iterator[None]:
    """Set other values for attributes of a module or class in the context."""
    stock = {name: getattr(owner, name) for name in names}
    for name, value in names.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, value in stock.items():
            setattr(owner, name, value)


@contextlib.contextmanager
def _unreduced() -> Iterator[None]:
    """Remove the check before a norm and a step, so that unreduced gradients go unnoticed."""
    from te_fsdp.checks import gradients
    from te_fsdp.features import clip_grad_norm

    with (
        patch_attributes(clip_grad_norm, require_reduced=_nothing),
        patch_attributes(gradients, require_reduced=_nothing),
    ):
        yield


@contextlib.contextmanager
def _counted_twice() -> Iterator[None]:
    """Let the last reduction add gradients that earlier ones had reduced already: g1 + (g1 + g2)."""
    from te_fsdp.checks import gradients

    stock = gradients.require_reduced

    def twice(state: Any, where: str, only: Any = None) -> None:
        stock(state, where, only)
        for parameter in state.parameters().values():
            if parameter.grad is not None:
                parameter.grad.mul_(1.5)

    with patch_attributes(gradients, require_reduced=twice):
        yield


#: Name -> context that brings the fault in. "sum" and "unreduced" are also in the body's loop.
FAULTS: dict[str, Callable[[], Any]] = {
    "": contextlib.nullcontext,
    "sum": contextlib.nullcontext,
    "unreduced": _unreduced,
    "twice": _counted_twice,
}
