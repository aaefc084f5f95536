"""Private names of FSDP2's runtime state; torch 2.11 to 2.15."""

# [Note: runtime state] FSDP2's public all-gather hooks determine the data of an all-gather, but not its time,
# and always use the same buffers. FSDP2 has no public function that returns whether a unit is unsharded or
# which gradients await their reduction. It can recover from an exception only from 2.13, and reduce outside
# of a backward only from 2.15. See also ``torch_dtensor.py``.

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp._fully_shard import _fsdp_param
from torch.distributed.tensor import DTensor

from te_fsdp.upstream.fsdp2_units import (
    find_fsdp_param,
    fsdp_parameter_groups,
    fsdp_state_of,
    managed_fsdp_params,
    owners_of,
    record_of_group,
    reductions_of,
)
from te_fsdp.upstream.torch_autograd import without_subclasses
from te_fsdp.upstream.torch_dtensor import dtensor, local_of, spec_of, without_modes


@functools.cache
def can_copy_gradients_into(dtype: torch.dtype, device: str) -> bool:
    """Return whether FSDP2 can copy gradients of different dtypes into a buffer of ``dtype`` (``torch._chunk_cat``)."""
    # Until torch 2.13 it always can. Later versions reject casts to a narrower dtype.
    out = torch.empty((2, 4), dtype=dtype, device=device)
    try:
        for source in (torch.float32, torch.bfloat16, torch.float16):
            torch._chunk_cat([torch.ones((4,), dtype=source, device=device)] * 2, 0, 2, out=out)
    except RuntimeError:
        return False
    return True


def is_unit_unsharded(unit: nn.Module) -> bool:
    """Return whether a unit's parameters are unsharded (``FSDPParamGroup.is_unsharded``)."""
    # Runs in each step for each unit, so it avoids a Python call for each group.
    state: Any = unit._get_fsdp_state()  # type: ignore[operator]
    groups = getattr(state, "_fsdp_param_groups", None) or fsdp_parameter_groups(unit)
    return any(map(operator.attrgetter("is_unsharded"), groups))


def is_in_forward(unit: nn.Module) -> bool:
    """Return whether FSDP2 has begun a unit's forward and its parameters are unsharded."""
    state: Any = unit._get_fsdp_state()  # type: ignore[operator]
    groups = getattr(state, "_fsdp_param_groups", None) or fsdp_parameter_groups(unit)
    return state._training_state._name_ == "FORWARD" and all(group.is_unsharded for group in groups)


def roots_among(units: Iterable[nn.Module]) -> list[nn.Module]:
    """Return FSDP2's root units among ``units`` (``FSDPState._is_root``), none before the first forward."""
    return [unit for unit in units if unit._get_fsdp_state()._is_root]  # type: ignore[operator]


def is_bound_to_root(unit: nn.Module) -> bool:
    """Return whether FSDP2 has chosen the root of a unit, as it does in the first forward (``FSDPState._is_root``)."""
    return unit._get_fsdp_state()._is_root is not None  # type: ignore[operator]


def make_root(unit: nn.Module) -> None:
    """Make a unit the root of all units in it (``FSDPState._lazy_init``). Local operation."""
    # Call it before a unit inside of it runs forward on its own. FSDP2 would make the inner unit a root and
    # later reject the model.
    fsdp_state_of(unit)._lazy_init()


def first_sharded_parameters(units: Iterable[nn.Module]) -> list[torch.nn.Parameter]:
    """Return the first sharded parameter of each parameter group of units."""
    groups = [group for unit in units for group in fsdp_parameter_groups(unit)]
    return [group.fsdp_params[0].sharded_param for group in groups if group.fsdp_params]


def sharded_parameters(unit: nn.Module) -> list[torch.nn.Parameter]:
    """Return the sharded parameters of a unit, even if it is unsharded (``FSDPParam.sharded_param``)."""
    return [managed.sharded_param for managed in managed_fsdp_params(unit)]


#: The current sharded parameter of a record (``FSDPParam.sharded_param``). FSDP2 may replace it.
sharded_param_of: Callable[[Any], torch.nn.Parameter] = operator.attrgetter("sharded_param")


def fsdp_params_of(unit: nn.Module) -> Iterator[tuple[Any, Any]]:
    """Return FSDP2's record of each parameter of a unit, with its parameter group."""
    return ((managed, group) for group in fsdp_parameter_groups(unit) for managed in group.fsdp_params)


