"""Closures: forward and backward that an optimizer runs within its step, once or several times.

What is looked at before a step is over by then; :func:`look_after_closure` does it again after each call. ``LBFGS``
decides by the loss where to stop, and where a search along its direction goes on: ranks whose losses differ would part,
and wait for each other.
"""

from __future__ import annotations

import functools
import struct
from typing import TYPE_CHECKING, Any

import torch

from te_fsdp.agree import are_equal
from te_fsdp.errors import MeshError
from te_fsdp.sharding.reductions import require_reduced

if TYPE_CHECKING:
    from collections.abc import Callable

    from te_fsdp.step_hooks import Step


def look_after_closure(step: Step) -> None:
    """Look at the gradients that a closure leaves, and at the losses that steer ``LBFGS``, after each call of it."""
    if step.closure is not None and step.models:
        step.closure = functools.partial(_looked_after, step, step.closure)


def _looked_after(step: Step, closure: Callable[[], Any]) -> Any:
    """Collective over the mesh for ``LBFGS``: one max all-reduce of two integers.

    Raises:
        OrderError: Gradients that were not reduced.
        MeshError: ``LBFGS``, and losses that differ.
    """
    loss = closure()
    for state, parameters in step.models:
        require_reduced(state, f"{step.where}(closure)", parameters)
        if state.nan_report is not None:
            state.nan_report.check()
    if isinstance(step.optimizer, torch.optim.LBFGS):
        _require_equal_loss(step, float(loss))
    return loss


def _require_equal_loss(step: Step, loss: float) -> None:
    mesh = step.models[0][0].meshes.device_mesh
    (bits,) = struct.unpack("q", struct.pack("d", loss))
    halves = [bits >> 32, bits & 0xFFFFFFFF]
    if mesh.size() > 1 and not bool(are_equal(halves, mesh).all()):
        raise MeshError(
            f"{step.where}(closure): losses that differ between ranks",
            expected="the same loss on all ranks, the mean over their data",
            got=f"here {loss!r}",
            why="It decides by the loss where to stop: the ranks would part, and wait for each other",
            fix="after loss.backward(): loss = loss.detach().clone(); torch.distributed.all_reduce(loss); return "
            "loss / the number of ranks",
        )
