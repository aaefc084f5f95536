"""Private names of FSDP2's running state, beside those in ``_torch.py``. Checked on torch 2.11 to 2.15.

FSDP2 has no public way to ask whether a unit is gathered, or which gradients wait for their reduction; none before
2.13 to recover from an exception, and none before 2.15 to reduce outside of a backward.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor

from te_fsdp._torch import dtensor, fsdp_parameter_groups, local_of, managed_by, spec_of

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.fsdp import MixedPrecisionPolicy

__all__ = [
    "accumulated_gradient",
    "after_reductions",
    "around_reductions",
    "fill_unused",
    "forget_forward_order",
    "forget_unreduced",
    "gathered_parameters",
    "gathering_streams",
    "gathers_ahead",
    "gradients_copy_into",
    "gradients_in",
    "interrupted",
    "is_gathered",
    "is_root",
    "one_gradient_dtype",
    "reduce_outside_backward",
    "reduced_dtype",
    "reset_iteration",
    "sharded_parameters",
    "unreduced",
    "wait_for_reductions",
]


@functools.cache
def gradients_copy_into(dtype: torch.dtype, device: str) -> bool:
    """Whether FSDP2 can copy gradients of other dtypes into a buffer of ``dtype`` (``torch._chunk_cat``).

    It always could up to torch 2.13; later sources say that it rejects casts to a narrower dtype.

    Args:
        dtype: Of the buffer.
        device: Type of the device.
    """
    out = torch.empty((2, 4), dtype=dtype, device=device)
    try:
        for source in (torch.float32, torch.bfloat16, torch.float16):
            torch._chunk_cat([torch.ones((4,), dtype=source, device=device)] * 2, 0, 2, out=out)
    except RuntimeError:
        return False
    return True


def is_gathered(unit: nn.Module) -> bool:
    """Whether a unit's parameters are the gathered ones now (``FSDPParamGroup.is_unsharded``)."""
    return any(group.is_unsharded for group in fsdp_parameter_groups(unit))


def is_root(unit: nn.Module) -> bool:
    """Whether a unit is the first of its tree to run forward (``FSDPState._is_root``, ``None`` before)."""
    return bool(unit._get_fsdp_state()._is_root)  # type: ignore[operator]


def sharded_parameters(unit: nn.Module) -> list[torch.nn.Parameter]:
    """The sharded parameters of a unit, gathered or not (``FSDPParam.sharded_param``)."""
    return [managed.sharded_param for managed in managed_by(unit)]


def gathered_parameters(unit: nn.Module) -> list[tuple[torch.nn.Parameter, Any]]:
    """Gathered parameter and FSDP2's record of each parameter that was gathered at least once."""
    found = ((getattr(managed, "_unsharded_param", None), managed) for managed in managed_by(unit))
    return [(parameter, managed) for parameter, managed in found if parameter is not None]


def gathering_streams(unit: nn.Module) -> list[Any]:
    """The streams that read a unit's shards (``FSDPCommContext``); none before the first forward of its tree."""
    names = ("all_gather_copy_in_stream", "all_gather_stream")
    return [s for name in names if (s := getattr(_comm(unit), name, None)) is not None]


def gathers_ahead(unit: nn.Module) -> bool:
    """Whether a unit's forward starts to gather others (``FSDPModule.set_modules_to_forward_prefetch``)."""
    return bool(unit._get_fsdp_state()._states_to_forward_prefetch)  # type: ignore[operator]


def _waits(managed: Any) -> bool:
    """Whether a record holds a gradient that was not reduced. On 2.15 both names are one gradient."""
    gathered = getattr(managed, "_unsharded_param", None)
    if gathered is None:
        return False
    return gathered.grad is not None or getattr(managed, "unsharded_accumulated_grad", None) is not None


