"""Bodies: state that a discarded step or an average must not pass on, such as clip factors."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import harness
import torch
import torch.distributed as dist
from torch import nn

from hfsdp.overlap import CLOSE, Pair

#: Clips each of the gradients below, by factors that differ.
MAX_NORM = 1e-2


def discard_clipped_step(how: str, marked: bool) -> int:
    """Clip, discard the step, clip and step, then run another backward, compared with one process.

    Args:
        how: How the step is discarded: "optimizer", "model" or "te_fsdp" (their zero_grad).
        marked: Whether backwards are marked as the last ones, so that averages begin during them.
    """
    import te_fsdp

    pair = Pair()
    pair.both(1, marked=marked)
    pair.backward(2, marked=marked)
    te_fsdp.clip_grad_norm_(pair.model, MAX_NORM / 7)
    if how == "te_fsdp":
        te_fsdp.zero_grad(pair.model)
    else:
        getattr(pair, how).zero_grad()
    pair.backward(3, marked=marked)
    pair.expect(3)
    norms = [
        te_fsdp.clip_grad_norm_(pair.model, MAX_NORM),
        torch.nn.utils.clip_grad_norm_(pair.reference.parameters(), MAX_NORM),
    ]
    pair.checks.close("norm", harness.full(norms[0]), norms[1], **CLOSE)
    pair.optimizer.step()
    pair.other.step()
    # Not cleared: the next backward is added to what the step has left.
    pair.backward(4, marked=marked)
    pair.expect(4)
    pair.step()
    return pair.checks.require(10)


class Uneven(nn.Module):
    """Weights of which two replicas cannot keep the same number of rows in any dim."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.first = nn.Linear(7, 5, device=harness.device())
        self.second = nn.Linear(5, 3, device=harness.device())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).tanh())


@contextlib.contextmanager
def _what_is_sent(found: list[bool]) -> Iterator[None]:
    """Note of each buffer that is averaged over the outer axis whether all of it is finite, padding included."""
    from te_fsdp.features.hfsdp import overlap

    stock = overlap.redistribute

    def start(buffer: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        found.append(bool(torch.isfinite(buffer).all()))
        return stock(buffer, *args, **kwargs)

    with mock.patch.object(overlap, "redistribute", start):
        yield


def nan_in_padding(marked: bool, poisoned: bool) -> tuple[list[str], list[bool]]:
    """Train with ``report_nan`` while new memory is full of NaN: the padding of uneven rows is sent as zeros.

    Returns:
        The error of each step, and for each communication buffer whether it was finite.

    Args:
        marked: Whether averages begin during backward.
        poisoned: Whether a gradient has NaN itself, the negative control.
    """
    import te_fsdp

    meshes = te_fsdp.Meshes.build(dp_replicate=2, device_type=harness.device_type())
    model = te_fsdp.fully_shard(Uneven(), meshes, units=nn.Linear, outer_strategy="optim")
    te_fsdp.report_nan(model)
    optimizer = te_fsdp.shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    before = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True  # torch.empty returns NaN
    raised, finite = [], []
    try:
        for step in range(3):
            x = torch.randn(4, 7, generator=torch.Generator().manual_seed(step + 9 * dist.get_rank()))
            x = x.to(harness.device()) * (float("nan") if poisoned and step == 2 else 1)
            context = te_fsdp.microbatch(model, is_last=True) if marked else contextlib.nullcontext()
            with _what_is_sent(finite):
                with context:
                    model(x).square().mean().backward()
                try:
                    optimizer.step()
                    raised.append("")
                except te_fsdp.GradientError as error:
                    raised.append(str(error))
            optimizer.zero_grad()
    finally:
        torch.use_deterministic_algorithms(before[0])
        torch.utils.deterministic.fill_uninitialized_memory = before[1]
    return raised, finite
