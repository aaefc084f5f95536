"""Bodies: rare training loops, such as several models, other methods than forward, or steps that raise."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

import harness
import pytest
import torch
import torch.distributed as dist
from torch import nn

from strategies.accumulation import refused
from strategies.bodies import parameters

WIDTH, ROWS = 8, 4


class Net(nn.Module):
    """Three linear modules, one of which only some ranks may use, and a second way through them."""

    def __init__(self, seed: int = 0, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(seed)
        options = {"device": harness.device(), "dtype": dtype}
        self.first, self.side, self.head = (nn.Linear(WIDTH, WIDTH, **options) for _ in range(3))

    def forward(self, x: torch.Tensor, side: bool = True) -> torch.Tensor:
        x = torch.tanh(self.first(x))
        return self.head(self.side(x) if side else x)

    def generate(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            x = self(x)
        return x

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.first(x))

    def again(self, x: torch.Tensor, side: bool) -> torch.Tensor:
        """Run forward again."""
        return self.forward(x, side)


def inputs(step: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return the inputs of this rank."""
    generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
    return torch.randn(ROWS, WIDTH, generator=generator).to(harness.device(), dtype)


def shard(net: nn.Module, dp_replicate: int = 1, **options: Any) -> Any:
    """Shard on all ranks, each linear module a unit."""
    import te_fsdp

    meshes = te_fsdp.Meshes.build(dp_replicate=dp_replicate, device_type=harness.device_type())
    return te_fsdp.fully_shard(net, meshes, units=nn.Linear, **options)


def train_step(model: nn.Module, step: int = 0, dtype: torch.dtype = torch.float32) -> None:
    """Run one forward and backward."""
    model(inputs(step, dtype)).float().square().mean().backward()


def shards(model: nn.Module) -> list[torch.Tensor]:
    """Return this rank's parts of all parameters, copied."""
    from te_fsdp.upstream import torch_dtensor as _torch

    return [_torch.local_of(p.detach()).clone() for p in parameters(model).values()]


def same(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))


def two_models() -> None:
    """Step one optimizer over two models with a different gradient dtype, compared with one optimizer each."""
    import te_fsdp

    policy = te_fsdp.MixedPrecisionPolicy(main_params_dtype=None, main_grads_dtype=torch.float32)
    results = []
    for together in (True, False):
        models = [shard(Net(seed, torch.bfloat16), precision=policy) for seed in (0, 1)]
        params = [list(model.parameters()) for model in models]
        groups = [params[0] + params[1]] if together else params
        optimizers = [torch.optim.AdamW(group, lr=0.1) for group in groups]
        for step in range(2):
            for model in models:
                train_step(model, step, torch.bfloat16)
            for optimizer in optimizers:
                optimizer.step()
            assert {p.grad.dtype for group in params for p in group} == {torch.float32}
            for optimizer in optimizers:
                optimizer.zero_grad()
        results.append([part for model in models for part in shards(model)])
    assert same(*results)


