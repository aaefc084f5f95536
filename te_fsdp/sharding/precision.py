"""``MixedPrecisionPolicy``: in which dtypes weights are kept, gradients add up, and gradients travel.

    main weights    main_params_dtype   what the optimizer updates and checkpoints hold (FSDP2's sharded parameters)
    compute         param_dtype         what forward and backward see (FSDP2's unsharded parameters)
    main gradients  main_grads_dtype    in what microbatches add up, and what the optimizer is given
    wire            grad_comm_dtype     what is sent in a reduction; grad_reduce_dtype: in what it is added up

The policy knows nothing of TE's recipe. A quantized weight is a compute weight of one byte per element whose main
weight lies in the optimizer (``te_fsdp.main_weights``, or FusedAdam's master weights), always in fp32.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch

from te_fsdp.errors import PrecisionError
from te_fsdp.move.comm import COMM_DTYPES

__all__ = ["MixedPrecisionPolicy"]


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
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name == "cast_forward_inputs":
                _require(isinstance(value, bool), field.name, "True or False", value)
            elif value is not None:
                allowed = "None or one of " + ", ".join(map(str, COMM_DTYPES))
                _require(value in COMM_DTYPES, field.name, allowed, value)
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
