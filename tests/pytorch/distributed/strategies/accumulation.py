"""Bodies: gradient accumulation over microbatches."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import harness
import pytest
import torch
import torch.distributed as dist
from harness.collectives import recorded
from torch import nn

from strategies.bodies import compare, gradients, loss_of, parameters, patch_attributes, run, run_one_process
from strategies.models import batch, one_process, optimizer_of, sharded


class Pair:
    """A sharded model and the same in one process, each with its optimizer."""

    def __init__(self, strategy: Any, dp_replicate: int = 1, optimizer: str = "SGD") -> None:
        import te_fsdp

        self.meshes = te_fsdp.Meshes.build(dp_replicate=dp_replicate, device_type=harness.device_type())
        self.model, self.reference = sharded(self.meshes, strategy), one_process()
        self.optimizer = optimizer_of(optimizer, self.model)
        self.expected = optimizer_of(optimizer, self.reference)
        self.checks = harness.Comparisons()
        self.steps = 0

    def inputs(self, microbatches: int = 3) -> torch.Tensor:
        """Return the inputs of the next step, for all ranks."""
        return batch(self.steps, dist.get_world_size(), microbatches)

    def mine(self, microbatches: int = 3) -> torch.Tensor:
        """Return the inputs of the next step, for this rank."""
        return self.inputs(microbatches)[:, dist.get_rank()]

    def same_gradients(self, microbatches: int = 3, factor: float = 1.0) -> None:
        """Run backward in one process, and require the sharded model's gradients to be ``factor`` times its."""
        run_one_process(self.reference, self.inputs(microbatches))
        for gradient in gradients(self.reference).values():
            gradient.mul_(factor)
        compare(self.checks, "gradient of", gradients(self.model), gradients(self.reference))

    def same_step(self) -> None:
        """Step both, and require equal parameters."""
        self.optimizer.step()
        self.expected.step()
        self.optimizer.zero_grad()
        self.expected.zero_grad()
        compare(self.checks, "updated", parameters(self.model), parameters(self.reference))
        self.steps += 1

    def whole_step(self) -> None:
        """Run a step by a plain loop, to show that all works again."""
        run(self.model, self.mine(), "plain")
        self.same_gradients()
        self.same_step()


@contextlib.contextmanager
def refused(*words: str) -> Iterator[None]:
    """Expect an OrderError with these words."""
    from te_fsdp.errors import OrderError

    with pytest.raises(OrderError) as caught:
        yield
    for word in words:
        assert word in str(caught.value), (word, str(caught.value))


def errors_without_reduction(strategy: str, loop: str, dp_replicate: int = 1) -> dict[str, Any]:
    """Check that norm, scaling and step raise until gradients are reduced, if no microbatch was marked as last."""
    import te_fsdp

    pair = Pair(strategy, dp_replicate)
    for _ in range(2):
        context = te_fsdp.no_sync(pair.model) if loop == "no_sync" else contextlib.nullcontext()
        with context:
            run(pair.model, pair.mine(), "plain" if loop == "no_sync" else "more")
        with refused("SGD.step", "layer_norm_weight", "finish_grad_reduce"):
            pair.optimizer.step()
        with refused("grad_norm"):
            te_fsdp.clip_grad_norm_(pair.model, 1.0)
        with refused("scale_gradients"):
            te_fsdp.scale_gradients(pair.model, 2.0)
        te_fsdp.start_grad_reduce(pair.model)
        te_fsdp.finish_grad_reduce(pair.model)
        te_fsdp.finish_grad_reduce(pair.model)  # changes nothing
        te_fsdp.scale_gradients(pair.model, 2.0)
        pair.same_gradients(factor=2.0)
        pair.same_step()
    pair.whole_step()
    return pair.checks.require(3 * 20)


def weights_after_step(strategy: str, released: bool = True) -> dict[str, Any]:
    """Check that a step releases weights that are still unsharded when all gradients are reduced.

    Args:
        strategy: One that reduces each time and keeps weights.
        released: False: the release is broken; the next forward must gather the new weights by itself.
    """
    from torch.distributed.fsdp import FSDPModule

    from te_fsdp.sharded_model import get_sharded_model

    pair = Pair(strategy)
    for _ in range(2):
        run(pair.model, pair.mine(), "more")
        state: Any = get_sharded_model(pair.model)
        assert len(state.gathered()) == 3
        pair.same_gradients()
        if not released:
            with patch_attributes(FSDPModule, reshard=lambda unit: None):
                pair.optimizer.step()
            assert len(state.gathered()) == 3
            pair.expected.step()
            x = pair.inputs()[0, dist.get_rank()]
            pair.checks.close("loss", loss_of(pair.model, x), loss_of(pair.reference, x), 1e-5, "fp32")
            return pair.checks.require(1)
        pair.same_step()
        assert not state.gathered()
    return pair.checks.require(20)