def accumulated_gradient(managed: Any, group: Any) -> torch.Tensor:
    """The whole gradient of a parameter that FSDP2 keeps until it reduces, to be added to; zeros where there is none.

    ``FSDPParam.unsharded_accumulated_grad``; before torch 2.15 all gradients that are reduced together must have one
    dtype: that of the parameter as it is computed, unless FSDP2 accumulates in ``reduce_dtype``.

    Returns:
        Local tensor of the gathered parameter's shape.
    """
    parameter = managed._unsharded_param
    stored = "unsharded_accumulated_grad" in vars(managed)
    kept = managed.unsharded_accumulated_grad if stored else parameter.grad
    if kept is None:
        local = local_of(parameter)
        accumulates = None if group.reduce_grads else managed.reduce_dtype
        dtype = accumulates or getattr(parameter, "grad_dtype", None) or parameter.dtype
        kept = torch.zeros(local.shape, dtype=dtype, device=local.device)
        if isinstance(parameter, DTensor):
            kept = dtensor(kept, spec_of(parameter))
        if stored:
            managed.unsharded_accumulated_grad = kept
        else:
            parameter.grad = kept
    return local_of(kept)


def waiting(managed: Any) -> list[torch.Tensor]:
    """The whole gradients of a record that wait for their reduction."""
    gathered = getattr(managed, "_unsharded_param", None)
    found = [
        getattr(managed, "unsharded_accumulated_grad", None),
        None if gathered is None else gathered.grad,
    ]
    return [gradient for gradient in found if gradient is not None]


def unreduced(unit: nn.Module) -> Iterator[Any]:
    """Records of a unit's parameters whose gradients were not reduced over all axes yet.

    Either whole ones that wait for their reduce-scatter, or parts that wait for the all-reduce of HSDP
    (``FSDPParamGroup._partial_reduce_output``).
    """
    for group in fsdp_parameter_groups(unit):
        part = group._partial_reduce_output is not None
        for managed in group.fsdp_params:
            if _waits(managed) or (part and managed.sharded_param.requires_grad):
                yield managed


def forget_unreduced(unit: nn.Module) -> None:
    """Drop all gradients that wait for their reduction."""
    for group in fsdp_parameter_groups(unit):
        group._partial_reduce_output = None
        for managed in group.fsdp_params:
            if getattr(managed, "_unsharded_param", None) is not None:
                managed._unsharded_param.grad = None
            if "unsharded_accumulated_grad" in vars(managed):
                managed.unsharded_accumulated_grad = None


def _states(root: nn.Module) -> list[Any]:
    """FSDP2's states of the tree under a root (``FSDPStateContext.all_states``); none before its first forward."""
    return list(root._get_fsdp_state()._state_ctx.all_states)  # type: ignore[operator]


def _comm(root: nn.Module) -> Any:
    return root._get_fsdp_state()._comm_ctx  # type: ignore[operator]


def interrupted(root: nn.Module) -> str:
    """What an exception has left half done under a root: ``"forward"``, ``"backward"``, or ``""`` for nothing.

    Call it when neither runs.
    """
    context = root._get_fsdp_state()._state_ctx  # type: ignore[operator]
    phases = set()
    for state in context.all_states:
        phases.add(state._training_state.name)
        phases.update(group._training_state.name for group in fsdp_parameter_groups(state._modules[0]))
    if context.post_backward_final_callback_queued or phases & {"PRE_BACKWARD", "POST_BACKWARD"}:
        return "backward"
    return "forward" if context.iter_forward_root is not None or "FORWARD" in phases else ""


def reset_iteration(root: nn.Module, *, stock: bool = True) -> None:
    """Make a tree ready for the next forward after an exception; gradients are left as they are.

    ``FSDPModule.reset_iter_state`` where there is one (torch 2.13), else the same by hand. Torch's own would also drop
    what HSDP has reduced in part, and from 2.15 on every gradient, those of earlier microbatches too.

    Args:
        root: A root.
        stock: Whether to use torch's own where it exists.
    """
    groups = [group for state in _states(root) for group in fsdp_parameter_groups(state._modules[0])]
    kept = [_gradients_of(group) for group in groups]
    if stock and hasattr(root, "reset_iter_state"):
        root.reset_iter_state()  # type: ignore[operator]
    else:
        _reset(root, groups)
    for put_back in kept:
        put_back()


