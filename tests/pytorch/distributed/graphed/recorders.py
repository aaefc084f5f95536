"""A recorder for the CPU, which has no CUDA graphs: it calls recorded functions again."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import harness
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from te_fsdp.features.hfsdp.gradients import UnaveragedGradient


class ReplayedCall:
    """A recording. The function already ran during recording, so the first replay has no effect.

    As in a graph, results and gradients are at the same addresses in each replay.
    """

    def __init__(self, model: nn.Module, call: Callable[[], Any]) -> None:
        self._model, self._call, self._first = model, call, True
        self.result = call()
        self._gradients = self._now()

    def _now(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return [(p, p.grad) for p in self._model.parameters() if p.grad is not None]

    @torch.no_grad()
    def replay(self) -> None:
        """Call the function again."""
        if self._first:
            self._first = False
            return
        with torch.enable_grad():
            result = self._call()
        pairs = zip(tree_leaves(self.result), tree_leaves(result), strict=True)
        for held, new in pairs:
            if isinstance(held, torch.Tensor):
                held.copy_(new)
        for (parameter, held), (_, new) in zip(self._gradients, self._now(), strict=True):
            # Gradients of HFSDP refuse to be read before their average. Others may have changed their class in a step.
            if not isinstance(held, UnaveragedGradient):
                held.copy_(new)
                parameter.grad = held


class CallRecorder:
    """Records on the CPU.

    Attributes:
        failing: Number of the recording that fails, from 0; on this rank.
        recorded: How many were made.
        underway: Whether one is being made.
    """

    def __init__(self, model: nn.Module, failing: int = -1) -> None:
        self._model, self.failing, self.recorded, self.underway = model, failing, 0, False

    def on_own_stream(self) -> Any:
        """Do nothing, because there are no streams."""
        return contextlib.nullcontext()

    def record(self, call: Callable[[], Any]) -> tuple[ReplayedCall, Any]:
        """Run the function, to be run again by replays."""
        self.underway = True
        try:
            again = ReplayedCall(
                self._model, call
            )  # also where it fails: the other ranks wait for its collectives
        finally:
            self.underway = False
        self.recorded += 1
        if self.recorded - 1 == self.failing:
            raise RuntimeError("operation not permitted when stream is capturing")
        return again, again.result


@contextlib.contextmanager
def recording(model: nn.Module, failing: int = -1) -> Iterator[None]:
    """Record the steps made within the context: on the CPU by :class:`CallRecorder`, on GPUs by themselves."""
    from te_fsdp.features import graphed_step

    if harness.device_type() != "cpu":
        yield
        return
    with mock.patch.object(graphed_step, "recorder_for", lambda *_: CallRecorder(model, failing)):
        yield