def errors_of_stale_weights(strategy: str, checked: bool = True) -> dict[str, Any]:
    """Change unsharded weights other than by an optimizer of torch, and return the errors.

    Args:
        strategy: One that keeps weights.
        checked: False: without the check the forward runs with the old weights.
    """
    import te_fsdp
    from te_fsdp.sharded_model import get_sharded_model

    pair, state = Pair(strategy), None
    run(pair.model, pair.mine(), "more")
    state = get_sharded_model(pair.model)
    with torch.no_grad():
        for ours, theirs in zip(parameters(pair.model).values(), pair.reference.parameters(), strict=True):
            ours.mul_(1.5)
            theirs.mul_(1.5)
    x = pair.mine()[0]
    if checked:
        with refused("weight: ", "forward with an unsharded weight", "release_params"):
            pair.model(x)
        te_fsdp.release_params(pair.model)
    else:
        state.unsharded.versions.clear()
    pair.checks.close("loss", loss_of(pair.model, x), loss_of(pair.reference, x), 1e-5, "fp32")
    return pair.checks.require(1)


def flags(model: nn.Module) -> list[tuple[bool, ...]]:
    """Return FSDP2's settings for the end of the next backward."""
    from te_fsdp.upstream import fsdp2_units

    groups = [
        g
        for unit in model.modules()
        if fsdp2_units.is_fsdp_module(unit)
        for g in fsdp2_units.fsdp_parameter_groups(unit)
    ]
    return [(g.reduce_grads, g.all_reduce_grads, g.reshard_after_backward) for g in groups]


def nesting(strategy: str) -> dict[str, Any]:
    """Check that contexts restore the previous setting, whatever it was and however they end."""
    import te_fsdp

    pair = Pair(strategy)
    model = pair.model
    default = flags(model)
    seen = []
    for outer in (te_fsdp.no_sync, te_fsdp.sync, lambda m: te_fsdp.microbatch(m, is_last=False)):
        with outer(model):
            inside = flags(model)
            for inner in (te_fsdp.no_sync, te_fsdp.sync, lambda m: te_fsdp.microbatch(m, is_last=True)):
                with contextlib.suppress(KeyError), inner(model):
                    seen.append(flags(model))
                    raise KeyError
                assert flags(model) == inside
        assert flags(model) == default
    te_fsdp.set_auto_sync(model, False)
    off = flags(model)
    with te_fsdp.sync(model):
        assert flags(model) == default
    assert flags(model) == off
    te_fsdp.set_auto_sync(model, True)
    assert flags(model) == default
    assert default == [(True, True, True)] * 3
    assert [flag[:2] for flag in seen[0]] == [(False, False)] * 3
    return {"off": off, "default": default}


class Failure(Exception):
    """Raised on purpose, on all ranks at the same place."""


@contextlib.contextmanager
def _recovery_of_torch(raises: bool) -> Iterator[None]:
    """Simulate torch's own recovery (2.13 and later): raise, or drop every gradient, in any version as in 2.15."""
    from torch.distributed.fsdp import FSDPModule

    from te_fsdp.upstream import fsdp2_units

    def forget(root: Any) -> None:
        assert not raises
        for unit in filter(fsdp2_units.is_fsdp_module, root.modules()):
            for managed in fsdp2_units.managed_fsdp_params(unit):
                managed.sharded_param.grad = None
                if hasattr(managed, "_unsharded_param"):
                    managed._unsharded_param.grad = None

    has_one = hasattr(FSDPModule, "reset_iter_state")
    with patch_attributes(FSDPModule, **({"reset_iter_state": forget} if has_one else {})):
        yield