def _gradients_of(group: Any) -> Callable[[], None]:
    """What a parameter group holds of gradients, reduced or not: a function that puts it back."""
    part, layout = group._partial_reduce_output, dict(getattr(group, "_partial_reduce_output_layout", {}))
    sharded = [(m.sharded_param, m.sharded_param.grad) for m in group.fsdp_params]
    found = (getattr(managed, "_unsharded_param", None) for managed in group.fsdp_params)
    gathered = [(parameter, parameter.grad) for parameter in found if parameter is not None]

    def put_back() -> None:
        group._partial_reduce_output = part
        if layout:
            group._partial_reduce_output_layout.update(layout)
        for parameter, gradient in sharded:
            if parameter.grad is None:
                # The very tensor: it carries marks, and that of HFSDP refuses to be computed with.
                parameter.grad = gradient
        for parameter, gradient in gathered:
            if parameter.grad is None and gradient is not None:
                # A backward that was interrupted leaves gathered parameters' gradients in the dtype of compute, torch
                # 2.15 wants them in that in which they add up.
                parameter.grad = gradient.to(getattr(parameter, "grad_dtype", None) or gradient.dtype)

    return put_back


def _reset(root: nn.Module, groups: list[Any]) -> None:
    """``reset_iter_state`` for torch before 2.13. Waits for the device: exceptions are rare."""
    if groups and groups[0].device.type != "cpu":
        torch.accelerator.synchronize(groups[0].device)
    comm, context = _comm(root), root._get_fsdp_state()._state_ctx  # type: ignore[operator]
    comm.all_gather_state = None
    _forget_reductions(comm)
    for group in groups:
        result = group._all_gather_result
        if result is not None and result.all_gather_work is not None:
            result.all_gather_work.wait()
        group._all_gather_result = group._post_reduce_event = group._all_reduce_state = None
        group._reshard_after_forward_event = None
        group._post_forward_indices.clear()
        group._training_state = type(group._training_state).IDLE
        group._to_sharded()
    for state in _states(root):
        state._modules_to_run_forward.clear()
        state._training_state = type(state._training_state).IDLE
    context.iter_forward_root = None
    context.post_backward_final_callback_queued = False


def _forget_reductions(comm: Any) -> None:
    """What FSDP2 keeps of reductions until they have ended: one on 2.11, a list on 2.13."""
    comm.post_forward_order.clear()
    if hasattr(comm, "reduce_scatter_states"):
        comm.reduce_scatter_states.clear()
    else:
        comm.reduce_scatter_state = None


def forget_forward_order(root: nn.Module) -> None:
    """Forget the order of units in forwards whose backwards have all run (``FSDPCommContext.post_forward_order``).

    FSDP2 gathers ahead in backward by that order, and forgets it after a last backward alone: in a later microbatch the
    first unit would gather the last one of the microbatch before, in the form that backward needs.
    """
    groups = (group for state in _states(root) for group in fsdp_parameter_groups(state._modules[0]))
    if not any(group._post_forward_indices for group in groups):
        _comm(root).post_forward_order.clear()


def reduce_outside_backward(root: nn.Module) -> None:
    """Start the reduction of all gradients that wait for it (``FSDPParamGroup.post_backward``).

    Collective over data parallel, the units in the order of a backward. Every trained parameter that was gathered at
    least once takes part, with zeros where it has no gradient, so that ranks agree, and so that the parts that HSDP has
    kept are reduced too. Call :func:`wait_for_reductions` before gradients are read.
    """
    for state in reversed(_states(root)):
        for group in reversed(fsdp_parameter_groups(state._modules[0])):
            trained = [m for m in group.fsdp_params if m.sharded_param.requires_grad]
            if not any(getattr(managed, "_unsharded_param", None) is not None for managed in trained):
                continue
            before = group.reduce_grads, group.all_reduce_grads
            group.reduce_grads = group.all_reduce_grads = True
            unused = getattr(group, "reduce_scatter_unused_params", None)
            if unused is None:
                fill_unused(group)
            else:
                group.reduce_scatter_unused_params = True
            try:
                group.post_backward()
            finally:
                group._training_state = type(group._training_state).IDLE
                group.reduce_grads, group.all_reduce_grads = before
                if unused is not None:
                    group.reduce_scatter_unused_params = unused


