"""How gradients travel: in which dtype they cross the wire, and in which they are added up.

    main gradients   fp32 buffer (main_grads_dtype), where microbatches accumulate
    wire             the same buffer rounded to grad_comm_dtype, right before a collective
    reduction        by the transport in the wire's dtype; or here in fp32, of what an all-to-all brought

One :class:`GradComm` per model decides for all that reduces its gradients: for FSDP2's reduce-scatters
(:mod:`te_fsdp.sharding.comm_units`), for parameters that are not sharded and for the outer axis of hybrid sharding
(:mod:`te_fsdp.move.start`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from te_fsdp.errors import OrderError, PrecisionError

if TYPE_CHECKING:
    from torch import nn

__all__ = ["COMM_DTYPES", "GradComm", "comm_of", "grad_comm", "set_comm"]

#: Dtypes that gradients may travel in; every transport adds these.
COMM_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

#: Key in the ``__dict__`` of a sharded model.
_KEY = "_te_fsdp_grad_comm"


@dataclass
class GradComm:
    """What one model's gradient reductions look up each time they run.

    Attributes:
        dtype: On the wire; ``None``: the dtype of the buffer that is reduced (main_grads_dtype).
        fp32_sum: Add in fp32 what crossed the wire in another dtype, instead of in the wire's dtype.
        look: Is shown each buffer right before its reduction, with the name of its unit (``None``: of no unit).
    """

    dtype: torch.dtype | None = None
    fp32_sum: bool = False
    look: Callable[[str | None, torch.Tensor], None] | None = None

    def wire(self, dtype: torch.dtype) -> torch.dtype:
        """Wire dtype of a buffer of ``dtype``. Local operation."""
        return dtype if self.dtype is None else self.dtype


def set_comm(model: nn.Module, comm: GradComm) -> None:
    """Make ``comm`` what :func:`grad_comm` changes for ``model``. Local operation."""
    model.__dict__[_KEY] = comm


def comm_of(model: nn.Module) -> GradComm | None:
    """The model's :class:`GradComm`; ``None`` where it was sharded without a precision policy. Local operation."""
    return model.__dict__.get(_KEY)


@contextlib.contextmanager
def grad_comm(model: nn.Module, dtype: torch.dtype | None) -> Iterator[None]:
    """Let gradients travel in another dtype for a while, for example in bf16 for all but the last steps.

    Holds for every reduction that runs inside: of a backward, of parameters that are not sharded, of the outer axis
    at an optimizer step. Contexts nest; leaving one, also by an exception, restores what held before. What gradients
    accumulate in does not change. Local operation; all ranks must use the same dtype, as the wire connects them.

    Args:
        model: The model that :func:`te_fsdp.fully_shard` was called on, with a precision policy.
        dtype: ``torch.float32``, ``torch.bfloat16`` or ``torch.float16``; ``None``: main_grads_dtype.

    Raises:
        OrderError: The model has no precision policy.
        PrecisionError: Another dtype.
    """
    comm = comm_of(model)
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
            fix="gradients travel in floating-point dtypes that every transport can add",
        )
    before, comm.dtype = comm.dtype, dtype
    try:
        yield
    finally:
        comm.dtype = before
