"""What is looked at once, before it costs a training run: at a model's first forward, and an optimizer's first step.

    first forward         parameters that came after ``fully_shard``, gradient hooks that never run, memory that
                          ``to_empty`` left as it was
    first backward        of a pipeline's stage: it is not split into one for inputs and one for weights
    first in each mode    all ranks that gather weights together have come (``if rank == 0: model(x)``)
    first step            the same parameters and hooks once more; optimizer state of another rank; copies of a weight
                          that differ between ranks

Nothing here is repeated in later forwards and steps, but for a comparison of two numbers.
"""

from __future__ import annotations

import functools
from collections import deque
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor

from te_fsdp import _fsdp2, _te, _torch
from te_fsdp.agree import raised_on_all_ranks
from te_fsdp.all_ranks import collective_call, is_capturing, is_simulated
from te_fsdp.errors import CheckpointError, InitError, OrderError, shorten
from te_fsdp.sharding.materialize import differing_copies
from te_fsdp.sharding.state import mark_gathered
from te_fsdp.sharding.units import refuse_hooks

if TYPE_CHECKING:
    from torch import nn

    from te_fsdp.sharding.state import ShardingState
    from te_fsdp.step_hooks import Step


def before_first_forward(state: ShardingState) -> None:
    """Look at what was done to a model between ``fully_shard`` and its first forward. Local operation.

    Raises:
        OrderError: Parameters that came after ``fully_shard``, or gradient hooks that would never run.
        InitError: Values that ``to_empty`` has left unset.
    """
    for _, unit in state.gathered():  # by hand, or by a pipeline schedule
        mark_gathered(unit)
    _refuse_new_parameters(state)
    _refuse_hooks(state)
    _refuse_unset(state)


def before_first_step(step: Step) -> None:
    """Look once at what an optimizer holds, and whether copies of weights are equal. Collective over the mesh then."""
    held = sum(len(group["params"]) for group in step.optimizer.param_groups)
    for state, parameters in step.models:
        known = state.optimizers.get(step.optimizer)
        if known == (held, id(step.optimizer.state)):  # loading puts another dict there
            continue
        if is_capturing():
            return
        with raised_on_all_ranks(state.meshes.device_mesh, step.where):
            _refuse_new_parameters(state)
            _refuse_hooks(state)
            _refuse_state_of_others(step, parameters)
        if not state.optimizers and not is_simulated():
            _refuse_differing_copies(state, step.where)
        state.optimizers[step.optimizer] = held, id(step.optimizer.state)


def _refuse_hooks(state: ShardingState) -> None:
    """Raise for gradient hooks of shards. What stays whole is hooked by what reduces its gradients."""
    reduced = state.replicated.reduced() if state.replicated is not None else set()
    refuse_hooks((name, p) for name, p in state.parameters().items() if id(p) not in reduced)


def _refuse_new_parameters(state: ShardingState) -> None:
    """Raise for trained parameters that ``fully_shard`` has not seen: nobody would average their gradients."""
    if state.meshes.device_mesh.size() == 1:
        return
    reduced = state.replicated.reduced() if state.replicated is not None else set()
    new = [
        name
        for name, p in state.parameters().items()
        if p.requires_grad and not isinstance(p, DTensor) and id(p) not in reduced
    ]
    if new:
        raise OrderError(
            f"{shorten(new, 3)}: trained, but not in the model that te_fsdp.fully_shard was given",
            expected="the parameters that the model had then",
            got=f"{len(new)} parameter(s) of a module that was added or replaced since",
            why="Nobody would average their gradients over the ranks, whose copies would drift apart",
            fix="change the model first (a new head, adapters), then call te_fsdp.fully_shard on all of it",
        )


# ------------------------------------------------------------------------------------------------- split backwards


def watch_first_backward(state: ShardingState) -> None:
    """Refuse, at the first backward of a pipeline's stage, a schedule that splits backward. Local operation.

    Zero-bubble schedules compute gradients of a stage's inputs first, and those of its weights in a second backward
    through the same graph. Modules of TransformerEngine compute both at once, and free what they have saved.
    """
    if state.meshes.pp is None or not any(_te.kind_of(module) for module in state.model.modules()):
        return
    handles: list[Any] = []

    def watch(module: nn.Module, args: Any, output: Any) -> None:
        for tensor in _torch.flatten(output)[0]:
            leaf = _parameter_leaf(tensor.grad_fn) if isinstance(tensor, torch.Tensor) else None
            if leaf is not None:
                tensor.register_hook(functools.partial(_refuse_split, handles, leaf))

    handles.append(state.model.register_forward_hook(_torch.untraced(watch)))


def _parameter_leaf(node: Any) -> Any:
    """The node of a graph that is nearest to its end and takes a parameter's gradient; ``None`` if there is none."""
    waiting, seen = deque([node]), {node}
    while waiting:
        node = waiting.popleft()
        if isinstance(getattr(node, "variable", None), torch.nn.Parameter):
            return node
        more = {inner for inner, _ in getattr(node, "next_functions", ()) if inner is not None} - seen
        waiting.extend(more)
        seen |= more
    return None


def _refuse_split(handles: list[Any], leaf: Any, gradient: torch.Tensor) -> None:
    """At a gradient of the stage's output; once a backward has been whole, nobody looks again."""
    if _fsdp2.runs_later(leaf):
        raise OrderError(
            "a backward for the inputs of a pipeline's stage alone, with another one for its weights to come",
            expected="one backward for both, as modules of TransformerEngine compute them",
            got="a schedule that splits backward (zero bubble)",
            fix="PipelineStage(..., dw_builder=lambda: lambda: None), which computes both in the first; or a schedule "
            "that does not split, such as Schedule1F1B or ScheduleInterleaved1F1B",
        )
    while handles:
        handles.pop().remove()