def fill_unused(group: Any) -> None:
    """Give a parameter group's trained parameters zero gradients before it reduces, where they have none.

    What ``set_reduce_scatter_unused_params`` of torch 2.13 does, for torch before it
    (``FSDPParamGroup.post_backward``).
    """
    if "_te_fsdp_fills" not in group.__dict__:
        group._te_fsdp_fills = True
        group.post_backward = functools.partial(_post_backward_of_all, group, group.post_backward)


def _post_backward_of_all(group: Any, stock: Callable[..., None], *unused: Any) -> None:
    for managed in group.fsdp_params if group.reduce_grads else ():
        parameter = getattr(managed, "_unsharded_param", None)  # before the first gather there is none
        if parameter is None or not parameter.requires_grad:
            continue
        if parameter.grad is None and managed.unsharded_accumulated_grad is None:
            parameter.grad = torch.zeros_like(parameter)
    stock(*unused)


def gradients_in(unit: nn.Module, dtype: torch.dtype) -> None:
    """Let FSDP2 keep a unit's sharded gradients in another dtype than its sharded parameters. Local operation.

    Up to 2.14 FSDP2 casts reduced gradients to ``FSDPParamGroup._orig_dtype``, which each ``_init_mp_dtypes`` sets to
    the parameters' dtype; later it casts to the parameter's public ``grad_dtype``, which autograd wants in any
    version. Both are set whenever FSDP2 looks at its parameters anew: they may have been replaced since.
    """
    for group in fsdp_parameter_groups(unit):
        group._init_mp_dtypes = functools.partial(_init_dtypes, group, group._init_mp_dtypes, dtype)
        _set_gradient_dtype(group, dtype)
        for managed in group.fsdp_params:
            if not hasattr(managed, "_sharding_spec_by_dtype"):  # torch before 2.15
                managed.to_sharded_dtensor = functools.partial(
                    _to_sharded, managed, managed.to_sharded_dtensor
                )


def _init_dtypes(group: Any, stock: Callable[[], None], dtype: torch.dtype) -> None:
    """``FSDPParamGroup._init_mp_dtypes`` for gradients of ``dtype``."""
    stock()
    if hasattr(group, "_orig_dtype") and group._orig_dtype is not None:
        group._orig_dtype = dtype
    _set_gradient_dtype(group, dtype)


def _to_sharded(managed: Any, stock: Callable[[torch.Tensor], DTensor], tensor: torch.Tensor) -> DTensor:
    """``FSDPParam.to_sharded_dtensor`` for gradients of another dtype than their parameter's.

    FSDP2 gives them the parameter's spec, which says the parameter's dtype. Operations on DTensors go by it: ``lerp_``
    of an optimizer with fp32 main weights refuses an fp32 gradient, as one of bf16.
    """
    made = stock(tensor)
    spec = spec_of(made)
    if spec.tensor_meta is None or spec.tensor_meta.dtype == tensor.dtype:
        return made
    known = managed.__dict__.setdefault("_te_fsdp_gradient_spec", (spec, None))
    if known[1] is None or known[0] is not spec:
        meta = spec.tensor_meta._replace(dtype=tensor.dtype)
        known = managed._te_fsdp_gradient_spec = (spec, replace(spec, tensor_meta=meta))
    return dtensor(tensor, known[1])


def _set_gradient_dtype(group: Any, dtype: torch.dtype) -> None:
    for managed in group.fsdp_params:
        if managed.sharded_param.requires_grad:
            managed.sharded_param.grad_dtype = dtype


def one_gradient_dtype(group: Any) -> None:
    """Let a parameter group reduce gradients of which only some have added up over several backwards.

    FSDP2 adds up in the dtype of the reduction, but leaves gradients of a first backward in the gathered parameters'
    dtype, and makes zeros for unused parameters in that: where the two differ, it cannot reduce them together
    (``FSDPParamGroup.post_backward``; torch 2.15 keeps all in one dtype by itself).
    """
    group.post_backward = functools.partial(_post_backward_in_one_dtype, group, group.post_backward)


