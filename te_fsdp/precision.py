"""``MixedPrecisionPolicy``: the dtypes of a sharded model.

    main weights    main_params_dtype   updated by the optimizer, stored in checkpoints (FSDP2's sharded parameters)
    compute         param_dtype         used by forward and backward (FSDP2's unsharded parameters)
    main gradients  main_grads_dtype    accumulation over microbatches, and the optimizer's gradients
    communication   grad_comm_dtype     dtype sent in a reduction; grad_reduce_dtype: dtype of the sum

:func:`plan_precision` plans a policy for one model before anything changes. The :class:`PrecisionPlan` is then applied
around FSDP2.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy as Fsdp2Policy

from te_fsdp.collectives.redistribute import COMM_DTYPES
from te_fsdp.errors import PrecisionError
from te_fsdp.quantized.shards import Key
from te_fsdp.records import ParameterPlan, is_replicated, param_owners, plan_of, replace_local_tensor
from te_fsdp.upstream import te as _te, torch_dtensor as _torch


# The policy is independent of TE's recipe. A quantized weight is a compute weight of one byte per element. Its main
# weight is in the optimizer (``te_fsdp.main_weights``, or FusedAdam's master weights) and always fp32.
@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """The dtypes of a sharded model, for ``te_fsdp.fully_shard(..., precision=policy)``.

    Main names, defaults and the meaning of ``None`` are those of Megatron-FSDP's class of the same name.

    Attributes:
        main_params_dtype: Dtype of the sharded parameters. ``torch.float32`` for a bf16 model: parameters become fp32
            main weights, which start with the bf16 values, or with unrounded fp32 values if the model is on meta.
            ``None``: the model's own dtype without an extra copy. The optimizer then updates the compute weights.
            Frozen parameters keep their dtype. Quantized weights have fp32 main weights in the optimizer and only
            accept ``torch.float32``, unless they are frozen.
        main_grads_dtype: Dtype of gradient accumulation over microbatches (reduced or unreduced) and of
            ``parameter.grad``. ``None``: the compute dtype of the parameter.
        grad_comm_dtype: Dtype in which gradients are sent. ``None``: ``main_grads_dtype``.
        grad_reduce_dtype: Dtype in which the ranks' gradients are summed. ``None``: the communication dtype, in the
            collective. ``torch.float32``: in fp32 after an all-to-all in the communication dtype.
        param_dtype: Compute dtype of forward and backward, and dtype of weight all-gathers unless the weights are
            quantized. ``None``: the model's own dtype.
        output_dtype: Dtype to which floating-point outputs of units are cast. ``None``: no cast.
        cast_forward_inputs: Whether floating-point inputs of units are cast to ``param_dtype`` if it is set.

    Raises:
        PrecisionError: A field has an invalid value. The error names the field.
    """

    main_params_dtype: torch.dtype | None = torch.float32
    main_grads_dtype: torch.dtype | None = torch.float32
    grad_comm_dtype: torch.dtype | None = None
    grad_reduce_dtype: torch.dtype | None = None
    param_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True

    def __post_init__(self) -> None:
        for option in fields(self):
            value = getattr(self, option.name)
            if option.name == "cast_forward_inputs":
                _require(isinstance(value, bool), option.name, "True or False", value)
            elif value is not None:
                allowed = "None or one of " + ", ".join(map(str, COMM_DTYPES))
                _require(value in COMM_DTYPES, option.name, allowed, value)
        # NCCL adds in the dtype that it sends, except that te_fsdp can add in fp32 after an all-to-all.
        reduce, sent_dtype = self.grad_reduce_dtype, self.grad_comm_dtype or self.main_grads_dtype
        _require(
            reduce in (None, torch.float32) or reduce == sent_dtype,
            "grad_reduce_dtype",
            "None, torch.float32 or the communication dtype",
            reduce,
            why=f"Gradients are sent in {sent_dtype}, and only an fp32 sum is more accurate",
        )

    @property
    def adds_in_fp32(self) -> bool:
        """Return whether gradients received in a different dtype are summed in fp32."""
        return self.grad_reduce_dtype == torch.float32


def _require(condition: bool, field: str, expected: str, got: object, *, why: str = "") -> None:
    if not condition:
        raise PrecisionError(
            f"MixedPrecisionPolicy: {field}",
            expected=expected,
            got=repr(got),
            why=why,
            fix=f"pass a different {field}, or omit it",
        )


def gradient_dtype(parameter: torch.Tensor) -> torch.dtype:
    """Return the dtype of a parameter's gradient. Local operation."""
    plan = plan_of(parameter)
    return plan.gradient_dtype if plan is not None and plan.gradient_dtype is not None else parameter.dtype


