"""Dtypes of a sharded model's gradients under a precision policy."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn
from torch.optim import Optimizer

from te_fsdp.apply_fully_shard import Setup
from te_fsdp.collectives.redistribute import COMM_DTYPES, GradComm
from te_fsdp.component import Component
from te_fsdp.errors import OrderError, PrecisionError
from te_fsdp.lifecycle import runs_if
from te_fsdp.records import KEEPS_MAIN_WEIGHTS, get_record
from te_fsdp.sharded_model import get_sharded_model
from te_fsdp.unit_communication import OuterGroup, set_unit_grad_comm
from te_fsdp.upstream import fsdp2_patches as _fsdp2_patches, fsdp2_units, te as _te, torch_dtensor as _torch


@runs_if("precision")
def attach_gradient_dtypes(setup: Setup) -> None:
    """Let FSDP2 reduce and accumulate gradients as the precision policy says. Local operation."""
    plan, state, model = setup.precision, setup.state, setup.state.model
    assert plan is not None
    state.components.attach(GradientDtypes())
    others = {
        p.unit
        for p in setup.plan.parameters.values()
        if p.gradient_dtype is not None and not p.storage.is_replicated
    }
    comm = state.sync.comm = GradComm(plan.policy.grad_comm_dtype, plan.policy.adds_in_fp32)
    for name in plan.compute:
        unit = model.get_submodule(name)
        if not fsdp2_units.is_fsdp_module(unit):
            continue
        set_unit_grad_comm(unit, comm, name)
        # FSDP2 has no hook for its all-reduce over dp_replicate, which adds in the communication dtype.
        if comm.fp32_sum and state.outer == "no_shard" and state.meshes.size("dp_replicate") > 1:
            _fsdp2_patches.replace_outer_group(unit, lambda stock: OuterGroup(stock, comm))
        if (
            comm.fp32_sum
            and fsdp2_units.fsdp_parameter_groups(unit)
            and fsdp2_units.reduction_of(unit)[0] > 1
        ):
            # A divide factor would make FSDP2 request a premultiplied sum, which fp32 sums do not support.
            unit.set_force_sum_reduction_for_comms(True)  # type: ignore[operator]
        if (dtype := plan.accumulation_dtype(name)) is not None and name in others:
            _fsdp2_patches.keep_gradients_in_dtype(unit, dtype)


class GradientDtypes(Component):
    """Casts the main gradients of one model around the steps of optimizers that require it."""

    def __init__(self) -> None:
        #: Parameter, main gradient and cast gradient of each cast.
        self._casts: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []

    def prepare_step(self, optimizer: Optimizer, parameters: list[torch.Tensor]) -> None:
        """Cast main gradients to the dtype of their parameters, for optimizers that require it. Local operation.

        Raises PrecisionError if a gradient is not in the policy's dtype, because user code replaced it.
        """
        # Each gradient is rounded once, after all microbatches were accumulated.
        self.undo_step()  # of a step that raised
        for parameter in parameters:
            record = get_record(parameter)
            # MainParameters casts gradients itself.
            if record is None or record.plan is None or record.main_parameters is not None:
                continue
            gradient, dtype = parameter.grad, record.plan.gradient_dtype
            if gradient is None or dtype is None:
                continue
            if gradient.dtype != dtype:
                raise PrecisionError(
                    f"{record.plan.label}: dtype of its gradient",
                    expected=f"{dtype} (main_grads_dtype)",
                    got=gradient.dtype,
                    why="Microbatches would be accumulated in the wrong dtype",
                    fix="change gradients in place, and clear them with zero_grad()",
                )
            low = parameter.dtype != torch.float32 or _te.is_quantized(_torch.local_of(parameter))
            # FusedAdam reads a low-precision parameter's gradient in any dtype, and so do te_fsdp's main weights.
            if low and (_te.is_fused_adam(optimizer) or hasattr(optimizer, KEEPS_MAIN_WEIGHTS)):
                continue
            # grad_dtype cannot change while there is a gradient.
            parameter.grad = parameter.grad_dtype = None
            (cast,) = _torch.in_dtypes_of([gradient], [parameter])
            assert cast is not None
            parameter.grad = cast
            self._casts.append((parameter, gradient, cast))

    def undo_step(self) -> None:
        """Restore the main gradients, except those that were cleared since. Local operation."""
        for parameter, gradient, cast in self._casts:
            now, parameter.grad = parameter.grad, None
            parameter.grad_dtype = gradient.dtype
            if now is not None:
                # User code has assigned any other object during the step.
                parameter.grad = gradient if now is cast else now.to(gradient.dtype)
        self._casts.clear()


@contextlib.contextmanager
def grad_comm(model: nn.Module, dtype: torch.dtype | None) -> Iterator[None]:
    """Send gradients in a different dtype inside the context, for example bf16 in all but the last training steps.

    Applies to every reduction inside the context, including those of the outer axis at an optimizer step. Contexts can
    be nested. On exit, also after an exception, the previous setting is restored. The accumulation dtype of gradients
    does not change. Local operation. All ranks must use the same dtype.

    Args:
        model: The model that :func:`te_fsdp.fully_shard` was called on, with a precision policy.
        dtype: ``torch.float32``, ``torch.bfloat16`` or ``torch.float16``; ``None``: main_grads_dtype.

    Raises:
        OrderError: The model has no precision policy.
        PrecisionError: The dtype is not supported.
    """
    state = get_sharded_model(model)
    comm = None if state is None else state.sync.comm
    if comm is None:
        raise OrderError(
            f"grad_comm({type(model).__name__})",
            expected="the model that te_fsdp.fully_shard was called on, with a precision policy",
            got="a module without one",
            fix="te_fsdp.fully_shard(model, meshes, precision=te_fsdp.MixedPrecisionPolicy(...))",
        )
    if dtype is not None and dtype not in COMM_DTYPES:
        raise PrecisionError(
            "grad_comm: wrong dtype",
            expected=f"None or one of {', '.join(map(str, COMM_DTYPES))}",
            got=dtype,
            fix="use a floating-point dtype that every transport can sum",
        )
    # Reductions read the setting when they start, so one assignment changes all later ones.
    before, comm.dtype = comm.dtype, dtype
    try:
        yield
    finally:
        comm.dtype = before
