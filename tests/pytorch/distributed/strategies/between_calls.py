"""Bodies: the state that users see between two calls, such as ``model.parameters()``."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from strategies.accumulation import Pair, refused

CONTEXTS = {
    "`microbatch(is_last=False)`": lambda te_fsdp, model: te_fsdp.microbatch(model, is_last=False),
    "`no_sync`": lambda te_fsdp, model: te_fsdp.no_sync(model),
    "`sync`": lambda te_fsdp, model: te_fsdp.sync(model),
}


def observed_state(pair: Pair) -> str:
    """Return what the model's parameters and their gradients are, in the words of docs/strategies.md."""
    from te_fsdp.features.unreduced_gradients import is_marker
    from te_fsdp.sharded_model import get_sharded_model, shard_of

    now = list(pair.model.parameters())
    state: Any = get_sharded_model(pair.model)
    params = {id(p) for group in pair.optimizer.param_groups for p in group["params"]}
    trained = [p for p in now if p.requires_grad]
    are_shards = {id(p) in params for p in trained}
    if are_shards == {True, False}:
        kind = "root's unsharded"
    else:
        kind = "own" if are_shards == {True} else "unsharded"
    grads = [shard_of(p).grad for p in trained]
    assert sorted(state.parameters()) == sorted(name for name, _ in pair.model.named_parameters())
    if all(g is None for g in grads):
        return f"{kind}, `None`"
    return f"{kind}, {'unreduced' if all(map(is_marker, grads)) else 'reduced'}"


def compare_table(strategy: str) -> dict[str, str]:
    """Return :func:`observed_state` after each call. Compare the gradients by value."""
    import te_fsdp

    pair, results = Pair(strategy), {}
    model = pair.model

    def backward(context: Any = None) -> None:
        with context or contextlib.nullcontext():
            for x in pair.mine():
                (model(x).square().mean() / 3).backward()

    def note(call: str) -> None:
        results[call] = observed_state(pair)
        if results[call].endswith(", reduced"):
            _same_norm(pair)

    note("`fully_shard`, `materialize`")
    with torch.no_grad():
        model(pair.mine()[0])
    note("forward without gradients")
    loss = model(pair.mine()[0]).square().mean()
    note("forward with gradients")
    loss.backward()
    model.zero_grad()
    note("`zero_grad`")
    backward()
    note("backward")
    for name, make in CONTEXTS.items():
        model.zero_grad()
        backward(make(te_fsdp, model))
        note(f"backward in {name}")
    model.zero_grad()
    te_fsdp.set_auto_sync(model, False)
    backward()
    note("backward after `set_auto_sync(False)`")
    te_fsdp.start_grad_reduce(model)
    te_fsdp.finish_grad_reduce(model)
    note("`start_grad_reduce`, `finish_grad_reduce`")
    te_fsdp.clip_grad_norm_(model, 1e9)
    te_fsdp.scale_gradients(model, 1.0)
    note("`clip_grad_norm_`, `scale_gradients`")
    te_fsdp.set_auto_sync(model, True)
    pair.same_gradients()
    pair.optimizer.step()
    results["`optimizer.step()`"] = observed_state(pair)
    model.zero_grad()
    te_fsdp.start_param_gather(model)
    te_fsdp.finish_param_gather(model)
    note("`start_param_gather`, `finish_param_gather`")
    te_fsdp.release_params(model)
    note("`release_params`")
    return results


def _same_norm(pair: Pair) -> None:
    """Check that the norm of the gradients in ``model.parameters()`` is that of one process."""
    from strategies.bodies import run_one_process

    run_one_process(pair.reference, pair.inputs())
    expected = torch.nn.utils.clip_grad_norm_(pair.reference.parameters(), 1e9)
    pair.reference.zero_grad()
    grads = [p.grad for p in pair.model.parameters() if p.grad is not None]
    squares = [g.full_tensor() if isinstance(g, DTensor) else g for g in grads]
    norm = torch.stack([g.double().square().sum() for g in squares]).sum().sqrt()
    # fp32 gradients, summed in a different order: see WHY in strategies/bodies.py.
    torch.testing.assert_close(norm.float(), expected, rtol=1e-5, atol=0)