def unsharded_parameters(unit: nn.Module) -> list[tuple[torch.nn.Parameter, Any]]:
    """Return (unsharded parameter, FSDP2's record) of each parameter that was unsharded at least once."""
    pairs = ((getattr(managed, "_unsharded_param", None), managed) for managed in managed_fsdp_params(unit))
    return [(parameter, managed) for parameter, managed in pairs if parameter is not None]


def is_assigned_by_user(module: nn.Module, name: str, value: object) -> bool:
    """Return whether the user has replaced a parameter that FSDP2 had unsharded."""
    # ``FSDPParam.sharded_param``, ``_unsharded_param`` (set by the first all-gather),
    # ``_sharded_post_forward_param``.
    managed = find_fsdp_param(module, name)
    if managed is None or not hasattr(managed, "_unsharded_param"):
        return False
    forms = ("sharded_param", "_unsharded_param", "_sharded_post_forward_param")
    return value is None or all(getattr(managed, form, None) is not value for form in forms)


def unreduced_gradient(managed: Any) -> torch.Tensor | None:
    """Return the unsharded gradient into which FSDP2 accumulates."""
    if "unsharded_accumulated_grad" in vars(managed):
        return managed.unsharded_accumulated_grad
    return managed._unsharded_param.grad


def find_unreduced_gradient(managed: Any, group: Any) -> torch.Tensor:
    """Return the unsharded gradient that FSDP2 keeps until the reduction; uninitialized if there was none.

    Local operation. The result has the unsharded parameter's shape.
    """
    # ``FSDPParam.unsharded_accumulated_grad``. Before torch 2.15 all gradients of a reduction must have one
    # dtype: the compute dtype of the parameter, unless FSDP2 accumulates in ``reduce_dtype``.
    parameter, unreduced = managed._unsharded_param, unreduced_gradient(managed)
    if unreduced is None:
        local = local_of(parameter)
        dtype = managed.reduce_dtype
        if group.reduce_grads:  # that of the gradients which the other parameters have accumulated
            others = (vars(record).get("unsharded_accumulated_grad") for record in group.fsdp_params)
            dtype = next((gradient.dtype for gradient in others if gradient is not None), None)
        dtype = dtype or getattr(parameter, "grad_dtype", None) or parameter.dtype
        unreduced = torch.empty(local.shape, dtype=dtype, device=local.device)
        if isinstance(parameter, DTensor):
            unreduced = dtensor(unreduced, spec_of(parameter))
        if "unsharded_accumulated_grad" in vars(managed):
            managed.unsharded_accumulated_grad = unreduced
        else:
            parameter.grad = unreduced
    return local_of(unreduced)


def _states(root: nn.Module) -> list[Any]:
    """Return FSDP2's states of a tree (``FSDPStateContext.all_states``). It is empty before the first forward."""
    return list(fsdp_state_of(root)._state_ctx.all_states)


def units_of_tree(unit: nn.Module) -> list[nn.Module]:
    """Return all units of the tree of a unit, from its first forward on."""
    return [state._modules[0] for state in _states(unit)]


def _groups(root: nn.Module) -> list[Any]:
    return [group for state in _states(root) for group in fsdp_parameter_groups(state._modules[0])]


def _comm(root: nn.Module) -> Any:
    return fsdp_state_of(root)._comm_ctx


def interrupted_phase(root: nn.Module) -> str:
    """Return the phase that an exception interrupted: ``"forward"``, ``"backward"``, or ``""`` for none.

    Call it while neither is running.
    """
    context = root._get_fsdp_state()._state_ctx  # type: ignore[operator]
    phases = set()
    # ``_name_``: the property ``name`` of an enum runs Python code.
    for state in context.all_states:
        phases.add(state._training_state._name_)
        for group in getattr(state, "_fsdp_param_groups", None) or fsdp_parameter_groups(state._modules[0]):
            phases.add(group._training_state._name_)
    if context.post_backward_final_callback_queued or phases & {"PRE_BACKWARD", "POST_BACKWARD"}:
        return "backward"
    return "forward" if context.iter_forward_root is not None or "FORWARD" in phases else ""