def _post_backward_in_one_dtype(group: Any, stock: Callable[..., None], *args: Any) -> None:
    records = (
        [m for m in group.fsdp_params if "unsharded_accumulated_grad" in vars(m)]
        if group.reduce_grads
        else []
    )
    added = [m.unsharded_accumulated_grad for m in records if m.unsharded_accumulated_grad is not None]
    for managed in records if added else ():
        parameter = managed._unsharded_param
        if managed.unsharded_accumulated_grad is not None or not parameter.requires_grad:
            continue
        if parameter.grad is not None:
            managed.unsharded_accumulated_grad = parameter.grad.to(added[0].dtype)
            parameter.grad = None
        else:
            managed.unsharded_accumulated_grad = torch.zeros_like(parameter, dtype=added[0].dtype)
    stock(*args)


def reduced_dtype(unit: nn.Module, policy: MixedPrecisionPolicy) -> torch.dtype:
    """The dtype in which FSDP2 reduces a unit's gradients.

    Without a ``reduce_dtype``: up to torch 2.14 that of compute, later that of the sharded parameters.

    Args:
        unit: A module that FSDP2 manages.
        policy: The one that it was sharded with.
    """
    if policy.reduce_dtype is not None:
        return policy.reduce_dtype
    managed = managed_by(unit)
    by_parameters = bool(managed) and hasattr(type(managed[0]), "unsharded_grad_dtype")
    return (None if by_parameters else policy.param_dtype) or next(unit.parameters()).dtype


def after_reductions(unit: nn.Module, call: Callable[[int, Any], None]) -> None:
    """Call something whenever FSDP2 has enqueued the reduction of a unit's gradients. Local operation.

    Sharded gradients are final then, as far as this backward goes, on FSDP2's own stream
    (``FSDPParamGroup.post_backward``, ``_post_reduce_event``). Every backward comes by at least once for each
    parameter group of the tree that it runs in, also for those that it has not used.

    Args:
        unit: A module that FSDP2 manages.
        call: Gets the number of the unit's parameter group, and the event after which its gradients are final;
            ``None`` where nothing was reduced, or there are no streams.
    """
    for number, group in enumerate(fsdp_parameter_groups(unit)):
        then = functools.partial(call, number)
        group.post_backward = functools.partial(_post_backward_then, group, group.post_backward, then)


def _post_backward_then(
    group: Any, stock: Callable[..., None], call: Callable[[Any], None], *args: Any
) -> None:
    stock(*args)
    if group.reduce_grads:
        call(group._post_reduce_event)


def around_reductions(
    unit: nn.Module,
    before: Callable[[list[torch.nn.Parameter]], None],
    after: Callable[[list[torch.nn.Parameter]], None],
) -> None:
    """Call something before and after FSDP2 reduces the gradients of one of a unit's groups. Local operation.

    Args:
        unit: A module that FSDP2 manages.
        before: Gets the group's sharded parameters; their ``.grad`` is what the reduction will be added to.
        after: Gets them when the reduction is enqueued and ``.grad`` is there (``FSDPParamGroup.post_backward``).
    """
    for group in fsdp_parameter_groups(unit):
        group.post_backward = functools.partial(
            _post_backward_between, group, group.post_backward, before, after
        )


def _post_backward_between(
    group: Any,
    stock: Callable[..., None],
    before: Callable[..., None],
    after: Callable[..., None],
    *args: Any,
) -> None:
    if not group.reduce_grads:
        stock(*args)
        return
    parameters = [managed.sharded_param for managed in group.fsdp_params]
    before(parameters)
    stock(*args)
    after(parameters)


def wait_for_reductions(root: nn.Module) -> None:
    """Let the current stream wait for reductions that were started (``FSDPParamGroup.finalize_backward``).

    What a backward does at its end, unless ``set_is_last_backward(False)`` has told it not to; on torch 2.15
    ``FSDPState._end_backward_iteration``.
    """
    end = getattr(root._get_fsdp_state(), "_end_backward_iteration", None)  # type: ignore[operator]
    if end is not None:  # torch 2.15: finalize_backward of its groups no longer waits for the reductions
        end()
        return
    comm = _comm(root)
    for state in _states(root):
        for group in fsdp_parameter_groups(state._modules[0]):
            group.finalize_backward()
    kept = getattr(comm, "reduce_scatter_states", None)
    for reduction in kept if kept is not None else [comm.reduce_scatter_state]:
        if reduction is not None and reduction.event is not None:
            torch.accelerator.current_stream().wait_event(reduction.event)
    _forget_reductions(comm)