def clipped_by_torch(strategy: str) -> None:
    """Reduce by hand without automatic reductions; torch's own clipping must then scale the model's gradients."""
    import te_fsdp

    pair = Pair(strategy)
    te_fsdp.set_auto_sync(pair.model, False)
    for x in pair.mine():
        (pair.model(x).square().mean() / 3).backward()
    te_fsdp.finish_grad_reduce(pair.model)
    norm: Any = torch.nn.utils.get_total_norm([p.grad for p in pair.model.parameters() if p.grad is not None])
    norm = float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    torch.nn.utils.clip_grad_norm_(pair.model.parameters(), norm / 2)
    pair.same_gradients(factor=0.5)
    te_fsdp.set_auto_sync(pair.model, True)
    pair.same_step()
    pair.checks.require(20)


def _to_none(parameters: Any) -> None:
    for parameter in parameters:
        parameter.grad = None


class Wrapper(nn.Module):
    """A module of the user's around the model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model


#: How a microbatch is given up.
WAYS: dict[str, Callable[[Pair], None]] = {
    "each parameter of the model": lambda pair: _to_none(pair.model.parameters()),
    "each parameter of the optimizer": lambda pair: _to_none(
        p for group in pair.optimizer.param_groups for p in group["params"]
    ),
    "the optimizer": lambda pair: pair.optimizer.zero_grad(),
    "the optimizer, to zero": lambda pair: pair.optimizer.zero_grad(set_to_none=False),
    "the model": lambda pair: pair.model.zero_grad(),
    "a wrapper": lambda pair: Wrapper(pair.model).zero_grad(),
    "a wrapper, to zero": lambda pair: Wrapper(pair.model).zero_grad(set_to_none=False),
    "nn.Module's own": lambda pair: nn.Module.zero_grad(pair.model),
    "compiled": lambda pair: torch.compile(pair.model, backend="eager").zero_grad(),
    "layer by layer": lambda pair: (
        [child.zero_grad() for child in (*pair.model.blocks, pair.model.head)] and None
    ),
    "nothing": lambda pair: None,
}


def discard_microbatch(strategy: str, ways: list[str], dp_replicate: int = 1) -> None:
    """Give up a microbatch after ``no_sync`` or ``microbatch(is_last=False)``; check that the next step lacks it."""
    import te_fsdp

    pair = Pair(strategy, dp_replicate)
    for way in ways:
        for context in (te_fsdp.no_sync, lambda model: te_fsdp.microbatch(model, is_last=False)):
            for after_forward in (False, True):
                with context(pair.model):
                    (100 * pair.model(pair.mine()[0])).square().mean().backward()
                if not after_forward:
                    WAYS[way](pair)
                for index, x in enumerate(pair.mine()):
                    loss = pair.model(x).square().mean() / 3
                    if after_forward and index == 0:
                        WAYS[way](pair)
                    loss.backward()
                try:
                    pair.same_gradients()
                except AssertionError as error:
                    raise AssertionError(f"{way}, {after_forward=}: {error}") from error
                pair.same_step()


def clear_one_layer(strategy: str, dp_replicate: int = 1) -> None:
    """Clear unreduced gradients of one layer. The next step has the others only, or HSDP raises."""
    import te_fsdp

    pair = Pair(strategy, dp_replicate)
    with te_fsdp.no_sync(pair.model):
        (100 * pair.model(pair.mine()[0])).square().mean().backward()
    pair.model.head.weight.grad = None
    te_fsdp.finish_grad_reduce(pair.model)
    x = pair.inputs()[0].flatten(0, 1)
    (100 * pair.reference(x)).square().mean().backward()
    for name, gradient in ((n, p.grad) for n, p in pair.reference.named_parameters() if p.requires_grad):
        ours: Any = dict(pair.model.named_parameters())[name].grad
        ours = ours.full_tensor() if isinstance(ours, DTensor) else ours
        if name == "head.weight":
            assert ours is None or not ours.any()
        else:
            torch.testing.assert_close(ours, gradient, rtol=1e-4, atol=1e-4 * float(gradient.abs().max()))


def clear_one_layer_of_hsdp() -> None:
    """Clear one layer under HSDP, whose reduced gradients share one buffer. An error names it."""
    import te_fsdp

    pair = Pair("optim_grads_params", 2)
    with te_fsdp.microbatch(pair.model, is_last=False):
        pair.model(pair.mine()[0]).square().mean().backward()
    pair.model.blocks[0].fc1_weight.grad = None
    with refused("blocks.0.fc1_weight", "te_fsdp.zero_grad"):
        pair.model(pair.mine()[1])
    te_fsdp.zero_grad(pair.model)
    pair.whole_step()


def read_unreduced_gradients(strategy: str) -> None:
    """Check that an unreduced gradient is not read by torch's norm, a loss scaler or a copy."""
    import te_fsdp

    pair = Pair(strategy)
    with te_fsdp.no_sync(pair.model):
        pair.model(pair.mine()[0]).square().mean().backward()
    params = [p for group in pair.optimizer.param_groups for p in group["params"]]
    readers: list[Callable[[], Any]] = [
        lambda: torch.nn.utils.clip_grad_norm_(pair.model.parameters(), 1.0),
        lambda: torch.nn.utils.clip_grad_norm_(params, 1.0),
        lambda: torch._foreach_mul_([p.grad for p in params], 0.5),
        lambda: params[0].grad.clone(),
        lambda: params[0].grad.data,
        lambda: params[0].grad + 1,
    ]
    for read in readers:
        with refused("an unreduced gradient", "te_fsdp.finish_grad_reduce(model)"):
            read()
    assert repr(params[0].grad).startswith("Unreduced")
    assert [p.grad.shape for p in params] == [p.shape for p in params]
    te_fsdp.zero_grad(pair.model)
    pair.whole_step()