def reset_iteration(root: nn.Module) -> None:
    """Reset a tree for the next forward after an exception. Gradients are not changed. Waits for the device.

    ``FSDPModule.reset_iter_state`` (torch 2.13) would also drop the partial reductions of HSDP, and from 2.15 all
    gradients of earlier microbatches. These are complete, and the user repeats the failed microbatch only.
    """
    groups = _groups(root)
    if groups and groups[0].device.type != "cpu":
        torch.accelerator.synchronize(groups[0].device)
    context = fsdp_state_of(root)._state_ctx
    for group in groups:
        result = group._all_gather_result
        if result is not None and result.all_gather_work is not None:
            # Its memory is freed below, and NCCL may still write to it.
            result.all_gather_work.wait()
    _clear_events(_comm(root), groups)
    for group in groups:
        group._post_forward_indices.clear()
        group._training_state = type(group._training_state).IDLE
        group._to_sharded()
    for state in _states(root):
        state._modules_to_run_forward.clear()
        state._training_state = type(state._training_state).IDLE
    context.iter_forward_root = None
    context.post_backward_final_callback_queued = False


def _clear_events(comm: Any, groups: list[Any]) -> None:
    comm.all_gather_state = None
    for group in groups:
        group._all_gather_result = group._post_reduce_event = group._all_reduce_state = None
        group._reshard_after_forward_event = None
    if hasattr(comm, "_last_post_reduce_events"):
        comm._last_post_reduce_events.clear()
    _clear_reductions(comm)


def _clear_reductions(comm: Any) -> None:
    """Clear the state that FSDP2 keeps until reductions have ended: one object on 2.11, a list on 2.13."""
    comm.post_forward_order.clear()
    if hasattr(comm, "reduce_scatter_states"):
        comm.reduce_scatter_states.clear()
    else:
        comm.reduce_scatter_state = None


def clear_events(root: nn.Module) -> None:
    """Drop the events of a tree on which FSDP2 would wait. Local operation; nothing may be pending."""
    # A stream under CUDA graph capture must not wait for an event recorded before, and other streams must not
    # wait for an event recorded in a capture (``FSDPParamGroup``, ``FSDPCommContext``, ``FSDPStateContext``).
    comm, groups = _comm(root), _groups(root)
    _clear_events(comm, groups)
    for group in groups:
        if (gathers := record_of_group(group).gathers) is not None:
            gathers.forget()
    fsdp_state_of(root)._state_ctx.post_optim_event = None


def reduce_outside_backward(root: nn.Module) -> None:
    """Start the reduction of all unreduced gradients (``FSDPParamGroup.post_backward``).

    Collective over data parallel, with the units in backward order. Every trained parameter that was unsharded
    at least once participates, with zeros if it has no gradient. So all ranks run the same collectives, and
    HSDP's partial reductions are completed. Call :func:`wait_for_reductions` before reading gradients.
    """
    for group in reversed(_groups(root)):
        trained = [m for m in group.fsdp_params if m.sharded_param.requires_grad]
        if not any(getattr(managed, "_unsharded_param", None) is not None for managed in trained):
            continue
        # FSDP2 reduces here only if these flags are set, which microbatches without a reduction cleared.
        before = group.reduce_grads, group.all_reduce_grads
        group.reduce_grads = group.all_reduce_grads = True
        try:
            group.post_backward()
        finally:
            # post_backward leaves the state of a running backward, which no end of a backward resets here.
            group._training_state = type(group._training_state).IDLE
            group.reduce_grads, group.all_reduce_grads = before


def reduced_dtype(unit: nn.Module, policy: MixedPrecisionPolicy) -> torch.dtype:
    """Return the dtype in which FSDP2 reduces a unit's gradients."""
    # Without a ``reduce_dtype`` in the policy it is the compute dtype until torch 2.14, later that of the
    # sharded parameters.
    if policy.reduce_dtype is not None:
        return policy.reduce_dtype
    managed = managed_fsdp_params(unit)
    by_parameters = bool(managed) and hasattr(type(managed[0]), "unsharded_grad_dtype")
    return (None if by_parameters else policy.param_dtype) or next(
        (parameter.dtype for parameter in unit.parameters()), torch.get_default_dtype()
    )