def failed_forward(strategy: str, dp_replicate: int = 1, stock: bool = True) -> dict[str, Any]:
    """Repeat a second microbatch whose forward raised; nothing is lost.

    Args:
        strategy: The strategy.
        dp_replicate: With 2, HSDP holds partly reduced gradients then.
        stock: Whether torch's own recovery would drop gradients, instead of raising.
    """
    import te_fsdp

    pair = Pair(strategy, dp_replicate)
    with _recovery_of_torch(raises=not stock):
        for _ in range(2):
            mine = pair.mine()
            with te_fsdp.microbatch(pair.model, is_last=False):
                (loss_of(pair.model, mine[0]) / 3).backward()
            _fail_once(pair.model.blocks[1].register_forward_hook)
            with pytest.raises(Failure), te_fsdp.microbatch(pair.model, is_last=False):
                loss_of(pair.model, mine[1])
            for index in (1, 2):
                with te_fsdp.microbatch(pair.model, is_last=index == 2):
                    (loss_of(pair.model, mine[index]) / 3).backward()
            pair.same_gradients()
            pair.same_step()
    return pair.checks.require(2 * 20)


def failed_backward(strategy: str, dp_replicate: int = 1, stock: bool = True) -> dict[str, Any]:
    """Raise in a backward after one unit. The step raises until all microbatches have run again."""
    import te_fsdp

    pair = Pair(strategy, dp_replicate)
    with _recovery_of_torch(raises=not stock):
        for zeroed_first in (True, False):
            mine = pair.mine()
            with te_fsdp.microbatch(pair.model, is_last=False):
                loss_of(pair.model, mine[0]).backward()
            _fail_once(pair.model.blocks[0].register_full_backward_pre_hook)
            with pytest.raises(Failure), te_fsdp.microbatch(pair.model, is_last=False):
                loss_of(pair.model, mine[1]).backward()
            if not zeroed_first:
                loss_of(pair.model, mine[1]).backward()
                with refused("a backward or a step has raised", "te_fsdp.zero_grad"):
                    pair.optimizer.step()
            te_fsdp.zero_grad(pair.model)
            run(pair.model, mine, "microbatch")
            pair.same_gradients()
            pair.same_step()
    return pair.checks.require(2 * 20)


def _fail_once(register: Any) -> None:
    def fail(*args: Any) -> None:
        handle.remove()
        raise Failure

    handle = register(fail)


def reduce_by_hand(strategy: Any, dp_replicate: int = 1) -> dict[str, Any]:
    """Turn automatic reduction off, and reduce at a chosen place."""
    import te_fsdp

    pair = Pair(strategy, dp_replicate)
    te_fsdp.set_auto_sync(pair.model, False)
    for _ in range(2):
        run(pair.model, pair.mine(), "plain")
        te_fsdp.start_grad_reduce(pair.model)
        te_fsdp.finish_grad_reduce(pair.model)
        _nothing_to_wait_for(pair.model)
        pair.same_gradients()
        pair.same_step()
    te_fsdp.set_auto_sync(pair.model, True)
    with te_fsdp.no_sync(pair.model):
        run(pair.model, pair.mine() * 3, "plain")
    te_fsdp.zero_grad(pair.model)
    pair.whole_step()
    return pair.checks.require(3 * 20)


def _nothing_to_wait_for(model: nn.Module) -> None:
    """Check that the current stream has waited for every reduction; values would show it only by chance, on GPUs."""
    from te_fsdp.sharded_model import get_sharded_model
    from te_fsdp.upstream import fsdp2_state as _fsdp2

    state: Any = get_sharded_model(model)
    for root in state.roots():
        comm = _fsdp2._comm(root)
        assert not getattr(comm, "_last_post_reduce_events", {}), "reductions without a wait"
        assert not getattr(comm, "reduce_scatter_states", [])


def unshard_by_hand(strategy: str) -> dict[str, Any]:
    """Unshard units by hand. They are not gathered again, and later changes raise."""
    import te_fsdp
    from te_fsdp.errors import PlacementError

    pair = Pair(strategy)
    pair.whole_step()
    with torch.no_grad():  # ranks compare the first evaluation
        loss_of(pair.model, pair.mine()[0])
    te_fsdp.start_param_gather(pair.model, ["blocks.0"])
    te_fsdp.finish_param_gather(pair.model)
    with recorded() as calls, torch.no_grad():
        loss = loss_of(pair.model, pair.mine()[0])
    assert not calls, calls
    pair.checks.close("loss", loss, loss_of(pair.reference, pair.mine()[0]), 1e-5, "fp32")
    te_fsdp.release_params(pair.model)
    pair.whole_step()
    for write in (torch.Tensor.mul_, lambda weight, factor: torch._foreach_mul_([weight], factor)):
        te_fsdp.start_param_gather(pair.model, ["blocks.1"])
        with torch.no_grad():
            write(parameters(pair.model)["blocks.1.fc1_weight"], 2.0)
        with refused("blocks.1.fc1_weight"):
            te_fsdp.finish_param_gather(pair.model, ["blocks.1"])
            pair.model(pair.mine()[0])
        te_fsdp.release_params(pair.model)
        with torch.no_grad():
            write(parameters(pair.model)["blocks.1.fc1_weight"], 0.5)
        pair.whole_step()
    with pytest.raises(PlacementError, match="is not a sharded unit"):
        te_fsdp.start_param_gather(pair.model, ["blocks.7"])
    return pair.checks.require(20)