# ------------------------------------------------------------------------------------------------------ unset memory


def leave_unset(model: nn.Module) -> None:
    """Fill what ``to_empty`` has given memory with NaN, which :func:`before_first_forward` and any loss show."""
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            local = _torch.local_of(tensor)
            if not local.is_meta and local.is_floating_point() and not _te.is_quantized(local):
                local.fill_(float("nan"))


def _refuse_unset(state: ShardingState) -> None:
    if not state.emptied:
        return
    state.emptied = False
    unset = [
        name
        for name, tensor in [*state.parameters().items(), *state.model.named_buffers()]
        if (local := _torch.local_of(tensor)).is_floating_point()
        and local.numel()
        and not _te.is_quantized(local)
        and bool(local.isnan().all())
    ]
    if unset:
        raise InitError(
            f"{shorten(unset, 3)}: never initialised",
            expected="values after to_empty, which gives memory alone",
            got=f"{len(unset)} tensor(s) that nothing was written to",
            why="They would hold whatever the memory held",
            fix="call te_fsdp.materialize(model) in place of to_empty, or load a checkpoint",
        )


# ----------------------------------------------------------------------------------------------- modes and conversions


def meet_in_new_mode(state: ShardingState) -> None:
    """Wait for the ranks that gather with this one, in its first forward of a mode: training, evaluation, no gradients.

    A forward of one rank alone (``if rank == 0: model.eval(); model(x)``) would pair its gathers with others of the
    other ranks, and end in a hang. Collective over ``dp_shard`` then, through the store.

    Raises:
        CollectiveError: Some ranks do not come.
    """
    mode = state.model.training, torch.is_grad_enabled()
    if mode in state.modes:
        return
    mesh = state.meshes.fsdp_with_size_one["dp_shard"]
    gathers = [name for name in state.modules if state.units[name].gather == "pass"]
    if gathers and mesh.size() > 1 and not is_simulated() and not is_capturing():
        kind = "training" if mode[0] else "evaluation"
        with collective_call(f"first forward in {kind}{'' if mode[1] else ' without gradients'}", mesh):
            pass
    state.modes.add(mode)


def refuse_inference_mode(state: ShardingState) -> None:
    """Raise where weights that were first gathered under ``torch.inference_mode`` are to be trained. Local operation.

    What FSDP2 allocates in a model's first forward then can never be written to outside of that mode.
    """
    if torch.is_inference_mode_enabled():
        state.inferred = state.inferred or (bool(state.modules) and not state.roots())
    elif state.inferred:
        raise OrderError(
            f"{type(state.model).__name__}: forward after a first one under torch.inference_mode",
            expected="a first forward outside of it",
            got="gathered weights that are inference tensors",
            why="FSDP2 allocates them once, in the first forward, and torch writes to them in that mode alone",
            fix="use torch.no_grad() for evaluation before training",
        )


def refuse_conversion(state: ShardingState, fn: Any) -> None:
    """Raise where ``to(dtype)``, ``half()`` and their like would change dtypes after the first forward. Local.

    FSDP2 has allocated what it gathers into then.
    """
    if not state.roots():
        return
    kinds = {
        (p.dtype, p.device) for p in state.parameters().values() if not _te.is_quantized(_torch.local_of(p))
    }
    for dtype, device in kinds:
        became = fn(torch.empty(0, dtype=dtype, device=device)).dtype
        if became != dtype:
            raise OrderError(
                f"{type(state.model).__name__}: a conversion from {dtype} to {became} after the first forward",
                expected="dtypes that stay",
                why="FSDP2 has allocated what it gathers weights into",
                fix="build the model in that dtype, or give te_fsdp.fully_shard a precision policy",
            )


# ------------------------------------------------------------------------------------------------- states and copies


def _refuse_state_of_others(step: Step, parameters: list[torch.Tensor]) -> None:
    """Raise for state that another rank has pickled: ``torch.load`` gives every rank that rank's part."""
    for parameter in parameters:
        if not isinstance(parameter, DTensor):
            continue
        for name, value in step.optimizer.state.get(parameter, {}).items():
            if _torch.is_of_another_rank(value, parameter):
                raise CheckpointError(
                    f"{step.where}: {name} of {step.names[id(parameter)]}",
                    expected="this rank's part",
                    got="that of another rank, as torch.load of a file that one rank saved gives it",
                    why="torch.save writes of a sharded tensor the part of the rank that calls it",
                    fix="te_fsdp.checkpoint.save and load, on all ranks",
                )


def _refuse_differing_copies(state: ShardingState, where: str) -> None:
    """Raise where ranks that hold copies hold different ones. Collective over the mesh if there are copies."""
    with raised_on_all_ranks(state.meshes.device_mesh, where):
        bad = differing_copies(state)
        if bad:
            raise InitError(
                f"{shorten(bad)}: copies differ between ranks",
                expected="equal values on all ranks that hold a weight's copies, before the first step",
                got=f"{len(bad)} parameter(s) that differ",
                why="Something was written to them rank by rank, such as nn.init with a seed for each rank",
                fix="equal seeds on all ranks when weights are written; or te_fsdp.materialize(model, seed=...)",
            )