def used_by_one_rank(strategy: str = "optim_grads_params", method: str = "") -> None:
    """Leave unreduced gradients of an exempt module on one rank. All ranks raise in the step, then reduce.

    Args:
        strategy: Of the rest.
        method: Another one than forward; backward then reduces at once.
    """
    import te_fsdp

    net = Net()
    reference = copy.deepcopy(net)
    te_fsdp.fsdp_no_shard(net.side)
    model = shard(net, strategy=strategy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if method:
        te_fsdp.register_forward_method(model, method)
    with te_fsdp.microbatch(model, is_last=bool(method)):
        run = getattr(model, method) if method else model
        run(inputs(), dist.get_rank() == 0).square().mean().backward()
    if not method:
        with refused("side.weight", "finish_grad_reduce"):
            optimizer.step()
        te_fsdp.finish_grad_reduce(model)
    optimizer.step()
    everyone = [torch.empty_like(inputs()) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, inputs())
    for rank, x in enumerate(everyone):
        (reference(x, rank == 0).square().mean() / len(everyone)).backward()
    checks = harness.Comparisons()
    for name, parameter in reference.named_parameters():
        checks.close(name, parameters(model)[name].grad, parameter.grad, 1e-5, "fp32, 32 terms reordered")
    checks.require(6)


def by_method() -> None:
    """Unshard weights by a method other than forward. Norms are correct, and changed weights are detected."""
    import te_fsdp

    model, other = shard(Net(), strategy="optim_grads"), shard(Net(), strategy="optim_grads")
    for net, encode in ((model, True), (other, False)):
        if encode:
            te_fsdp.register_forward_method(net, "encode")
        else:
            net.forward = net.encode
        with te_fsdp.microbatch(net, is_last=False):
            (net.encode if encode else net)(inputs()).square().mean().backward()
    norms = [float(te_fsdp.clip_grad_norm_(net.parameters(), 1e9)) for net in (model, other)]
    assert norms[0] == norms[1] > 0, norms
    with torch.no_grad():
        for parameter in parameters(model).values():
            parameter.mul_(2.0)
    with torch.no_grad():
        before, now = other.encode(inputs()), model.encode(inputs())
        te_fsdp.release_params(model)
        assert torch.equal(now, model.encode(inputs()))
    assert not torch.equal(now, before)


def generate() -> None:
    """Call a method that all-gathers and calls forward; nothing else changes."""
    import te_fsdp

    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("te_fsdp").addHandler(handler)
    model, reference = shard(Net()), Net()
    te_fsdp.register_forward_method(model, "generate")
    with torch.no_grad():
        assert torch.allclose(model.generate(inputs()), reference.generate(inputs()), atol=1e-6)
    with pytest.raises(RuntimeError):
        model.generate(inputs()[:, 1:])
    assert not messages, messages
    train_step(model)
    assert len(messages) == 1 and "interrupted" in messages[0], messages
    logging.getLogger("te_fsdp").removeHandler(handler)


def move_model() -> None:
    """Check that attributes of te_fsdp, TE and users on parameters survive ``model.to``."""
    import te_fsdp

    policy = te_fsdp.MixedPrecisionPolicy(main_params_dtype=None, main_grads_dtype=torch.float32)
    models = [shard(Net(0, torch.bfloat16), precision=policy) for _ in range(2)]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.1) for model in models]
    for parameter in models[0].parameters():
        parameter.noted = "by the user"
    for step in range(2):
        for model, optimizer in zip(models, optimizers, strict=True):
            train_step(model, step, torch.bfloat16)
            if model is models[0]:
                model.to(harness.device())  # with gradients
            optimizer.step()
            optimizer.zero_grad()
        before = [sorted(parameter.__dict__) for parameter in models[0].parameters()]
        models[0].to(harness.device())
        assert [sorted(parameter.__dict__) for parameter in models[0].parameters()] == before
    assert all({"noted", "_te_fsdp"} <= {*keys} for keys in before)
    assert same(*map(shards, models))


def failed_step() -> None:
    """Raise in an optimizer's kernel while main weights replace parameters; the next step must restart."""
    import te_fsdp

    models = [shard(Net(0, torch.bfloat16)) for _ in range(2)]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.1) for model in models]
    for model, optimizer in zip(models, optimizers, strict=True):
        te_fsdp.main_weights(model, optimizer)
    train_step(models[0], 0, torch.bfloat16)
    betas = optimizers[0].param_groups[0]["betas"]
    optimizers[0].param_groups[0]["betas"] = None
    with pytest.raises(TypeError):
        optimizers[0].step()
    optimizers[0].param_groups[0]["betas"] = betas
    optimizers[0].zero_grad()  # of the main weights
    train_step(models[0], 1, torch.bfloat16)
    with refused("a step has raised", "te_fsdp.zero_grad"):
        optimizers[0].step()
    te_fsdp.zero_grad(models[0])
    for model, optimizer in zip(models, optimizers, strict=True):
        train_step(model, 1, torch.bfloat16)
        optimizer.step()
    assert same(*map(shards, models))


def closures() -> None:
    """Step with a closure, which updates as usual or raises if gradients would be available too late."""
    import te_fsdp

    models = [shard(Net()) for _ in range(2)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]

    def closure_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[], torch.Tensor]:
        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(inputs()).square().mean()
            loss.backward()
            return loss

        return closure

    for _ in range(2):
        optimizers[0].step(closure_of(models[0], optimizers[0]))
        closure_of(models[1], optimizers[1])()
        optimizers[1].step()
    assert same(*map(shards, models))
    net = Net()
    te_fsdp.fsdp_no_shard(net.side)
    policy = te_fsdp.MixedPrecisionPolicy(main_params_dtype=None, main_grads_dtype=torch.float32)
    for model in (shard(net), shard(Net(0, torch.bfloat16), precision=policy)):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        before = shards(model)
        with refused("SGD.step(closure)"):
            optimizer.step(closure_of(model, optimizer))
        assert same(before, shards(model))