def error_of_stale_weights(strategy: str) -> None:
    """Change weights between forward and backward: an error by name, and all works again after it."""
    import te_fsdp

    pair = Pair(strategy)
    x = pair.mine()[0]

    def step() -> None:
        pair.optimizer.step()

    def write(parameters: Callable[[], Any]) -> None:
        with torch.no_grad():
            for parameter in parameters():
                parameter.mul_(1.0)

    params = [p for group in pair.optimizer.param_groups for p in group["params"]]
    changes: list[tuple[str, Callable[[], None]]] = [
        ("blocks.", step),
        ("blocks.0.", lambda: write(pair.model.blocks[0].parameters)),
        ("head.weight", lambda: write(lambda: [pair.model.head.weight])),
        ("blocks.", lambda: write(lambda: params)),
    ]
    for name, change in changes:
        pair.model(x).square().mean().backward()
        loss = pair.model(x).square().mean()
        change()
        with refused(name, "written to between forward and backward"):
            loss.backward()
        te_fsdp.zero_grad(pair.model)
        te_fsdp.release_params(pair.model)
    # The forward of one step and the backward of the step before, whose weights are gone.
    old = pair.model(x).square().mean()
    pair.model(x).square().mean().backward()
    pair.optimizer.step()
    new = pair.model(x).square().mean()
    with refused("written to between forward and backward"):
        old.backward()
    te_fsdp.zero_grad(pair.model)
    del new
    # Nothing is wrong with a step between two whole microbatches, nor with a write before a forward.
    write(lambda: params)
    pair.model(x).square().mean().backward()


def errors_of_autograd_grad(strategy: str) -> None:
    """Call ``torch.autograd.grad`` for parameters, which raises, and for inputs, which works."""
    pair = Pair(strategy)
    x = pair.mine()[0]
    pair.whole_step()
    loss = pair.model(x).square().mean()
    trained = [p for p in pair.model.parameters() if p.requires_grad]
    if strategy == "optim_grads_params":  # shards, which are in no graph
        with pytest.raises(RuntimeError, match="not have been used in the graph"):
            torch.autograd.grad(loss, trained[:1])
    else:
        for some in (trained, trained[-1:]):
            with refused("torch.autograd.grad for", "loss.backward()"):
                torch.autograd.grad(loss, some, retain_graph=True)
    x = x.clone().requires_grad_()
    (actual,) = torch.autograd.grad(pair.model(x).square().mean(), x)
    (expected,) = torch.autograd.grad(pair.reference(x).square().mean(), x)
    pair.checks.close("input's gradient", actual, expected, 1e-4, "fp32 products in a different order")
    pair.model.zero_grad()
    pair.whole_step()


def stock_class() -> bool:
    """Return whether ``torch.nn.Module.zero_grad`` is torch's own after a model was sharded and trained."""
    pair = Pair("optim")
    pair.whole_step()
    return nn.Module.zero_grad.__module__ == "torch.nn.modules.module" and not hasattr(
        nn.Module.zero_grad, "__wrapped__"
    )