def wait_for_reductions(root: nn.Module) -> None:
    """Let the current stream wait for started reductions (``FSDPParamGroup.finalize_backward``)."""
    # A backward does this at its end unless ``set_is_last_backward(False)`` disables it. On torch 2.15
    # ``FSDPState._end_backward_iteration``.
    if fsdp_state_of(root)._state_ctx.post_backward_final_callback_queued:
        # An optimizer steps in a hook, within the backward, which still needs FSDP2's state. From torch 2.13 on FSDP2
        # keeps the last event of each stream.
        groups = _groups(root)
        last = getattr(_comm(root), "_last_post_reduce_events", None)
        events = [group._post_reduce_event for group in groups] if last is None else last.values()
        for event in filter(None, events):
            groups[0].device_handle.current_stream().wait_event(event)
        return
    end = getattr(fsdp_state_of(root), "_end_backward_iteration", None)
    if end is not None:  # torch 2.15: finalize_backward of its groups no longer waits for the reductions
        end()
        return
    comm = _comm(root)
    for group in _groups(root):
        group.finalize_backward()
    for reduction in reductions_of(comm):
        reduction.event.wait()
    _clear_reductions(comm)


# --- gathers


def allow_recompute(unit: nn.Module) -> None:
    """Let FSDP2 handle a recomputed forward that runs after this unit's own backward. Local operation."""
    # A reentrant checkpoint runs forward and backward of each use of a unit in turn. FSDP2 leaves the unit's
    # state at ``PRE_BACKWARD`` until the outermost backward ends (``FSDPState._training_state``). It then
    # registers no hooks for the second use, whose gradients stay unreduced without an error.
    if any(group._training_state.name == "POST_BACKWARD" for group in fsdp_parameter_groups(unit)):
        state = fsdp_state_of(unit)
        state._training_state = type(state._training_state).IDLE


@contextlib.contextmanager
def report_as_unsharded(group: Any) -> Iterator[None]:
    """Return a context in which a parameter group reports that it stays unsharded between forward and backward."""
    # ``FSDPParamGroup._reshard_after_forward``, which is true if ``post_forward_mesh_info`` is set.
    mesh_info, group.post_forward_mesh_info = group.post_forward_mesh_info, None
    try:
        yield
    finally:
        group.post_forward_mesh_info = mesh_info


def resize_all_gather_outputs(group: Any, shard: torch.Tensor, sizes: list[int]) -> None:
    """Change the all-gather buffers of a shard, so that an all-gather can return different ones. Local operation.

    ``shard`` is a local tensor with all-gather hooks in the sharded state. ``sizes`` are the numbers of
    elements of the gathered buffers.
    """
    # FSDP2 allocates memory for the result of its first all-gather and reuses it
    # (``FSDPParam.all_gather_outputs``; ``_unsharded_inner_tensors`` are views of it).
    for managed in group.fsdp_params:
        outputs = managed.all_gather_outputs
        if local_of(managed.sharded_param) is shard and outputs and [t.numel() for t in outputs] != sizes:
            managed.all_gather_outputs, managed._unsharded_inner_tensors = [], []


def regather_parameters(group: Any, module: nn.Module, names: Collection[str]) -> None:
    """All-gather some parameters of an unsharded module again, into the same unsharded parameters.

    Collective over the group's shard mesh: one all-gather (``FSDPParamGroup.unshard`` with fewer
    ``fsdp_params``). The names are the same on all ranks, and the group is unsharded.
    """
    everything, keys = group.fsdp_params, [(module, name) for name in names]
    # FSDP2 all-gathers the records in this list together.
    group.fsdp_params = [m for m in everything if any(owner in keys for owner in owners_of(m))]
    try:
        with without_modes():
            # unshard() does nothing for a group that is unsharded.
            group._to_sharded()
            group.unshard()
            group.wait_for_unshard()
    finally:
        group.fsdp_params = everything


@contextlib.contextmanager
def chunk_this_rank_only() -> Iterator[None]:
    """Return a context in which FSDP2 creates no tensors for other ranks' chunks of a parameter. Local operation."""
    module: Any = _fsdp_param  # annotated as lists, but only their length is used
    # Over thousands of ranks FSDP2 would create as many tensors for each parameter, to use one of them.
    stock = module._chunk_with_empty
    plain = (torch.Tensor, torch.nn.Parameter)  # subclasses may define their own chunk
    module._chunk_with_empty = lambda tensor, count, dim: (
        _ThisRanksChunk(tensor, count, dim) if type(tensor) in plain else stock(tensor, count, dim=dim)
    )
    try:
        yield
    finally:
        module._chunk_with_empty = stock