def broadcast(cases: list[dict[str, Any]]) -> None:
    """Change replicas on a rank other than the first. They become those of the first rank.

    Args:
        cases: Options of fully_shard, and how the names of parameters begin that both ranks hold then.
    """
    import te_fsdp
    from te_fsdp.upstream import torch_dtensor as _torch

    for options in cases:
        options = dict(options)
        copied = options.pop("copied", "")
        model = shard(Net(), **options)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        if options.get("outer_strategy") == "optim":
            te_fsdp.shard_optimizer(optimizer)
        train_step(model)
        optimizer.step()
        expected = shards(model)
        moments = [_torch.local_of(s["exp_avg"]).clone() for s in optimizer.state.values()]
        if dist.get_rank() == 1:
            with torch.no_grad():
                for name, parameter in parameters(model).items():
                    if name.startswith(copied):
                        parameter.add_(1.0)
        assert same(expected, shards(model)) == (dist.get_rank() == 0), options
        te_fsdp.broadcast_params(model, optimizer)
        assert same(expected, shards(model)), options
        assert same(moments, [_torch.local_of(s["exp_avg"]) for s in optimizer.state.values()]), options


def keep_graph() -> None:
    """Check that a step leaves parameters without gradients alone: a pending backward still needs them."""
    model = shard(Net(), strategy="no_shard")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    output = model(inputs())
    optimizer.step()
    output.square().mean().backward()
    optimizer.step()


def cleared_after_norm() -> None:
    """Check that gradients averaged over the outer axis for a norm, then filled with zeros, are new ones."""
    import te_fsdp

    models = [shard(Net(), dp_replicate=2, outer_strategy="optim") for _ in range(2)]
    optimizers = [te_fsdp.shard_optimizer(torch.optim.SGD(m.parameters(), lr=0.1)) for m in models]
    train_step(models[0])
    te_fsdp.clip_grad_norm_(models[0], 1.0)
    te_fsdp.zero_grad(models[0], set_to_none=False)
    for model, optimizer in zip(models, optimizers, strict=True):
        train_step(model, 1)
        te_fsdp.clip_grad_norm_(model, 1.0)
        optimizer.step()
    assert same(*map(shards, models))


def clipped_and_kept() -> None:
    """Check that gradients that were clipped and stepped with stay: the next backward adds to clipped ones."""
    import te_fsdp

    results = []
    for outer in ("no_shard", "optim"):
        net = Net()
        te_fsdp.fsdp_no_shard(net.side)
        model = shard(net, dp_replicate=2, outer_strategy=outer)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if outer == "optim":
            te_fsdp.shard_optimizer(optimizer)
        for step in range(3):
            train_step(model, step)
            te_fsdp.scale_gradients(model, 2.0)
            te_fsdp.clip_grad_norm_(model, 0.1)
            optimizer.step()
        results.append(shards(model))
    # An average of multiples, and a multiple of the average.
    for actual, expected in zip(*results, strict=True):
        assert torch.allclose(actual, expected, rtol=1e-5, atol=1e-7), (actual - expected).abs().max()


def errors_of_different_units() -> None:
    """Check that all ranks raise if some pass other units or strategies, instead of waiting for each other."""
    from te_fsdp.errors import MeshError

    odd = dist.get_rank() % 2
    for options in (
        {"strategy": "optim" if odd else "optim_grads"},
        {"strategy": {"first": "no_shard"} if odd else None},
        {"average_gradients": bool(odd)},
    ):
        with pytest.raises(MeshError, match="different arguments"):
            shard(Net(), **options)


def double_precision() -> None:
    """Compute the norm of fp64 gradients."""
    import te_fsdp

    model, reference = shard(Net(0, torch.float64)), Net(0, torch.float64)
    x = torch.ones(ROWS, WIDTH, dtype=torch.float64, device=harness.device())
    for net in (model, reference):
        net(x).square().mean().backward()
    expected = torch.nn.utils.clip_grad_norm_(reference.parameters(), 1e9)
    assert float(te_fsdp.clip_grad_norm_(model, 1e9)) == pytest.approx(float(expected), rel=1e-6)
