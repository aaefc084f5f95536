"""``MixedPrecisionPolicy``: in which dtypes weights are kept, gradients add up, and gradients are sent.

    main weights    main_params_dtype   what the optimizer updates and checkpoints hold (FSDP2's sharded parameters)
    compute         param_dtype         what forward and backward see (FSDP2's unsharded parameters)
    main gradients  main_grads_dtype    in what microbatches add up, and what the optimizer is given
    wire            grad_comm_dtype     what is sent in a reduction; grad_reduce_dtype: in what it is added up

The policy knows nothing of TE's recipe. A quantized weight is a compute weight of one byte per element whose main
weight lies in the optimizer (``te_fsdp.main_weights``, or FusedAdam's master weights), always in fp32.

:func:`plan_precision` says what a policy means for one model, before anything changes; the :class:`PrecisionPlan` is
carried out around FSDP2.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy as Fsdp2Policy

from te_fsdp.collectives.redistribute import COMM_DTYPES
from te_fsdp.errors import PrecisionError
from te_fsdp.records import is_replicated, iter_param_owners, plan_of, replace_local_tensor
from te_fsdp.upstream import te as _te, torch_dtensor as _torch

if TYPE_CHECKING:
    from torch import nn

    from te_fsdp.quantized.shards import Key
    from te_fsdp.records import ParameterPlan


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """The dtypes of a sharded model, for ``te_fsdp.fully_shard(..., precision=policy)``.

    Main names, defaults and the meaning of ``None`` are those of Megatron-FSDP's class of this name.

    Attributes:
        main_params_dtype: Of the sharded parameters. ``torch.float32`` under a bf16 model: parameters become fp32 main
            weights, beginning at the bf16 values, or at unrounded fp32 draws when the model is on meta. ``None``: the
            model's own dtype, no extra copy; the optimizer then updates what compute reads. Frozen parameters keep
            their dtype. Quantized weights have fp32 main weights in the optimizer and accept only
            ``torch.float32``, unless they are frozen.
        main_grads_dtype: Of gradients while they add up over microbatches, whether each one is reduced or not, and
            of ``parameter.grad``. ``None``: the dtype that the parameter is computed in.
        grad_comm_dtype: Of gradients on the wire. ``None``: ``main_grads_dtype``.
        grad_reduce_dtype: In what ranks' gradients are added. ``None``: in the wire's dtype, by the transport.
            ``torch.float32``: in fp32 here, after an all-to-all in the wire's dtype.
        param_dtype: That forward and backward compute in, and that weights are gathered in unless they are
            quantized. ``None``: the model's own dtype.
        output_dtype: That floating-point outputs of units are cast to. ``None``: none is.
        cast_forward_inputs: Whether floating-point inputs of units are cast to ``param_dtype``, where that is given.

    Raises:
        PrecisionError: A field has a value that it cannot have; names the field.
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
        reduce, wire = self.grad_reduce_dtype, self.grad_comm_dtype or self.main_grads_dtype
        _require(
            reduce in (None, torch.float32) or reduce == wire,
            "grad_reduce_dtype",
            "None, torch.float32 or the dtype on the wire",
            reduce,
            why=f"Gradients travel in {wire}, and only fp32 adds them up more exactly",
        )

    @property
    def adds_in_fp32(self) -> bool:
        """Whether gradients from the wire are added up in fp32 where their dtype is another."""
        return self.grad_reduce_dtype == torch.float32


def _require(condition: bool, field: str, expected: str, got: object, *, why: str = "") -> None:
    if not condition:
        raise PrecisionError(
            f"MixedPrecisionPolicy: {field}",
            expected=expected,
            got=repr(got),
            why=why,
            fix=f"pass another {field}, or leave it out",
        )


def gradient_dtype(parameter: torch.Tensor) -> torch.dtype:
    """Dtype of a parameter's gradient. Local operation."""
    plan = plan_of(parameter)
    return plan.gradient_dtype if plan is not None and plan.gradient_dtype is not None else parameter.dtype