def use_unsharded_parameters(strategy: str) -> dict[str, Any]:
    """Use ``model.parameters()`` between forward and backward. An optimizer of them raises.

    After the backward they are the shards. The norm accepts both.
    """
    from torch.distributed.tensor import DTensor

    import te_fsdp

    pair = Pair(strategy)
    for index, x in enumerate(pair.mine()):
        with te_fsdp.microbatch(pair.model, is_last=False):
            loss = loss_of(pair.model, x) / 3
            params = [p for p in pair.model.parameters() if p.requires_grad]
            assert not any(isinstance(p, DTensor) for p in params), index
            loss.backward()
        assert all(isinstance(p, DTensor) for p in pair.model.parameters()), index
    norm = te_fsdp.clip_grad_norm_(iter(params), 1e9)
    pair.same_gradients()
    expected = torch.nn.utils.clip_grad_norm_(pair.reference.parameters(), 1e9)
    pair.checks.close("norm", norm, expected, 1e-5, "fp32")
    with refused("SGD.step", "unsharded parameter"):
        torch.optim.SGD(params, lr=1.0).step()
    pair.same_step()
    return pair.checks.require(15)


class PartlyUsed(nn.Module):
    """A branch that only the last microbatch takes, and one that none does."""

    def __init__(self) -> None:
        super().__init__()
        device = harness.device()
        self.always, self.last, self.never = (nn.Linear(8, 8, device=device) for _ in range(3))

    def forward(self, x: torch.Tensor, last: bool) -> torch.Tensor:
        x = self.always(x)
        return x + self.last(x) if last else x


def norms_of_partly_used(strategies: list[tuple[str, str]]) -> list[float]:
    """Return norms of bf16 weights with fp32 gradients that only some microbatches produce.

    Args:
        strategies: Strategy and loop, each trained for a step; the first reduces in each backward.
    """
    import te_fsdp

    meshes = te_fsdp.Meshes.build(device_type=harness.device_type())
    inputs = torch.randn(3, 4, 8, generator=torch.Generator().manual_seed(dist.get_rank())).to(
        harness.device()
    )
    results = []
    for strategy, loop in strategies:
        torch.manual_seed(0)
        policy = te_fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        model = te_fsdp.fully_shard(
            nn.Sequential(PartlyUsed()), meshes, units="0", strategy=strategy, precision=policy
        )
        unit = model[0]
        for index, x in enumerate(inputs):
            last = index == 2
            context: Any = contextlib.nullcontext()
            if loop == "microbatch":
                context = te_fsdp.microbatch(model, is_last=last)
            elif loop == "no_sync" and not last:
                context = te_fsdp.no_sync(model)
            with context:
                unit(x, last).float().square().mean().backward()
        for name, p in parameters(model).items():
            if ".never." in name:  # no rank used it
                assert p.grad is None, name
            else:
                assert p.grad is not None and p.grad.dtype == torch.float32, name
        results.append(float(te_fsdp.clip_grad_norm_(model, 1e9)))
    return results


def reduce_in_bf16(strategy: str) -> dict[str, Any]:
    """Reduce in bf16 and accumulate in fp32 on one data-parallel rank. Each gradient counts once."""
    import te_fsdp

    meshes = te_fsdp.Meshes.build(device_type=harness.device_type())
    checks = harness.Comparisons()
    policy = te_fsdp.MixedPrecisionPolicy(main_grads_dtype=torch.float32, grad_comm_dtype=torch.bfloat16)
    for loop in ("plain", "microbatch", "no_sync"):
        model, reference = sharded(meshes, strategy, precision=policy), one_process()
        inputs = batch(0, 1, 3)
        run(model, inputs[:, 0], loop)
        run_one_process(reference, inputs)
        actual, wanted = gradients(model), gradients(reference)
        for name, gradient in wanted.items():
            why = "each of 3 gradients rounded to bf16 once: 2^-9 of the largest, and they may cancel"
            checks.close(f"{loop}: gradient of {name}", actual[name], gradient, 2**-7, why)
    return checks.require(3 * 8)
