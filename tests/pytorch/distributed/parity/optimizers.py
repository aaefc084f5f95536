"""Bodies: optimizers that look at more than each element, closures, fused kernels; copies of optimizers."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import harness
import torch
import torch.distributed as dist
from torch import nn

WIDTH, ROWS = 16, 8
# fp64: some hundred sums of up to 512 products of size 1, added in another order (2^-53 each).
FP64 = 1e-12
WHY_FP64 = "fp64: sums added in another order, through three evaluations of a step"


class Net(nn.Module):
    """In fp64, where a search that branches on rounding does not."""

    def __init__(self, outputs: int = WIDTH) -> None:
        super().__init__()
        options: dict[str, Any] = {"dtype": torch.float64, "device": harness.device()}
        self.first, self.last = (
            nn.Linear(WIDTH, 2 * WIDTH, **options),
            nn.Linear(2 * WIDTH, outputs, **options),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.first(x)))


def _pair(
    axes: dict[str, int], strategy: str = "optim_grads_params", outputs: int = WIDTH
) -> tuple[Any, Net, Net]:
    """Meshes, the model of one process, and the same sharded."""
    import te_fsdp

    torch.manual_seed(1)
    meshes = te_fsdp.Meshes.build(**axes, device_type=harness.device_type())
    reference = Net(outputs)
    subject = copy.deepcopy(reference)
    te_fsdp.fully_shard(subject, meshes, units=["first"], strategy=strategy)
    return meshes, reference, te_fsdp.materialize(subject)


def _closure(
    model: nn.Module, optimizer: Any, ranks: int = 1, *, mean: bool = True
) -> Callable[[], torch.Tensor]:
    """Of this rank's part of the data: the mean loss of all, or this rank's own."""
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(ROWS, WIDTH, dtype=torch.float64, generator=generator).to(harness.device())
    part = x.chunk(ranks)[dist.get_rank() % ranks]

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (model(part) - part.cos()[:, :1]).square().mean()
        loss.backward()
        loss = loss.detach().clone()
        if mean and ranks > 1:
            dist.all_reduce(loss)
            loss /= ranks
        return loss

    return closure


def lbfgs(axes: dict[str, int], strategy: str = "optim_grads_params", spoil: bool = False) -> dict[str, Any]:
    """Three steps of three iterations, with a line search and without, against one process.

    Args:
        axes: mesh sizes; all ranks have data of their own.
        strategy: of fully_shard.
        spoil: a negative control: the reference has another tolerance, at which its search ends.
    """
    checks = harness.Comparisons()
    for search in (None, "strong_wolfe"):
        meshes, reference, subject = _pair(axes, strategy)
        options: dict[str, Any] = {"lr": 0.5, "max_iter": 3, "line_search_fn": search}
        one = torch.optim.LBFGS(reference.parameters(), **options | ({"history_size": 1} if spoil else {}))
        other = torch.optim.LBFGS(subject.parameters(), **options)
        for step in range(3):
            one.step(_closure(reference, one))
            other.step(_closure(subject, other, meshes.device_mesh.size()))
            for name, own in subject.named_parameters():
                whole = reference.get_parameter(name).detach().cpu()
                checks.close(f"{search} {step} {name}", harness.full(own.detach()), whole, FP64, WHY_FP64)
    return checks.require(2 * 3 * 4)


def refused() -> dict[str, str]:
    """Text of the error of each; no weight changes."""
    import transformer_engine.pytorch as te

    import te_fsdp

    def make(kind: Any, outputs: int = WIDTH, frozen: bool = False, **options: Any) -> tuple[Net, Any]:
        _, _, model = _pair({}, outputs=outputs)
        model.last.bias.requires_grad_(not frozen)
        return model, kind(model.parameters(), lr=0.1, **options)

    def in_no_sync(model: Net, optimizer: Any) -> Any:
        def closure() -> torch.Tensor:
            with te_fsdp.no_sync(model):
                return _closure(model, optimizer, 2)()

        return closure

    def apart(model: Net, optimizer: Any) -> Any:
        return _closure(model, optimizer, 2, mean=False)

    def alike(model: Net, optimizer: Any) -> Any:
        return _closure(model, optimizer, 2)

    lbfgs, sgd, adagrad = torch.optim.LBFGS, torch.optim.SGD, torch.optim.Adagrad
    cases = {
        "uneven rows": (make(lbfgs, 7), alike),
        "not trained": (make(lbfgs, frozen=True), alike),
        "own losses": (make(lbfgs), apart),
        "own losses, searched": (make(lbfgs, line_search_fn="strong_wolfe"), apart),
        "no_sync": (make(sgd), in_no_sync),
        "fused SGD": (make(sgd, fused=True), None),
        "fused SGD, rate on the device": (make(sgd, fused=True), None),
        "fused Adagrad": (make(adagrad, fused=True), None),
        "FusedSGD": (make(te.optimizers.FusedSGD), None),
    }
    cases["fused SGD, rate on the device"][0][1].param_groups[0]["lr"] = torch.tensor(0.1)
    found = {}
    for name, ((model, optimizer), closure_of) in cases.items():
        before = [harness.full(p).clone() for p in model.parameters()]
        try:
            if closure_of is None:
                _closure(model, optimizer, 2)()
                optimizer.step()
            else:
                optimizer.step(closure_of(model, optimizer))
            found[name] = ""
        except te_fsdp.TeFsdpError as error:
            found[name] = f"{type(error).__name__}: {error}"
        now = map(harness.full, model.parameters())
        assert all(itertools.starmap(torch.equal, zip(before, now, strict=True))), (
            f"{name}: weights have changed"
        )
    return found