@dataclass
class PrecisionPlan:
    """A policy and what it comes to in a model's units."""

    policy: MixedPrecisionPolicy  #: As the user gave it
    compute: dict[
        str, torch.dtype | None
    ]  #: Unit -> in what it computes; ``None`` without floating-point parameters
    all_reduces: bool = False  #: Whether FSDP2 itself reduces over ``dp_replicate``

    def accumulation_dtype(self, unit: str) -> torch.dtype | None:
        """Return the dtype in which a unit's gradients are accumulated."""
        return self.policy.main_grads_dtype or self.compute[unit]

    def gradient_of(self, parameter: torch.Tensor, plan: ParameterPlan) -> torch.dtype | None:
        """Dtype of the gradient of a parameter that has not been widened yet, if it will not be the parameter's own."""
        if not _trained(parameter):
            return None
        whole, policy = plan.storage.is_whole, self.policy
        own = parameter.dtype if whole else policy.main_params_dtype or parameter.dtype
        dtype = policy.main_grads_dtype if whole else self.accumulation_dtype(plan.unit)
        return None if dtype == own else dtype

    def fsdp2_policy(self, unit: str) -> Fsdp2Policy:
        """FSDP2's own policy for a unit. Local operation.

        ``reduce_dtype`` is given explicitly: what ``None`` means depends on the version of torch.
        """
        policy = self.policy
        return Fsdp2Policy(
            param_dtype=self.compute[unit],
            reduce_dtype=self.accumulation_dtype(unit),
            output_dtype=policy.output_dtype,
            cast_forward_inputs=policy.cast_forward_inputs and policy.param_dtype is not None,
        )

    def widen(self, model: nn.Module) -> None:
        """Replace parameters by main weights of the same values, ties kept. Local operation.

        To be called between ``set_device_mesh`` and FSDP2, while no parameter is quantized.
        """
        dtype = self.policy.main_params_dtype
        if dtype is None:
            return
        done: dict[int, torch.nn.Parameter] = {}
        for _, module, name, parameter in iter_param_owners(model):
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
    *,
    all_reduces: bool = False,
) -> PrecisionPlan:
    """Plan a policy for a model before ``set_device_mesh``. Local operation, changes nothing; equal on all ranks.

    ``rows`` are the plans of its parameters, by owner's id and name; ``units`` those that become FSDP2's, outer before
    inner. ``all_reduces`` says that FSDP2 itself will reduce over ``dp_replicate`` (HSDP).

    Raises:
        PrecisionError: The policy contradicts the model; names the parameter or the unit.
    """
    # Label, parameter, and whether it is or will be quantized.
    members: dict[str, list[tuple[str, torch.Tensor, bool]]] = {unit: [] for unit in units}
    for label, module, name, parameter in iter_param_owners(model):
        row = rows[id(module), name]
        if not row.storage.is_whole and label == row.owners[0] and parameter.is_floating_point():
            members[row.unit].append((label, parameter, _te.weight_quantizer(module, name) is not None))
    compute: dict[str, torch.dtype | None] = {}
    for unit, own in reversed(members.items()):
        compute[unit] = _compute_dtype(unit, own, policy)
        for label, parameter, quantized in own:
            if parameter.requires_grad:
                _check_main_params_dtype(label, parameter, quantized, policy.main_params_dtype)
    return PrecisionPlan(policy, compute, all_reduces)


def _compute_dtype(unit: str, members: list[Any], policy: MixedPrecisionPolicy) -> torch.dtype | None:
    """The dtype that a unit computes in."""
    if policy.param_dtype is not None:
        return policy.param_dtype if members else None
    found = {parameter.dtype: label for label, parameter, _ in members}
    if len(found) > 1:
        raise PrecisionError(
            f"{unit or 'model'}: parameters of several dtypes in one unit",
            expected="one dtype to compute in",
            got=", ".join(f"{dtype} ({label})" for dtype, label in found.items()),
            why="FSDP2 gathers the parameters of a unit in one dtype",
            fix="say MixedPrecisionPolicy(param_dtype=...), or make a unit of each part (units=...)",
        )
    return next(iter(found), None)


def _check_main_params_dtype(
    label: str, parameter: torch.Tensor, quantized: bool, main: torch.dtype | None
) -> None:
    """Main weights that can hold what the model holds."""
    if quantized and main != torch.float32:
        raise PrecisionError(
            f"{label}: main_params_dtype={main} for a quantized weight",
            expected="torch.float32",
            got=main,
            why="Its main weight lies in the optimizer, always in fp32: an update of the quantized weight itself"
            " would be lost in rounding",
            fix="MixedPrecisionPolicy(main_params_dtype=torch.float32), and te_fsdp.main_weights(model, optimizer)"
            " or FusedAdam(..., master_weights=True)",
        )
    narrow = (torch.bfloat16, torch.float16)
    if main not in (None, parameter.dtype) and not (main == torch.float32 and parameter.dtype in narrow):
        raise PrecisionError(
            f"{label}: main_params_dtype={main} for a parameter of {parameter.dtype}",
            expected=f"{parameter.dtype}, a wider dtype or None",
            got=main,
            why="Main weights would hold less than the model does",
            fix="MixedPrecisionPolicy(main_params_dtype=None) keeps the model's own dtype",
        )
