"""Body of the random search: three steps of one drawn configuration, compared with stock TE in one process.

The oracle is that of `matrix.bodies`: rank 0 trains the unsharded model on the full batch. Outputs, gradients by
value, their norm and the updates of main weights are compared, within the bounds of `matrix.tolerances`. HFSDP has no
gradients over all replicas that one could read: there, norms and updates are.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from typing import Any

import harness
import torch
import torch.distributed as dist
from experts.model import Mixture
from parity.runs import shards
from torch import nn

from matrix.bodies import SEED, Check, Cut, Seen, _dense, _rms, batch
from matrix.configurations import MESHES, POLICIES, Configuration
from matrix.search_models import Stack
from matrix.search_oracle import CLIP, STEPS, Oracle, evaluate, optimizer_of, run, trained, uses_side, width
from matrix.tolerances import MANTISSA, rounding


class SearchCheck(Check):
    """The comparisons of one configuration. Experts without tokens have gradients and updates of zeros, to the bit."""

    path: dict[str, float]

    def shard(self, what: str, name: str, actual: torch.Tensor, info: Any) -> None:
        """Compare a parameter's gradient or update, box by box.

        The error of an update is relative to the path, since steps in opposite directions cancel, their errors do not.
        """
        expected = self.expected[f"{what} {name}"]
        if not expected.any():
            if left := float(_dense(actual).abs().sum()):
                self.findings.failures.append(f"{what} {name}: {left} where one process has zeros")
        elif what != "update":
            super().shard(what, name, actual, info)
        else:
            for box in info.boxes:
                self.update(name, _dense(actual)[box.local_slices()], expected[box.original_slices()])

    def update(self, name: str, actual: torch.Tensor, expected: torch.Tensor) -> None:
        """Compare a part of an update. Each step rounds the fp32 weight once, in both runs."""
        scale = self.path[name]
        rounding = 2 * self.steps * float(self.originals[name].abs().max()) * 2.0**-24 / scale
        self._close(f"update {name}", actual, expected, self.gradient_bound + rounding, scale)

    def norm(self, step: int, actual: torch.Tensor) -> None:
        """Compare the norm of all gradients, which is as close as they are."""
        expected = float(self.expected[f"norm {step}"])
        self._share(f"norm {step}", abs(float(actual) - expected) / expected, self.gradient_bound)


def trial(drawn: Configuration, *, spoil: bool = False) -> dict[str, float]:
    """Train a configuration and compare. Return the largest error of each kind as a share of its bound.

    Args:
        drawn: The configuration.
        spoil: Negative control: the last rank's tokens are others in the second step.
    """
    import te_fsdp

    alone = Oracle(drawn)
    meshes, model = sharded(drawn)
    alone.start_from(*_initial_dtypes(model))
    expected = Seen(alone.train())
    expected.send()
    weights = drawn.computes_in if drawn.weights == "fp32" else drawn.weights
    check = SearchCheck(drawn.recipe, weights, "linear", expected, alone.initial, gemms=drawn.gemms)
    check.steps, check.path = STEPS, alone.path
    check.initial(model)
    cut = Cut(meshes, drawn.sequence_parallel)
    before = {name: _dense(parameter).clone() for name, parameter, _ in shards(model)}
    optimizer = _sharded_optimizer(drawn, model)
    for step in range(STEPS):
        if drawn.evaluates:
            evaluate(drawn, model, cut.take(batch(width(drawn), "evaluation")[0]))
        if drawn.abandons:
            abandon(drawn, model, cut)
        for micro in range(drawn.microbatches):
            place = f"{step}.{micro}"
            x, target = (cut.take(tensor) for tensor in batch(width(drawn), place))
            if spoil and step == 1 and dist.get_rank() == dist.get_world_size() - 1:
                x = -x
            with context_of(drawn, model, is_last=micro == drawn.microbatches - 1):
                output = run(
                    drawn, model, x, target, drawn.microbatches * cut.tp_parts, uses_side(drawn, step)
                )
            check.values(f"output {place}", output, cut.take(expected.tensors[f"output {place}"]))
        finish(drawn, model)
        if drawn.outer != "optim":
            compare_gradients(model, check, step, alone.missing[step])
        if drawn.clips:
            check.norm(step, te_fsdp.clip_grad_norm_(model, CLIP))
        optimizer.step()
        model.zero_grad()
    compare_updates(drawn, model, optimizer, check, before, alone)
    try:
        return check.settle(drawn.ranks)["shares"]
    except AssertionError as error:
        raise AssertionError(f"{error}\n{growth_of_noise(drawn, model, expected)}") from None


def growth_of_noise(drawn: Configuration, model: nn.Module, expected: Seen) -> str:
    """Describe what one more rounding of the inputs changes in one process. Collective.

    A configuration in which it grows beyond the bounds deviates without a fault of the sharded model.
    """
    bits = {"fp32": 23}.get(drawn.weights, MANTISSA.get(drawn.recipe, (7,))[0])
    alone = Oracle(drawn, noise=rounding(bits))
    alone.start_from(*_initial_dtypes(model))
    seen = alone.train()
    if dist.get_rank():
        return ""
    pairs = [(name, seen[name].to(value.device), value) for name, value in expected.tensors.items()]
    relative = {name: _rms(value - other) / (_rms(value) or 1.0) for name, other, value in pairs}
    largest = max(relative, key=relative.__getitem__)
    return f"one process with inputs rounded once more to {bits} bits: {largest} differs by {relative[largest]:.3g}"


def _initial_dtypes(model: nn.Module) -> tuple[set[str], set[str]]:
    """Return names of unquantized parameters in fp32, and of parameters that are not sharded. Collective."""
    from te_fsdp.records import plan_of
    from te_fsdp.upstream import te as _te, torch_dtensor as _torch

    wide, whole = set(), set()
    for name, parameter, _ in shards(model):
        local, plan = _torch.local_of(parameter), plan_of(parameter)
        if local.dtype == torch.float32 and not _te.is_quantized(local):
            wide.add(name)
        if plan is not None and plan.storage.is_replicated:
            whole.add(name)
    several: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(several, (wide, whole))
    return set().union(*(part[0] for part in several)), set().union(*(part[1] for part in several))


def compare_gradients(model: nn.Module, check: SearchCheck, step: int, missing: set[str]) -> None:
    """Compare gradients by value."""
    for name, parameter, info in shards(model):
        if name in missing:
            check.absent(f"gradient {step} {name}", parameter.grad)
        elif parameter.grad is None:
            check.findings.failures.append(f"gradient {step} {name}: None, where one process has one")
        else:
            check.shard(f"gradient {step}", name, parameter.grad, info)


def compare_updates(
    drawn: Configuration,
    model: nn.Module,
    optimizer: Any,
    check: SearchCheck,
    before: dict[str, torch.Tensor],
    alone: Oracle,
) -> None:
    """Compare what the steps have added to main weights."""
    from te_fsdp.upstream import te as _te, torch_dtensor as _torch

    if drawn.outer == "optim":
        hybrid = drawn.recipe == "hybrid" and drawn.weights == "quantized"  # checkpoints do not store these
        for name, main in saved_mains(model, optimizer).items() if not hybrid else ():
            if f"update {name}" in check.expected:
                update, expected = main - alone.initial[name].cpu(), check.expected[f"update {name}"].cpu()
                check.update(name, update, expected)
        return
    for name, parameter, info in shards(model):
        if f"update {name}" in check.expected:
            low = _te.is_quantized(_torch.local_of(parameter)) or parameter.dtype != torch.float32
            main = optimizer.state[parameter]["master_param"] if low else parameter
            check.shard("update", name, _dense(main) - before[name], info)


def saved_mains(model: nn.Module, optimizer: Any) -> dict[str, torch.Tensor]:
    """Return unsharded main weights by name, as a checkpoint has them. Collective."""
    from pathlib import Path

    import te_fsdp
    from te_fsdp.checkpoint.reader import Contents

    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder, 0)
    path = Path(folder[0], "saved")
    te_fsdp.checkpoint.save(path, model, optimizer)
    contents = Contents.of_checkpoint(path)
    results = {}
    for name, described in contents.manifest.parameters.items():
        value, origin = contents.best_value(name, "auto")
        if origin == "main" or value.dtype == torch.float32:
            results[name] = value.full().float().view(described["shape"])
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder[0])
    return results


def abandon(drawn: Configuration, model: nn.Module, cut: Cut) -> None:
    """Run a microbatch that ``zero_grad`` discards."""
    import te_fsdp

    x, target = (cut.take(tensor) for tensor in batch(width(drawn), "abandoned"))
    with te_fsdp.no_sync(model):
        run(drawn, model, x, target, 1, False)
    model.zero_grad()


def context_of(
    drawn: Configuration, model: nn.Module, *, is_last: bool
) -> contextlib.AbstractContextManager[None]:
    """Return the context of one microbatch in the drawn schedule."""
    import te_fsdp

    if drawn.schedule == "microbatch":
        return te_fsdp.microbatch(model, is_last=is_last)
    if drawn.schedule == "sync":
        return te_fsdp.sync(model)
    if drawn.schedule in ("by hand", "auto sync"):
        te_fsdp.set_auto_sync(model, is_last and drawn.schedule == "auto sync")
    if drawn.schedule == "setter" and hasattr(model, "set_requires_gradient_sync"):  # not with no_shard
        model.set_requires_gradient_sync(is_last)
    waits = drawn.schedule == "start" or (drawn.schedule == "no_sync" and not is_last)
    return te_fsdp.no_sync(model) if waits else contextlib.nullcontext()


def finish(drawn: Configuration, model: nn.Module) -> None:
    """Reduce what waits, where the schedule does so by hand."""
    import te_fsdp

    if drawn.schedule == "start":
        te_fsdp.start_grad_reduce(model)
    if drawn.schedule in ("by hand", "start"):
        te_fsdp.finish_grad_reduce(model)
    if drawn.schedule == "by hand":
        te_fsdp.set_auto_sync(model, True)
        te_fsdp.release_params(model)


def sharded(drawn: Configuration) -> tuple[Any, nn.Module]:
    """Return the meshes and the sharded, initialized model."""
    from torch.distributed.fsdp import MixedPrecisionPolicy as Fsdp2Policy

    import te_fsdp

    meshes = te_fsdp.Meshes.build(**MESHES[drawn.mesh], device_type=harness.device_type())
    model = Stack(drawn, "meta", meshes)
    for name in drawn.exempt:
        module, _, number = name.partition(":")
        result = model.get_submodule(module)
        te_fsdp.fsdp_no_shard(list(result.parameters())[int(number)] if number else result)
    options: dict[str, Any] = {
        "strategy": {"": drawn.strategy, "blocks.0": drawn.first} if drawn.first else drawn.strategy,
        "outer_strategy": drawn.outer,
        "check_inputs": False,
    }
    if drawn.units:
        options["units"] = list(drawn.units)
    if drawn.precision.startswith("FSDP2"):
        options["mp_policy"] = Fsdp2Policy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    elif drawn.precision != "none":
        words = POLICIES[drawn.precision]
        dtypes = {field: word and getattr(torch, word) for field, word in words.items()}
        options["precision"] = te_fsdp.MixedPrecisionPolicy(**dtypes)
    if meshes.ep is not None:
        options["experts"] = [Mixture]
    te_fsdp.fully_shard(model, meshes, zero_copy_gradients=drawn.zero_copy, **options)
    te_fsdp.materialize(model, seed=SEED)
    return meshes, model


def _sharded_optimizer(drawn: Configuration, model: nn.Module) -> Any:
    """Return the drawn optimizer as te_fsdp has it."""
    import te_fsdp

    optimizer = optimizer_of(drawn, trained(model))
    if drawn.outer == "optim":
        return te_fsdp.shard_optimizer(optimizer)
    if drawn.optimizer == "fused, main weights":
        te_fsdp.main_weights(model, optimizer)
    return optimizer
