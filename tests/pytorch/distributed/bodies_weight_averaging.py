"""Bodies of averaged models, compared with one process."""

from __future__ import annotations

from typing import Any

import harness
import torch
from torch import nn
from torch.optim import swa_utils

WIDTH = 16


class Block(nn.Module):
    """A TE layer and a normalization whose statistics are buffers."""

    def __init__(self, te: Any) -> None:
        super().__init__()
        self.linear = te.Linear(WIDTH, WIDTH, device=harness.device())
        self.norm = nn.BatchNorm1d(WIDTH, device=harness.device())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.norm(self.linear(x))


class Net(nn.Module):
    def __init__(self, te: Any) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Block(te), Block(te))
        self.head = nn.Linear(WIDTH, 4, device=harness.device())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(x))


def _batch(seed: int) -> torch.Tensor:
    """Return the same batch on all ranks, so that statistics equal one process."""
    return torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(seed)).to(harness.device())


def _evaluate(model: nn.Module) -> torch.Tensor:
    model.eval()
    with torch.no_grad():
        result = model(_batch(100))
    model.train()
    return result


def _pair(strategy: str) -> tuple[nn.Module, nn.Module, Any]:
    """Return a plain model, an unsharded copy with the same weights, and the meshes."""
    import transformer_engine.pytorch as te

    import te_fsdp

    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(Net(te))
    return models[0], models[1], te_fsdp.Meshes.build(dp_shard=-1, device_type=harness.device_type())


def evaluations_of_averaged_model(strategy: str, average: str) -> list[float]:
    """Return the largest error of each evaluation of an ``AveragedModel``, and whether values change."""
    import te_fsdp

    functions = {
        "ema": {"multi_avg_fn": swa_utils.get_ema_multi_avg_fn(0.5)},
        "swa": {"multi_avg_fn": swa_utils.get_swa_multi_avg_fn()},
        "own": {"avg_fn": lambda old, new, _: 0.5 * old + 0.5 * new},
    }
    plain, model, meshes = _pair(strategy)
    averages = [swa_utils.AveragedModel(one, **functions[average]) for one in (plain, model)]
    for one in (model, averages[1].module):
        te_fsdp.fully_shard(one, meshes, strategy=strategy, units=[Block], checks="setup")
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.5) for one in (plain, model)]
    errors, before = [], None
    for step in range(4):
        results = []
        for one, mean, optimizer in zip((plain, model), averages, optimizers, strict=True):
            one(_batch(step)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            mean.update_parameters(one)
            swa_utils.update_bn([_batch(50 + step)], mean)
            results.append(_evaluate(mean))
        errors.append((results[0] - results[1]).abs().max().item())
        # The control: an evaluation of the previous average would differ by more.
        assert before is None or (results[0] - before).abs().max() > 1e-3
        before = results[0]
    return errors


def foreach_copy_between_evaluations(strategy: str) -> float:
    """Copy weights by ``torch._foreach_copy_`` between two evaluations. Return the error of the second."""
    import te_fsdp

    plain, model, meshes = _pair(strategy)
    te_fsdp.fully_shard(model, meshes, strategy=strategy, units=[Block], checks="setup")
    before = _evaluate(model)
    with torch.no_grad():
        for one in (plain, model):
            parameters = [*one.parameters()]
            torch._foreach_copy_(parameters, [p.detach() * 0.5 for p in parameters])
    expected, got = _evaluate(plain), _evaluate(model)
    assert (expected - before).abs().max() > 1e-3
    return (expected - got).abs().max().item()


def has_foreach_handlers(strategy: str) -> list[bool]:
    """Return whether foreach functions have handlers after an evaluation and after the next forward."""
    from torch.distributed.tensor import DTensor

    import te_fsdp

    operator, present = torch.ops.aten._foreach_lerp_.Scalar, list[bool]()
    _, model, meshes = _pair(strategy)
    te_fsdp.fully_shard(model, meshes, strategy=strategy, units=[Block], checks="setup")
    for evaluate in (True, False):
        if evaluate:
            _evaluate(model)
        else:
            model(_batch(1)).square().mean().backward()
        present.append(operator in DTensor._op_dispatcher._custom_op_handlers)
    return present


#: Further arguments by overload of ``torch._foreach_`` functions. ``L`` is a list of tensors, ``S`` one of numbers.
ARGUMENTS: dict[str, dict[str, str]] = {
    "_foreach_addcdiv_": {"Scalar": "LL2", "ScalarList": "LLS"},
    "_foreach_addcmul_": {"Scalar": "LL2", "ScalarList": "LLS"},
    "_foreach_lerp_": {"List": "LL", "Scalar": "L2", "ScalarList": "LS"},
}
OTHERS = {"default": "", "Scalar": "2", "List": "L", "ScalarList": "S", "Tensor": "T"}


def foreach_writes_between_evaluations(strategy: str) -> dict[str, list[str]]:
    """Run every in-place ``torch._foreach_`` function between two evaluations. Group them by outcome."""
    import te_fsdp

    plain, model, meshes = _pair(strategy)
    te_fsdp.fully_shard(model, meshes, strategy=strategy, units=[Block], checks="setup")
    start = [p.detach().sigmoid() for p in plain.parameters()]  # in the domain of all functions
    found: dict[str, list[str]] = {"equal": [], "unequal": [], "refused": []}
    calls = [
        (name, overload, ARGUMENTS.get(name, {}).get(overload, OTHERS[overload]))
        for name in dir(torch)
        if name.startswith("_foreach_") and name.endswith("_") and name != "_foreach_copy_"
        for overload in getattr(torch.ops.aten, name).overloads()
        if not (name in ARGUMENTS and overload == "Tensor")  # numbers in a tensor, as those of ScalarList
    ]
    for name, overload, kinds in calls:
        with torch.no_grad():
            for one in (plain, model):
                for parameter, value in zip(one.parameters(), start, strict=True):
                    value = value if one is plain else _like(value, parameter)
                    parameter.copy_(value)
        before = _evaluate(plain)
        _evaluate(model)
        label = f"{name}.{overload}"
        for one in (plain, model):
            parameters = [*one.parameters()]
            others = {
                "2": 0.55,
                "L": [p.detach() * 2 - 0.52 for p in parameters],
                "S": [0.5 + 0.01 * index for index in range(len(parameters))],
                "T": torch.tensor(0.55, device=harness.device()),
            }
            try:
                with torch.no_grad():
                    getattr(torch, name)(parameters, *(others[kind] for kind in kinds))
            except (RuntimeError, NotImplementedError):
                assert one is model, label
                found["refused"].append(label)
                break
        else:
            expected, got = _evaluate(plain), _evaluate(model)
            # The control: the earlier weights would have a different result.
            changed = not torch.allclose(expected, before, rtol=1e-3, atol=1e-3)
            assert changed or name in ("_foreach_abs_", "_foreach_frac_"), label
            is_close = torch.allclose(expected, got, rtol=1e-5, atol=1e-5, equal_nan=True)
            found["equal" if is_close else "unequal"].append(label)
    return found


def _like(value: torch.Tensor, parameter: Any) -> torch.Tensor:
    from torch.distributed.tensor import DTensor, distribute_tensor

    if not isinstance(parameter, DTensor):
        return value
    return distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)
