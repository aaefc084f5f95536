"""Bodies: optimizers that are not elementwise, closures, fused kernels; copied optimizers."""

from __future__ import annotations

import copy
import itertools
import pickle
from collections.abc import Callable
from typing import Any

import harness
import torch
import torch.distributed as dist
from torch import nn

WIDTH, ROWS = 16, 8
# fp64: some hundred sums of up to 512 products of size 1, added in a different order (2^-53 each).
FP64 = 1e-12
WHY_FP64 = "fp64: sums added in a different order, through three evaluations of a step"


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
    """Return meshes, the model of one process, and the same sharded."""
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
    """Return a closure of this rank's data: the mean loss of all ranks, or its own."""
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
    """Compare three steps of three iterations, with a line search and without, with one process.

    Args:
        axes: mesh sizes; all ranks have data of their own.
        strategy: of fully_shard.
        spoil: a negative control: the reference has a different tolerance, at which its search ends.
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


def errors_of_optimizers() -> dict[str, str]:
    """Return the error of each optimizer; no weight changes."""
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
    results = {}
    for name, ((model, optimizer), closure_of) in cases.items():
        before = [harness.full(p).clone() for p in model.parameters()]
        try:
            if closure_of is None:
                _closure(model, optimizer, 2)()
                optimizer.step()
            else:
                optimizer.step(closure_of(model, optimizer))
            results[name] = ""
        except te_fsdp.TeFsdpError as error:
            results[name] = f"{type(error).__name__}: {error}"
        now = map(harness.full, model.parameters())
        assert all(itertools.starmap(torch.equal, zip(before, now, strict=True))), (
            f"{name}: weights have changed"
        )
    return results


def _trained(model: nn.Module, optimizer: Any) -> bool:
    """Return whether two steps change a weight."""
    before = [harness.full(p).clone() for p in model.parameters()]
    for _ in range(2):
        _closure(model, optimizer)()
        optimizer.step()
    return not all(
        itertools.starmap(torch.equal, zip(before, map(harness.full, model.parameters()), strict=True))
    )


def errors_of_copies(tp: int) -> dict[str, str]:
    """Return the error of each optimizer of copies, before any state; those of models that are copied too train."""
    import te_fsdp

    results = {}
    ways: dict[str, Callable[[Any], Any]] = {
        "deepcopy": copy.deepcopy,
        "pickle": lambda optimizer: pickle.loads(pickle.dumps(optimizer)),
        "copied parameters": lambda optimizer: torch.optim.AdamW(
            copy.deepcopy(optimizer.param_groups[0]["params"])
        ),
    }
    for strategy, (name, copied) in itertools.product(("optim_grads_params", "no_shard"), ways.items()):
        if strategy == "no_shard" and name == "copied parameters":
            continue  # of plain parameters, by a different optimizer, which leaves no trace
        _, _, model = _pair({"tp": tp}, strategy)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        other = copied(optimizer)
        for attempt in range(2):
            try:
                results[f"{strategy}, {name}"] = str(_trained(model, other))
            except te_fsdp.OrderError as error:
                results[f"{strategy}, {name}"] = str(error)
            assert not other.state, f"{name}: attempt {attempt} has stepped"
        assert _trained(model, optimizer) and _trained(model, copy.copy(optimizer))
    return results


def train_copies() -> None:
    """Step copies of a model with its optimizer, and of other optimizers, while a sharded model exists."""
    import transformer_engine.pytorch as te

    import te_fsdp

    meshes = te_fsdp.Meshes.build(tp=2, device_type=harness.device_type())
    bound = te.Linear(
        WIDTH,
        WIDTH,
        parallel_mode="row",
        device=harness.device(),
        params_dtype=torch.float64,
        **meshes.te_kwargs(),
    )
    with torch.no_grad():  # each rank a different part
        bound.weight.normal_(generator=torch.Generator(harness.device()).manual_seed(dist.get_rank()))
    te_fsdp.set_device_mesh(bound, meshes.tp, meshes.weight)
    plain = Net()
    _, _, sharded = _pair({}, "no_shard")
    for model in (bound, plain):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        ways = [copy.deepcopy((model, optimizer))]
        if model is plain:
            ways.append(pickle.loads(pickle.dumps((model, optimizer))))
        for both in ways:
            before = [harness.full(p).clone() for p in both[0].parameters()]
            for p in both[0].parameters():
                p.grad = torch.ones_like(p)
            both[1].step()
            now = map(harness.full, both[0].parameters())
            assert not any(itertools.starmap(torch.equal, zip(before, now, strict=True)))
    alone = torch.optim.SGD([torch.ones(3, requires_grad=True)], lr=0.1)
    copy.deepcopy(alone).step()
    assert _trained(sharded, torch.optim.SGD(sharded.parameters(), lr=0.1))


def error_of_shallow_copy() -> str:
    """Return the error of a shallow copy of an optimizer, which has its state but not te_fsdp's hooks."""
    import te_fsdp

    torch.manual_seed(1)
    model = te_fsdp.fully_shard(Net().bfloat16(), te_fsdp.Meshes.build(device_type=harness.device_type()))
    optimizer = torch.optim.SGD(te_fsdp.materialize(model).parameters(), lr=0.1)
    te_fsdp.main_weights(model, optimizer)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    try:
        copy.copy(optimizer).step()
    except te_fsdp.OrderError as error:
        return str(error)
    return ""