@dataclass
class PrecisionPlan:
    """A policy applied to a model's units."""

    policy: MixedPrecisionPolicy  #: The user's policy
    #: Unit -> compute dtype; ``None`` without floating-point parameters.
    compute: dict[str, torch.dtype | None]

    def accumulation_dtype(self, unit: str) -> torch.dtype | None:
        """Return the dtype in which a unit's gradients are accumulated."""
        return self.policy.main_grads_dtype or self.compute[unit]

    def gradient_of(self, parameter: torch.Tensor, plan: ParameterPlan) -> torch.dtype | None:
        """Return a parameter's gradient dtype before :meth:`widen`; ``None`` if it is the parameter's own dtype."""
        if not _trained(parameter):
            return None
        replicated, policy = plan.storage.is_replicated, self.policy
        default = parameter.dtype if replicated else policy.main_params_dtype or parameter.dtype
        dtype = policy.main_grads_dtype if replicated else self.accumulation_dtype(plan.unit)
        return None if dtype == default else dtype

    def fsdp2_policy(self, unit: str) -> Fsdp2Policy:
        """Return FSDP2's policy for a unit. Local operation."""
        policy = self.policy
        return Fsdp2Policy(
            param_dtype=self.compute[unit],
            # Not `None`, whose meaning depends on the version of torch.
            reduce_dtype=self.accumulation_dtype(unit),
            output_dtype=policy.output_dtype,
            # FSDP2 casts inputs whenever its param_dtype is set, which is always the case here.
            cast_forward_inputs=policy.cast_forward_inputs and policy.param_dtype is not None,
        )

    def widen(self, model: nn.Module) -> None:
        """Replace parameters by main weights of the same values. Tied parameters stay tied. Local operation."""
        # Called between ``set_device_mesh`` and FSDP2, while no parameter is quantized.
        dtype = self.policy.main_params_dtype
        if dtype is None:
            return
        done: dict[int, torch.nn.Parameter] = {}
        for _, module, name, parameter in param_owners(model):
            # FSDP2 makes no copy of replicated parameters in the compute dtype: forward would read the wider
            # values.
            if is_replicated(module, name) or not _trained(parameter) or parameter.dtype == dtype:
                continue
            if id(parameter) not in done:
                done[id(parameter)] = replace_local_tensor(
                    parameter, _torch.local_of(parameter).detach().to(dtype)
                )
            module._parameters[name] = done[id(parameter)]


def _trained(parameter: torch.Tensor) -> bool:
    return parameter.requires_grad and parameter.is_floating_point()


def plan_precision(
    model: nn.Module,
    rows: Mapping[Key, ParameterPlan],
    units: Iterable[str],
    policy: MixedPrecisionPolicy,
) -> PrecisionPlan:
    """Plan a policy for a model before ``set_device_mesh``. Local operation without changes, identical on all ranks.

    ``rows`` are the plans of its parameters, by owner's id and name. ``units`` are the future FSDP2 units, outer
    before inner. Raises PrecisionError, with the parameter or the unit, if the policy contradicts the model.
    """
    # Label, parameter, and whether it is or will be quantized.
    members: dict[str, list[tuple[str, torch.Tensor, bool]]] = {unit: [] for unit in units}
    for label, module, name, parameter in param_owners(model):
        row = rows[id(module), name]
        # A tied parameter has several labels, and belongs to the unit of the first one.
        if not row.storage.is_replicated and label == row.owners[0] and parameter.is_floating_point():
            members[row.unit].append((label, parameter, _te.weight_quantizer(module, name) is not None))
    compute: dict[str, torch.dtype | None] = {}
    for unit, params in reversed(members.items()):
        labels = {parameter.dtype: label for label, parameter, _ in params}
        if policy.param_dtype is not None:
            compute[unit] = policy.param_dtype if params else None
        elif len(labels) > 1:
            raise PrecisionError(
                f"{unit or 'model'}: parameters of several dtypes in one unit",
                expected="one compute dtype",
                got=", ".join(f"{dtype} ({label})" for dtype, label in labels.items()),
                why="FSDP2 all-gathers the parameters of a unit in one dtype",
                fix="pass MixedPrecisionPolicy(param_dtype=...), or make separate units (units=...)",
            )
        else:
            compute[unit] = next(iter(labels), None)
        for label, parameter, quantized in params:
            if parameter.requires_grad:
                _check_main_params_dtype(label, parameter, quantized, policy.main_params_dtype)
    return PrecisionPlan(policy, compute)


def _check_main_params_dtype(
    label: str, parameter: torch.Tensor, quantized: bool, main: torch.dtype | None
) -> None:
    """Raise PrecisionError if main_params_dtype cannot represent the parameter."""
    if quantized and main != torch.float32:
        raise PrecisionError(
            f"{label}: main_params_dtype={main} for a quantized weight",
            expected="torch.float32",
            got=main,
            why="Its main weight is in the optimizer and always fp32. An update of the quantized weight itself"
            " would be lost by rounding",
            fix="MixedPrecisionPolicy(main_params_dtype=torch.float32), and te_fsdp.main_weights(model, optimizer)"
            " or FusedAdam(..., master_weights=True)",
        )
    narrow = (torch.bfloat16, torch.float16)
    if main not in (None, parameter.dtype) and not (main == torch.float32 and parameter.dtype in narrow):
        raise PrecisionError(
            f"{label}: main_params_dtype={main} for a parameter of {parameter.dtype}",
            expected=f"{parameter.dtype}, a wider dtype or None",
            got=main,
            why="Main weights would be less precise than the model",
            fix="MixedPrecisionPolicy(main_params_dtype=None) keeps the model's own dtype",
        )