@dataclass
class _ThisRanksChunk:
    """Lazy result of ``torch.chunk``, padded with empty tensors for ranks without a chunk."""

    tensor: torch.Tensor
    count: int
    dim: int

    def __getitem__(self, index: int) -> torch.Tensor:
        size = self.tensor.shape[self.dim]
        # As in torch.chunk: the ranks at the end get fewer rows, or none.
        rows = -(-size // self.count)
        remaining = size - index * rows
        if remaining <= 0 < size:
            return self.tensor.new_empty(0)
        return self.tensor.narrow(self.dim, index * rows, min(rows, remaining))


def defers_leaf_gradient(leaf: Any) -> bool:
    """Return whether the running backward skips a leaf's gradient and keeps its graph for another backward."""
    # ``torch._C._will_engine_execute_node``, ``torch._C._autograd._get_current_graph_task_keep_graph``.
    try:
        left_out = not torch._C._will_engine_execute_node(leaf)
    except RuntimeError:  # a leaf passed to torch.autograd.grad
        return False
    return left_out and torch._C._autograd._get_current_graph_task_keep_graph()


# --- all-gathers before the forward of a unit


def is_in_root_forward(unit: nn.Module) -> bool:
    """Return whether a forward of the unit's root is running, and not one of an inner unit alone."""
    running = unit._get_fsdp_state()._state_ctx.iter_forward_root  # type: ignore[operator]
    return running is not None and running._is_root is True


def has_forward_prefetch(unit: nn.Module) -> bool:
    """Return whether the user has called ``set_modules_to_forward_prefetch`` of a unit."""
    return bool(fsdp_state_of(unit)._states_to_forward_prefetch)


def collective_settings(unit: nn.Module, names: dict[int, str], *, of_gathers: bool = False) -> list[str]:
    """Return a unit's settings that affect its collectives, as calls of FSDP2's setters.

    ``names`` maps the id of a unit to its name. With ``of_gathers``, the settings of a backward without collectives are
    those of a last backward.
    """
    state = fsdp_state_of(unit)
    prefetched = {
        "set_modules_to_forward_prefetch": state._states_to_forward_prefetch,
        "set_modules_to_backward_prefetch": state._states_to_backward_prefetch,
    }
    settings = [
        f"{setter}({[names.get(id(module)) for state in states for module in state._modules]})"
        for setter, states in prefetched.items()
    ]
    is_last = state._state_ctx.is_last_backward
    for group in fsdp_parameter_groups(unit):
        reshards = group.post_forward_mesh_info is not None
        kept = of_gathers and not (reshards or group.reshard_after_backward or group.reduce_grads)
        is_last = kept or is_last
        settings += [
            f"set_reshard_after_forward({reshards})",
            f"set_requires_gradient_sync({kept or group.reduce_grads})",
            f"set_requires_all_reduce({kept or group.all_reduce_grads})",
            f"set_reshard_after_backward({kept or group.reshard_after_backward})",
            f"set_unshard_in_backward({group.unshard_in_backward})",
            f"set_gradient_divide_factor({group.gradient_divide_factor})",
            f"set_force_sum_reduction_for_comms({group.force_sum_reduction_for_comms})",
        ]
    return [*settings, f"set_is_last_backward({is_last})"]


def start_gather(unit: nn.Module) -> bool:
    """Start to all-gather a unit as FSDP2's prefetch in forward does. Return whether it was sharded.

    Collective over the ranks of the unit's shards.
    """
    has_started = False
    for group in fsdp_parameter_groups(unit):
        if group._all_gather_result is not None or group.is_unsharded:
            continue
        before = group._training_state
        group._training_state = type(before).FORWARD
        try:
            group.unshard(group.unshard_async_op)
        finally:
            group._training_state = before
        has_started = True
    return has_started


def drop_gather(unit: nn.Module) -> None:
    """Free the weights of a started all-gather that no forward has used. Local operation."""
    for group in fsdp_parameter_groups(unit):
        if group._all_gather_result is not None:
            group.wait_for_unshard()
            group.reshard()


def versions_of_shards(unit: nn.Module) -> list[int]:
    """Return a number for each of a unit's shards, which each write to the DTensor or to its local tensor raises."""
    with without_subclasses():  # reads attributes without a Python call
        shards = [m.sharded_param for group in fsdp_parameter_groups(unit) for m in group.fsdp_params]
        return [shard._version + shard._local_tensor._version for shard in shards]
